"""Causal attention of a prefill chunk over a slot's pages, one page at a time.

In: the chunk's query rows, pages that already hold the chunk's own keys. Out: attended values.
Online softmax over pages of absolute positions in ascending order, so that how a prompt was cut
into chunks does not change the order in which a row adds its keys.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mmflash_jax.layers import precision


def prefill_attention(q: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array,
                      start: jax.Array) -> jax.Array:
    """q [T, N, D] at positions start .. start + T - 1; keys, values [P, K, S, D]; pages [n] ids
    -> [T, N, D] in q's dtype."""
    t, n, d = q.shape
    heads, page = keys.shape[1:3]
    exact = precision(q.dtype)
    q = q.reshape(t, heads, n // heads, d)
    position = start + jnp.arange(t)

    def step(i, carry):
        top, total, out = carry
        k, v = keys[pages[i]], values[pages[i]]
        score = jnp.einsum("tkgd,ksd->kgts", q, k, precision=exact,
                           preferred_element_type=jnp.float32) * d**-0.5
        seen = i * page + jnp.arange(page) <= position[:, None]
        score = jnp.where(seen, score, -jnp.inf)
        higher = jnp.maximum(top, score.max(-1))
        shrink = jnp.exp(top - higher)
        weight = jnp.exp(score - higher[..., None])
        part = jnp.einsum("kgts,ksd->kgtd", weight.astype(v.dtype), v, precision=exact,
                          preferred_element_type=jnp.float32)
        return higher, total * shrink + weight.sum(-1), out * shrink[..., None] + part

    shape = (heads, n // heads, t)
    # The first page is always visible to every row, so `top` is finite after one step; it starts
    # at a finite number to keep exp(top - higher) from being nan.
    init = (jnp.full(shape, -1e30, jnp.float32), jnp.zeros(shape), jnp.zeros((*shape, d)))
    last = jnp.minimum((start + t + page - 1) // page, pages.shape[0])
    _, total, out = lax.fori_loop(0, last, step, init)
    out = out / total[..., None]
    return jnp.moveaxis(out, 2, 0).reshape(t, n, d).astype(q.dtype)
