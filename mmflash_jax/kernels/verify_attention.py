"""Attention of a verify tile over a slot's pages.

In: 16 query rows a slot at positions length .. length + 15, pages that already hold the block's
own keys. Out: the attended values. The row at position p sees the keys at positions <= p:

    o = sum_n sum_s exp(q k_ns - m) v_ns / sum_n sum_s exp(q k_ns - m),  m the largest score

Grouping-invariant: scores and partial sums are formed page by page, pages of absolute positions,
and added as a binary tree over page numbers, so that masked pages add exact zeros and neither the
row's place in the tile nor the number of pages read changes the arithmetic of a row.
"""

import jax
import jax.numpy as jnp

from mmflash_jax.layers import precision, row_sum, tree_sum


def verify_attention(q: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array,
                     length: jax.Array) -> jax.Array:
    """q [R, B, N, D]; keys, values [P, K, S, D]; pages [R, n] page ids in order of position;
    length [R] -> [R, B, N, D] in q's dtype. Query head h reads kv head h // (N / K)."""
    r, b, n, d = q.shape
    heads, page = keys.shape[1:3]
    exact = precision(q.dtype)
    q = q.reshape(r, b, heads, n // heads, d)
    k, v = (jnp.take(x, pages, axis=0, mode="clip") for x in (keys, values))
    score = jnp.einsum("rbkgd,rnksd->rnkbgs", q, k, precision=exact,
                       preferred_element_type=jnp.float32) * d**-0.5
    position = jnp.arange(pages.shape[1] * page).reshape(-1, page)
    seen = position[None, :, None] <= length[:, None, None, None] + jnp.arange(b)[:, None]
    score = jnp.where(seen[:, :, None, :, None, :], score, -jnp.inf)
    weight = jnp.exp(score - score.max((1, 5), keepdims=True))
    total = tree_sum(row_sum(weight)[..., 0], 1)
    out = jnp.einsum("rnkbgs,rnksd->rnkbgd", weight.astype(v.dtype), v, precision=exact,
                     preferred_element_type=jnp.float32)
    out = tree_sum(out, 1) / total[..., None]
    return jnp.moveaxis(out, 1, 2).reshape(r, b, n, d).astype(q.dtype)
