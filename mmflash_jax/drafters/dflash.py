"""The block-diffusion drafter of DFlash and MMFlash: all tokens of a block in one pass.

In: taps of committed tokens, from which `extend` makes context K/V rows; the anchor, the
committed length and the gathered context K/V, from which `draft` makes the ids of the block.
Out: rows for the caller's cache, draft ids. It owns no embedding and no head (they are the
target's), keeps no cache and knows no pages, pictures or target layers: positions are the plain
index in the expanded token sequence, image pads counted one by one (R6).
Letters: R slots, B block, S cache positions, M rows of taps, H hidden, N query heads, K kv heads,
D head size, V vocabulary. Source: z-lab `dflash`, SGLang and vLLM's DFlash models.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.config import DrafterConfig
from mmflash_jax.layers import apply_rope, linear, precision, rms_norm, rope_table, swiglu

matrix = nn.initializers.normal(0.02)
ones = nn.initializers.ones


class Mlp(nn.Module):
    """SwiGLU with fused gate and up."""

    config: DrafterConfig
    dtype: Any

    def setup(self):
        size, inner = self.config.hidden_size, self.config.intermediate_size
        self.gate_up = self.param("gate_up", matrix, (2 * inner, size), self.dtype)
        self.down = self.param("down", matrix, (size, inner), self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., H]
        return swiglu(x, self.gate_up, self.down)


class Layer(nn.Module):
    """One drafter layer. Its k and v projections serve the context and the block alike."""

    config: DrafterConfig
    window: int | None  # keys a row may look back on, itself included; None: all
    causal: bool  # whether a row of the block sees only the block's rows up to itself
    dtype: Any

    def setup(self):
        c = self.config
        n, k, d, h = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size
        self.input_norm = self.param("input_norm", ones, (h,), self.dtype)
        self.post_norm = self.param("post_norm", ones, (h,), self.dtype)
        self.qkv = self.param("qkv", matrix, ((n + 2 * k) * d, h), self.dtype)
        self.q_norm = self.param("q_norm", ones, (d,), self.dtype)
        self.k_norm = self.param("k_norm", ones, (d,), self.dtype)
        self.out = self.param("out", matrix, (h, n * d), self.dtype)
        self.mlp = Mlp(c, self.dtype)

    def context(
        self,
        features: jax.Array,  # [M, H]
        cos: jax.Array,  # [M, D] f32
        sin: jax.Array,  # [M, D] f32
    ) -> tuple[jax.Array, jax.Array]:
        """Rotated keys and values [M, K, D] of context features, which no layer norms again."""
        c = self.config
        kv = linear(features, self.qkv[c.num_attention_heads * c.head_dim:])
        k, v = jnp.split(kv.reshape(len(features), -1, c.head_dim), 2, axis=1)
        return apply_rope(self._norm(k, self.k_norm), cos, sin), v

    def __call__(
        self,
        x: jax.Array,  # [R, B, H]
        cos: jax.Array,  # [R, B, D] f32
        sin: jax.Array,  # [R, B, D] f32
        length: jax.Array,  # [R] i32
        keys: jax.Array,  # [R, K, S, D]
        values: jax.Array,  # [R, K, S, D]
    ) -> jax.Array:
        c = self.config
        n, k = c.num_attention_heads, c.num_key_value_heads
        rows = linear(self._norm(x, self.input_norm), self.qkv)
        q, block_k, block_v = jnp.split(rows.reshape(*x.shape[:2], -1, c.head_dim), (n, n + k), 2)
        q = apply_rope(self._norm(q, self.q_norm), cos, sin)
        block_k = apply_rope(self._norm(block_k, self.k_norm), cos, sin)
        mixed = self._attend(q, block_k, block_v, length, keys, values)
        x = x + linear(mixed, self.out)
        return x + self.mlp(self._norm(x, self.post_norm))

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, self.config.rms_norm_eps, plus_one=False)

    def _attend(self, q, block_k, block_v, length, keys, values) -> jax.Array:
        """softmax(q . [context | block]) over both parts, combined by their common maximum: the
        gathered context is never copied to stand beside the block. Returns [R, B, N * D]."""
        slots, block, heads, size = q.shape
        kv = keys.shape[1]

        def product(spec, a, b):
            return jnp.einsum(spec, a, b, precision=precision(self.dtype),
                              preferred_element_type=jnp.float32)

        # The query heads of a kv head stand under each other, [R, K, G * B, D]: plain batched
        # products (other orders of bfloat16 axes fail on some CPUs in jaxlib 0.10 and 0.11).
        q = jnp.moveaxis(q.reshape(slots, block, kv, -1, size), 1, 3).reshape(slots, kv, -1, size)
        block_k, block_v = block_k.swapaxes(1, 2), block_v.swapaxes(1, 2)  # [R, K, B, D]
        in_context, in_block = self._visible(length, block, keys.shape[2])

        def masked(logits, mask):  # [R, K, G * B, X], [R, B, X]
            logits = logits.reshape(slots, kv, -1, *mask.shape[1:]) * size**-0.5
            return jnp.where(mask[:, None, None], logits, -jnp.inf)

        past = masked(product("rkqd,rksd->rkqs", q, keys), in_context)  # [R, K, G, B, S]
        own = masked(product("rkqd,rkcd->rkqc", q, block_k), in_block)  # [R, K, G, B, B]
        # A row always sees itself, so that the maximum is finite.
        most = jnp.maximum(past.max(-1, keepdims=True, initial=-jnp.inf),
                           own.max(-1, keepdims=True))
        past, own = jnp.exp(past - most), jnp.exp(own - most)
        total = past.sum(-1, keepdims=True) + own.sum(-1, keepdims=True)
        past = past.astype(self.dtype).reshape(*q.shape[:3], -1)
        own = own.astype(self.dtype).reshape(*q.shape[:3], -1)
        mixed = (product("rkqs,rksd->rkqd", past, values)
                 + product("rkqc,rkcd->rkqd", own, block_v))
        mixed = mixed.reshape(*total.shape[:-1], size) / total  # [R, K, G, B, D]
        return jnp.moveaxis(mixed, 3, 1).astype(self.dtype).reshape(slots, block, heads * size)

    def _visible(self, length: jax.Array, block: int, cache: int) -> tuple[jax.Array, np.ndarray]:
        """Whether row b of a slot's block sees a context position, [R, B, S], and a row of the
        block, [1, B, B]. A window counts the row itself; without causality it has no end."""
        row, column, position = np.arange(block)[:, None], np.arange(block), jnp.arange(cache)
        in_block = column <= row if self.causal else np.ones((block, block), bool)
        in_context = position < length[:, None, None]
        if self.window is None:
            return jnp.broadcast_to(in_context, (len(length), block, cache)), in_block[None]
        in_block = in_block & (column > row - self.window)
        return in_context & (position > length[:, None, None] + row - self.window), in_block[None]


class DFlash(nn.Module):
    """The drafter. Parameters: fc, hidden_norm, norm, layers_{i}, and `mask_embedding` if the
    checkpoint has one; it then stands for the target's embedding row of the mask token."""

    config: DrafterConfig
    dtype: Any = jnp.bfloat16
    has_mask_embedding: bool = False

    def setup(self):
        c = self.config
        h, taps = c.hidden_size, len(c.target_layer_ids)
        self.fc = self.param("fc", matrix, (h, taps * h), self.dtype)
        self.hidden_norm = self.param("hidden_norm", ones, (h,), self.dtype)
        self.norm = self.param("norm", ones, (h,), self.dtype)
        if self.has_mask_embedding:
            self.mask_embedding = self.param("mask_embedding", matrix, (h,), self.dtype)
        self.layers = [Layer(c, window, causal, self.dtype)
                       for window, causal in zip(c.windows, c.causal, strict=True)]

    def extend(
        self,
        taps: jax.Array,  # [M, n_taps * H], in the order of `target_layer_ids`
        positions: jax.Array,  # [M] i32, index in the token sequence
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Context keys and values, one [M, K, D] array a layer, for committed tokens."""
        c = self.config
        want = len(c.target_layer_ids) * c.hidden_size
        if taps.ndim != 2 or taps.shape[1] != want:
            raise ValueError(f"taps have shape {taps.shape}, expected [rows, {want}]: "
                             f"{len(c.target_layer_ids)} taps of hidden size {c.hidden_size}")
        features = linear(taps.astype(self.dtype), self.fc)
        features = rms_norm(features, self.hidden_norm, c.rms_norm_eps, plus_one=False)
        cos, sin = rope_table(positions, c.rope)
        rows = [layer.context(features, cos, sin) for layer in self.layers]
        keys, values = zip(*rows, strict=True)
        return keys, values

    def block_ids(self, anchor: jax.Array) -> jax.Array:  # [R] -> [R, B]
        """What the block reads: the anchor in row 0, the mask token in all others (R26)."""
        rest = (len(anchor), self.config.block_size - 1)
        masks = jnp.full(rest, self.config.mask_token_id, anchor.dtype)
        return jnp.concatenate([anchor[:, None], masks], 1)

    def block_hidden(
        self,
        embed: jax.Array,  # [V, H], the target's
        anchor: jax.Array,  # [R] i32
        length: jax.Array,  # [R] i32: committed tokens with context K/V, the anchor's position
        keys: Sequence[jax.Array],  # a layer: [R, K, S, D], valid below `length`
        values: Sequence[jax.Array],  # a layer: [R, K, S, D]
    ) -> jax.Array:
        """Final normed hidden rows [R, B, H] of the block at positions length .. length + B - 1."""
        c = self.config
        if len(keys) != len(self.layers) or len(values) != len(self.layers):
            raise ValueError(f"context has {len(keys)} key and {len(values)} value arrays, "
                             f"expected one of each for {len(self.layers)} drafter layers")
        ids = self.block_ids(anchor)
        x = embed[ids].astype(self.dtype)
        if self.has_mask_embedding:
            x = jnp.where((ids == c.mask_token_id)[..., None], self.mask_embedding, x)
        cos, sin = rope_table(length[:, None] + jnp.arange(c.block_size), c.rope)
        for layer, k, v in zip(self.layers, keys, values, strict=True):
            x = layer(x, cos, sin, length, k, v)
        return rms_norm(x, self.norm, c.rms_norm_eps, plus_one=False)

    def draft(
        self,
        embed: jax.Array,  # [V, H]
        head: jax.Array,  # [V, H], `embed` again where the target ties them
        anchor: jax.Array,  # [R] i32
        length: jax.Array,  # [R] i32
        keys: Sequence[jax.Array],
        values: Sequence[jax.Array],
        rows: int | None = None,
    ) -> jax.Array:
        """Draft ids i32 [R, rows] for positions length + 1 .. length + rows: row j of the block
        predicts its own position, row 0 nothing; ties go to the lowest id. `rows` (static, all
        B - 1 by default) shortens what the head reads, never the block."""
        most = self.config.block_size - 1
        rows = most if rows is None else rows
        if not 1 <= rows <= most:
            raise ValueError(f"{rows} rows to draft, expected 1 to {most} "
                             f"(block_size {self.config.block_size} less the anchor)")
        hidden = self.block_hidden(embed, anchor, length, keys, values)
        logits = linear(hidden[:, 1:1 + rows], head, jnp.float32)
        return jnp.argmax(logits, -1).astype(jnp.int32)
