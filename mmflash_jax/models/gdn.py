"""Gated DeltaNet mixer of the target: a verify tile or a prefill chunk.

In: normed rows and the layer's `GdnState`. Out: the mixer's rows and a `GdnState`. Verify leaves
the state of committed tokens as it was (it may move to a newer border, by committed tokens only)
and appends the tile's rows to the tape; commit is a change of the slot's length, nothing more.
Source: HF `Qwen3_5GatedDeltaNet`; the border form is in `kernels/gdn_round.py`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from mmflash_jax.config import TargetConfig
from mmflash_jax.kernels.gdn_prefill import gdn_prefill
from mmflash_jax.kernels.gdn_round import BORDER, gdn_round
from mmflash_jax.kernels.gdn_round_mgpu import gdn_round_mgpu
from mmflash_jax.layers import causal_conv, linear, rms_norm
from mmflash_jax.models.tiles import Tile
from mmflash_jax.state import TAPE, GdnState


class GatedDeltaNet(nn.Module):
    """Weights (out, in): qkvzba [C + J*dv + 2J, H], conv [C, 4], norm [dv] (plain, not 1 + w)."""

    config: TargetConfig
    kernels: str = "xla"  # or "mosaic_gpu"

    def setup(self):
        c = self.config
        heads = c.linear_num_value_heads
        init = nn.initializers.normal(0.02)
        rows = c.conv_dim + c.value_dim + 2 * heads
        self.qkvzba = self.param("qkvzba", init, (rows, c.hidden_size))
        self.conv = self.param("conv", init, (c.conv_dim, c.linear_conv_kernel_dim))
        self.A_log = self.param("A_log", init, (heads,))
        self.dt_bias = self.param("dt_bias", init, (heads,))
        self.norm = self.param("norm", nn.initializers.ones, (c.linear_value_head_dim,))
        self.out = self.param("out", init, (c.hidden_size, c.value_dim))

    def _project(self, x: jax.Array):
        """x [M, H] -> conv inputs u [M, C], z [M, J*dv], beta and log decay g [M, J] f32."""
        c = self.config
        heads = c.linear_num_value_heads
        cuts = (c.conv_dim, c.conv_dim + c.value_dim, c.conv_dim + c.value_dim + heads)
        u, z, b, a = jnp.split(linear(x, self.qkvzba), cuts, -1)
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        rate = jnp.exp(self.A_log.astype(jnp.float32))
        g = -rate * jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias.astype(jnp.float32))
        return u, z, beta, g

    def _heads(self, window: jax.Array):
        """Conv inputs [..., T + 3, C] -> q, k [..., T, nk, dk], v [..., T, J, dv]."""
        c = self.config
        y = causal_conv(window, self.conv).astype(window.dtype)
        q, k, v = jnp.split(y, (c.key_dim, 2 * c.key_dim), -1)
        q, k = (x.reshape(*x.shape[:-1], c.linear_num_key_heads, c.linear_key_head_dim)
                for x in (q, k))
        return q, k, v.reshape(*v.shape[:-1], c.linear_num_value_heads, c.linear_value_head_dim)

    def _finish(self, o: jax.Array, z: jax.Array) -> jax.Array:
        """o [M, J, dv] f32, z [M, J*dv] -> [M, H]: norm, gate, out."""
        o = rms_norm(o, self.norm, self.config.rms_norm_eps, plus_one=False)
        o = o.reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))
        return linear(o.astype(z.dtype), self.out)

    def verify(self, x: jax.Array, cache: GdnState, tile: Tile) -> tuple[jax.Array, GdnState]:
        """x [M, H] packed rows -> rows [M, H], state."""
        past = self.config.linear_conv_kernel_dim - 1
        u, z, beta, g = self._project(x)
        length, border = tile.length[:, None], tile.border[:, None]
        # Positions of the conv window, from 16 + 3 before the newest border. The tape starts 3
        # before the old border, which is 16 below the new one where the state moves.
        first = (tile.border - BORDER * tile.moved)[:, None]
        position = border - BORDER - past + jnp.arange(3 * BORDER + past)
        window = _join(cache.conv, position - first + past, tile.unpack(u), position - length,
                       tile.width)
        at = position[:, past:]
        beta = _join(cache.beta, at - first, tile.unpack(beta), at - length, tile.width)
        decay = _join(cache.decay, at - first, tile.unpack(jnp.exp(g)), at - length, tile.width)
        real = (at < length + tile.width)[..., None]
        beta, decay = jnp.where(real, beta, 0.0), jnp.where(real, decay, 1.0)
        # Materialised: what follows is then one program at every width, with the same bits.
        window, beta, decay = lax.optimization_barrier((window, beta, decay))
        q, k, v = (jnp.where(real[..., None], y, 0) for y in self._heads(window))
        operation = gdn_round_mgpu if self.kernels == "mosaic_gpu" else gdn_round
        out, state = operation(cache.state, tile.moved, q, k, v, beta, decay)
        rows = (length - border) + jnp.arange(BORDER)
        out = jnp.take_along_axis(out, rows[..., None, None], 1)
        tape = GdnState(state, window[:, BORDER:BORDER + past + TAPE],
                        beta[:, BORDER:BORDER + TAPE], decay[:, BORDER:BORDER + TAPE])
        return self._finish(tile.pack(out), z), tape

    def prefill(self, x: jax.Array, cache: GdnState, valid: jax.Array
                ) -> tuple[jax.Array, GdnState]:
        """x [T, H], of which `valid` rows are real, following the border on which the one-slot
        cache [1, ...] stands -> rows [T, H], cache on the last border within the valid rows."""
        past = self.config.linear_conv_kernel_dim - 1
        u, z, beta, g = self._project(x)
        window = jnp.concatenate([cache.conv[0, :past], u])
        real = (jnp.arange(x.shape[0]) < valid)[:, None]
        beta, g = jnp.where(real, beta, 0.0), jnp.where(real, g, 0.0)
        q, k, v = (jnp.where(real[..., None], y, 0) for y in self._heads(window))
        keep = valid // BORDER * BORDER
        out, state = gdn_prefill(cache.state[0], q, k, v, beta, g, keep)

        def tape(rows, size):
            rows = jnp.pad(rows, ((0, size), (0, 0)))
            return lax.dynamic_slice_in_dim(rows, keep, size)[None]

        cache = GdnState(state[None], tape(window, past + TAPE), tape(beta, TAPE),
                         tape(jnp.exp(g), TAPE))
        return self._finish(out, z), cache


def _join(tape: jax.Array, in_tape: jax.Array, rows: jax.Array, in_rows: jax.Array, width: int
          ) -> jax.Array:
    """Rows of the window: those below the slot's length from the tape [R, n, X] at index in_tape
    [R, m], the others from the tile's rows [R, 16, X] at in_rows [R, m]; clipped outside both."""
    # Two gathers and a select become one fusion; a gather from a concatenation does not.
    def take(source, index):
        index = jnp.clip(index, 0, source.shape[1] - 1)
        return jnp.take_along_axis(source, index[..., None], 1, mode="promise_in_bounds")

    new = take(rows[:, :width].astype(tape.dtype), in_rows)
    return jnp.where((in_rows < 0)[..., None], take(tape, in_tape), new)
