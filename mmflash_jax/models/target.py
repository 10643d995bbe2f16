"""The target: Qwen3.5-family text decoder with its vision tower, purely functional.

In: token ids and a `State` (or a slot of it). Out: hidden rows, taps for the drafter, and the
State after the pass, whose committed content is what it was: commit is done by `round.py`.
Refuses to know: drafters, sampling, acceptance. Source: HF `Qwen3_5ForConditionalGeneration`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mmflash_jax.config import TargetConfig
from mmflash_jax.kernels import gdn_round_mgpu
from mmflash_jax.kernels.gdn_round import BORDER
from mmflash_jax.layers import linear, mrope_table, rms_norm, swiglu
from mmflash_jax.models.attention import Attention
from mmflash_jax.models.gdn import GatedDeltaNet
from mmflash_jax.models.tiles import pad_rows, tile_of
from mmflash_jax.models.vision import Vision
from mmflash_jax.state import State, row_places


class Mlp(nn.Module):
    """SwiGLU with gate and up fused: gate_up [2I, H], down [H, I]."""

    config: TargetConfig

    def setup(self):
        c = self.config
        init = nn.initializers.normal(0.02)
        self.gate_up = self.param("gate_up", init, (2 * c.intermediate_size, c.hidden_size))
        self.down = self.param("down", init, (c.hidden_size, c.intermediate_size))

    def __call__(self, x: jax.Array) -> jax.Array:
        return swiglu(x, self.gate_up, self.down)


class Layer(nn.Module):
    """Pre-norm decoder layer around one of the two mixers."""

    config: TargetConfig
    kind: str
    kernels: str

    def setup(self):
        c = self.config
        init = nn.initializers.normal(0.02)
        self.input_norm = self.param("input_norm", init, (c.hidden_size,))
        self.post_norm = self.param("post_norm", init, (c.hidden_size,))
        full = self.kind == "full_attention"
        self.mixer = Attention(c) if full else GatedDeltaNet(c, self.kernels)
        self.mlp = Mlp(c)

    def __call__(self, x: jax.Array, mix) -> tuple[jax.Array, object]:
        """x [M, H]; mix(mixer, normed x) -> (rows, cache) -> x after the layer, cache."""
        eps = self.config.rms_norm_eps
        y, cache = mix(self.mixer, rms_norm(x, self.input_norm, eps, plus_one=True))
        x = x + y
        return x + self.mlp(rms_norm(x, self.post_norm, eps, plus_one=True)), cache


class Target(nn.Module):
    """`taps` are the layers whose outputs the drafter reads; `dtype` is the run's; `kernels` is
    "xla" or, where `default_kernels` says so, "mosaic_gpu"."""

    config: TargetConfig
    taps: tuple[int, ...] = ()
    dtype: jnp.dtype = jnp.bfloat16
    kernels: str = "xla"

    def setup(self):
        c = self.config
        init = nn.initializers.normal(0.02)
        self.embed = self.param("embed", init, (c.vocab_size, c.hidden_size))
        if not c.tie_word_embeddings:
            self.head = self.param("head", init, (c.vocab_size, c.hidden_size))
        self.norm = self.param("norm", init, (c.hidden_size,))
        self.layers = [Layer(c, kind, self.kernels) for kind in c.layer_types]
        if c.vision is not None:
            self.vision = Vision(c.vision, self.dtype)

    def encode(self, *frames) -> jax.Array:
        """Vision features; arguments and result as in `models.vision.Vision`."""
        return self.vision(*frames)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., H] after the final norm -> float32 [..., V]."""
        head = self.embed if self.config.tie_word_embeddings else self.head
        rows = hidden.reshape(-1, hidden.shape[-1])  # in whole tiles, as every other product
        logits = linear(pad_rows(rows), head, jnp.float32)[:len(rows)]
        return logits.reshape(*hidden.shape[:-1], -1)

    def verify(self, ids: jax.Array, state: State, pages: int
               ) -> tuple[jax.Array, jax.Array, State]:
        """One pass over ids [R, W] at positions length .. length + W - 1 of each slot, reading
        the slot's first `pages` pages (static). -> hidden after the final norm [R, W, H], taps
        [R, W, len(taps)*H] (the residual stream after each tapped layer, R12), and the state
        with the rows' keys, values and tape written past each slot's length."""
        slots, width = ids.shape
        pool, _, page, _ = _page_shape(state)
        tile = tile_of(state, width, pages, page, pool)
        x = tile.pack(self.embed[ids].astype(self.dtype))
        position = (state.slots.length + state.slots.rope_delta)[:, None] + jnp.arange(width)
        position = tile.pack(position[..., None])[:, 0]
        cos, sin = mrope_table(jnp.broadcast_to(position, (3, *position.shape)),
                               self.config.rope, self.config.mrope_section)

        def attend(i):
            return lambda mixer, y: mixer.verify(y, cos, sin, state.attention[i], tile)

        def recur(i):
            return lambda mixer, y: mixer.verify(y, state.gdn[i], tile)

        x, taps, attention, gdn = self._run(x, attend, recur)
        state = state.replace(attention=attention, gdn=gdn,
                              slots=state.slots.replace(border=tile.border))

        def unpack(y):
            return y[:slots * width].reshape(slots, width, -1)

        return unpack(self._norm(x)), unpack(taps), state

    def prefill(self, ids: jax.Array, positions: jax.Array, valid: jax.Array,
                features: jax.Array | None, slot: jax.Array, state: State
                ) -> tuple[jax.Array, jax.Array, State]:
        """One chunk of a prompt: ids [T], 3-D positions [3, T], of which `valid` are real, into
        `slot` behind its length, which must be a border. features [T, H] replace the embeddings
        of image and video tokens. -> hidden of the last valid row [H], taps [T, len(taps)*H],
        state with the chunk committed except for the slot's length."""
        c = self.config
        pool, _, page, _ = _page_shape(state)
        start, pages = state.slots.length[slot], state.pages[slot]
        row = jnp.arange(ids.shape[0])
        places = row_places(pages, start + row, row < valid, page, pool)
        x = self.embed[ids].astype(self.dtype)
        if features is not None:
            seen = jnp.isin(ids, jnp.array([c.image_token_id, c.video_token_id]))
            x = jnp.where(seen[:, None], features.astype(self.dtype), x)
        cos, sin = mrope_table(positions, c.rope, c.mrope_section)

        def attend(i):
            return lambda mixer, y: mixer.prefill(y, cos, sin, state.attention[i], places, pages,
                                                  start)

        def recur(i):
            mine = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, slot, 1), state.gdn[i])
            return lambda mixer, y: mixer.prefill(y, mine, valid)

        x, taps, attention, rows = self._run(x, attend, recur)
        gdn = tuple(
            jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, slot, 0), old, new)
            for old, new in zip(state.gdn, rows, strict=True))
        border = (start + valid) // BORDER * BORDER
        state = state.replace(attention=attention, gdn=gdn, slots=state.slots.replace(
            border=state.slots.border.at[slot].set(border)))
        last = jax.lax.dynamic_slice_in_dim(x, valid - 1, 1)
        return self._norm(last)[0], taps, state

    def _norm(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.norm, self.config.rms_norm_eps, plus_one=True)

    def _run(self, x, attend, recur):
        """All layers on packed rows x [M, H] -> x, taps [M, len(taps)*H], caches by kind."""
        attention, gdn, outputs = [], [], {}
        for i, layer in enumerate(self.layers):
            full = layer.kind == "full_attention"
            caches = attention if full else gdn
            x, cache = layer(x, (attend if full else recur)(len(caches)))
            caches.append(cache)
            if i in self.taps:
                outputs[i] = x
        taps = [outputs[i] for i in self.taps]
        joined = jnp.concatenate(taps, -1) if taps else jnp.zeros((x.shape[0], 0), x.dtype)
        return x, joined, tuple(attention), tuple(gdn)


def default_kernels(config: TargetConfig, dtype) -> str:
    """The fastest kernels that serve this target on the first device."""
    fits = gdn_round_mgpu.supported(config.linear_key_head_dim, config.linear_value_head_dim, dtype)
    hopper = "H100" in _device_kind() or "H200" in _device_kind()
    return "mosaic_gpu" if fits and hopper else "xla"


def _device_kind() -> str:
    return jax.devices()[0].device_kind


def _page_shape(state: State) -> tuple[int, int, int, int]:
    """Pool size, kv heads, positions of a page, head size."""
    pool, heads, page, size = state.attention[0].keys.shape
    return pool, heads, page, size
