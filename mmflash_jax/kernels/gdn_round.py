"""Gated DeltaNet over one round, on absolute borders of 16 positions.

The state stands at a border; the window holds 48 positions from 16 before the newest border: a
chunk that may just have been completed (the state then moves by it), and the two chunks that hold
the tokens since, committed or in flight. For a chunk of 16 tokens on state S (dv, dk), decays d,
with q and k over their l2 norms, q also over sqrt(dk):

    D_ij = d_{j+1} ... d_i,  e_i = d_0 ... d_i      (running products: differences of log sums
                                                      lose digits after a hard reset)
    u    = (I + A)^-1 beta (v - e S k),   A_ij = beta_i (k_i . k_j) D_ij for j < i
    o_i  = e_i S q_i + sum_{j<=i} (q_i . k_j) D_ij u_j
    S'   = e_15 S + sum_j D_15,j u_j k_j^T

Grouping-invariant: a row reads the border state and the earlier tokens of its own chunk, in one
order, whatever was committed together. Unused rows hold q = k = v = beta = 0, d = 1 and add exact
zeros. Oracle: the token-by-token recurrence (HF `torch_recurrent_gated_delta_rule`).
`gdn_round_mgpu.py` is the same as a kernel for Hopper.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from mmflash_jax.layers import HIGHEST, row_sum

BORDER = 16  # a state stands on a multiple of this
WINDOW = 3  # chunks of BORDER positions


def matmul(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Contraction in true float32: the state forgives nothing less."""
    return jnp.einsum(spec, x, y, precision=HIGHEST)


def inverse_norm(x: jax.Array) -> jax.Array:
    """x [..., dk] -> 1 over the root of its sum of squares, float32 [..., 1]."""
    x = x.astype(jnp.float32)
    return lax.rsqrt(row_sum(x * x) + 1e-6)


def l2_norm(x: jax.Array) -> jax.Array:
    """x [..., dk] in float32 over the root of its sum of squares."""
    return x.astype(jnp.float32) * inverse_norm(x)


def unit_lower_inverse(below: jax.Array) -> jax.Array:
    """(I + below)^-1 for strictly lower triangular below [..., n, n]."""
    eye = jnp.eye(below.shape[-1], dtype=below.dtype)
    return solve_triangular(eye + below, jnp.broadcast_to(eye, below.shape), lower=True,
                            unit_diagonal=True)


def decay_products(decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """decay [..., 16] -> D [..., 16, 16] (zero above the diagonal) and e [..., 16]."""
    i, j, t = (lax.broadcasted_iota(jnp.int32, (BORDER,) * 3, axis) for axis in range(3))
    factors = jnp.where((j < t) & (t <= i), decay[..., None, None, :], 1.0)
    products = jnp.where((j <= i)[..., 0], jnp.prod(factors, -1), 0.0)
    return products, products[..., 0] * decay[..., :1]


def by_chunk(x: jax.Array) -> jax.Array:
    """[R, 48, heads, ...] -> [R, heads, 3, 16, ...]."""
    x = x.reshape(x.shape[0], WINDOW, BORDER, *x.shape[2:])
    return jnp.moveaxis(x, 3, 1)


def gdn_round(state: jax.Array, moved: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array,
              beta: jax.Array, decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """state [R, J, dv, dk] f32; moved [R] bool, whether the window's first chunk is to be folded
    in; q, k [R, 48, nk, dk] not yet normed, v [R, 48, J, dv], beta, decay [R, 48, J] f32. Value
    head j reads key head j // (J / nk). -> outputs of the last 32 positions [R, 32, J, dv] f32,
    state at the newest border."""
    ratio = v.shape[2] // k.shape[2]
    q = l2_norm(q) * k.shape[-1]**-0.5
    q, k = (jnp.repeat(by_chunk(x), ratio, 1) for x in (q, l2_norm(k)))
    v, beta, decay = (by_chunk(x.astype(jnp.float32)) for x in (v, beta, decay))
    products, since = decay_products(decay)
    pull = matmul("...id,...jd->...ij", k, k) * products * beta[..., None]
    inverse = unit_lower_inverse(jnp.tril(pull, -1))
    look = jnp.tril(matmul("...id,...jd->...ij", q, k) * products)
    to_end = k * products[..., -1, :, None]

    def corrected(c, state):
        seen = since[:, :, c, :, None] * matmul("...vk,...ik->...iv", state, k[:, :, c])
        rest = beta[:, :, c, :, None] * (v[:, :, c] - seen)
        return matmul("...ij,...jv->...iv", inverse[:, :, c], rest)

    def after(c, state, u):
        return since[:, :, c, -1, None, None] * state + matmul(
            "...jv,...jk->...vk", u, to_end[:, :, c])

    def output(c, state, u):
        out = since[:, :, c, :, None] * matmul("...vk,...ik->...iv", state, q[:, :, c])
        return out + matmul("...ij,...jv->...iv", look[:, :, c], u)

    folded = after(0, state, corrected(0, state))
    state = jnp.where(moved[:, None, None, None], folded, state)
    u = corrected(1, state)
    following = after(1, state, u)
    out = [output(1, state, u), output(2, following, corrected(2, following))]
    return jnp.moveaxis(jnp.concatenate(out, 2), 1, 2), state
