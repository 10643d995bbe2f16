"""Gated DeltaNet over a prefill chunk: 64 positions at a time, in parallel inside, in turn between.

With L the running sum of the log decays in a block of 64, per head, on state S (dv, dk):

    A_ij = beta_i (k_i . k_j) e^{L_i - L_j} for j < i        u = (I + A)^-1 beta (v - e^L S k)
    o_i  = e^{L_i} S q_i + sum_{j<=i} (q_i . k_j) e^{L_i - L_j} u_j

L_i - L_j is summed over its own segment, never a difference of two long sums. The state returned
stands where the caller says (a border): rows from there on are left to the tape.
Sources: Gated DeltaNet (arXiv 2412.06464); HF `torch_chunk_gated_delta_rule`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mmflash_jax.kernels.gdn_round import l2_norm, matmul, unit_lower_inverse

BLOCK = 64


def _segments(g: jax.Array) -> jax.Array:
    """g [..., n] -> sums over j+1 .. i at [..., i, j], -inf above the diagonal."""
    n = g.shape[-1]
    low = jnp.tril(jnp.ones((n, n), bool), -1)
    spread = jnp.where(low, g[..., :, None], 0.0)
    return jnp.where(jnp.tril(jnp.ones((n, n), bool)), jnp.cumsum(spread, -2), -jnp.inf)


def gdn_prefill(state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array,
                g: jax.Array, keep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """state [J, dv, dk] f32; q, k [T, nk, dk] not yet normed, v [T, J, dv], beta, g [T, J] f32 (g
    the log decay), all zero at padding rows; keep: rows that the returned state contains
    -> outputs [T, J, dv] f32, state [J, dv, dk]."""
    t, heads, dv = v.shape
    ratio = heads // k.shape[1]
    q, k = (jnp.repeat(l2_norm(x), ratio, 1) for x in (q, k))
    q, v = q * k.shape[-1]**-0.5, v.astype(jnp.float32)
    pad = -t % BLOCK

    def blocks(x):
        x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
        return jnp.moveaxis(x.reshape(-1, BLOCK, *x.shape[1:]), 1, 2)  # [n, J, 64, ...]

    q, k, v, beta, g = (blocks(x) for x in (q, k, v, beta, g))
    kept = jnp.arange(t + pad).reshape(-1, BLOCK) < keep
    decays = jnp.exp(_segments(g))  # [n, J, 64, 64]
    since = jnp.exp(jnp.cumsum(g, -1))  # [n, J, 64]
    pull = jnp.tril(matmul("...id,...jd->...ij", k, k) * decays * beta[..., None], -1)
    inverse = unit_lower_inverse(pull)
    fresh = matmul("...ij,...jv->...iv", inverse, beta[..., None] * v)
    read = matmul("...ij,...jk->...ik", inverse, (beta * since)[..., None] * k)
    look = jnp.tril(matmul("...id,...jd->...ij", q, k) * decays)
    # For the state: decay from each kept row to the last kept one, and over all kept rows.
    kept_g = jnp.where(kept[:, None], g, 0.0)
    reversed_sum = jnp.cumsum(kept_g[..., ::-1], -1)[..., ::-1]
    later = jnp.pad(reversed_sum[..., 1:], ((0, 0), (0, 0), (0, 1)))
    to_end = jnp.where(kept[:, None], jnp.exp(later), 0.0)
    over = jnp.exp(reversed_sum[..., 0])

    def step(state, xs):
        q, k, fresh, read, look, since, to_end, over = xs
        u = fresh - matmul("jik,jvk->jiv", read, state)
        out = since[..., None] * matmul("jvk,jik->jiv", state, q) + matmul("jil,jlv->jiv", look, u)
        state = over[:, None, None] * state + matmul("jiv,jik->jvk", u, to_end[..., None] * k)
        return state, out

    state, out = lax.scan(step, state, (q, k, fresh, read, look, since, to_end, over))
    return jnp.moveaxis(out, 1, 2).reshape(t + pad, heads, dv)[:t], state
