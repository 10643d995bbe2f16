"""Gated full attention of the target: a verify tile or a prefill chunk over paged keys.

In: normed rows, rotary tables, pages, where this pass's rows go. Out: the mixer's rows and the
pages with the new rows written. Knows nothing of acceptance: rows past a slot's length are written
and never read. Source: HF `Qwen3_5Attention`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mmflash_jax.config import TargetConfig
from mmflash_jax.kernels.prefill_attention import prefill_attention
from mmflash_jax.kernels.verify_attention import verify_attention
from mmflash_jax.layers import apply_rope, linear, rms_norm
from mmflash_jax.models.tiles import Tile
from mmflash_jax.state import KvPages, write_rows


class Attention(nn.Module):
    """Weights (out, in): qkv [2ND + 2KD, H] with query and gate interleaved per head."""

    config: TargetConfig

    def setup(self):
        c = self.config
        rows = 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
        init = nn.initializers.normal(0.02)
        self.qkv = self.param("qkv", init, (rows, c.hidden_size))
        self.q_norm = self.param("q_norm", init, (c.head_dim,))
        self.k_norm = self.param("k_norm", init, (c.head_dim,))
        self.out = self.param("out", init, (c.hidden_size, c.num_attention_heads * c.head_dim))

    def _project(self, x: jax.Array, cos: jax.Array, sin: jax.Array):
        """x [M, H], cos, sin [M, rotary] -> q [M, N, D], gate [M, N*D], k, v [M, K, D]."""
        c = self.config
        m, n, kv, d = x.shape[0], c.num_attention_heads, c.num_key_value_heads, c.head_dim
        y = linear(x, self.qkv)
        q, gate = jnp.split(y[:, :2 * n * d].reshape(m, n, 2 * d), 2, -1)
        k, v = jnp.split(y[:, 2 * n * d:].reshape(m, 2 * kv, d), 2, 1)
        q = rms_norm(q, self.q_norm, c.rms_norm_eps, plus_one=True)
        k = rms_norm(k, self.k_norm, c.rms_norm_eps, plus_one=True)
        return apply_rope(q, cos, sin), gate.reshape(m, n * d), apply_rope(k, cos, sin), v

    def _finish(self, attended: jax.Array, gate: jax.Array) -> jax.Array:
        gate = jax.nn.sigmoid(gate.astype(jnp.float32)).astype(gate.dtype)
        return linear(attended.reshape(gate.shape) * gate, self.out)

    def verify(self, x: jax.Array, cos: jax.Array, sin: jax.Array, cache: KvPages, tile: Tile
               ) -> tuple[jax.Array, KvPages]:
        """x [M, H] packed rows -> rows [M, H], pages."""
        q, gate, k, v = self._project(x, cos, sin)
        cache = write_rows(cache, tile.page_ids, tile.offsets, k, v)
        attended = verify_attention(tile.unpack(q), cache.keys, cache.values, tile.pages,
                                    tile.length)
        return self._finish(tile.pack(attended), gate), cache

    def prefill(self, x: jax.Array, cos: jax.Array, sin: jax.Array, cache: KvPages,
                places: tuple[jax.Array, jax.Array], pages: jax.Array, start: jax.Array
                ) -> tuple[jax.Array, KvPages]:
        """x [T, H]; places: page ids and offsets [T]; pages [n] of the slot -> rows, pages."""
        q, gate, k, v = self._project(x, cos, sin)
        cache = write_rows(cache, *places, k, v)
        attended = prefill_attention(q, cache.keys, cache.values, pages, start)
        return self._finish(attended, gate), cache
