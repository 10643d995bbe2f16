"""Gated DeltaNet over one round, on absolute borders of 16 positions.

The state stands at a border; the window holds 48 positions from 16 before the newest border: a
chunk that may just have been completed (the state then moves by it), and the two chunks that hold
the tokens since, committed or in flight. For a chunk of 16 tokens on state S (dv, dk), decays d:

    D_ij = d_{j+1} ... d_i,  e_i = d_0 ... d_i      (running products: differences of log sums
                                                      lose digits after a hard reset)
    u_i  = beta_i (v_i - e_i S k_i) - sum_{j<i} beta_i (k_i . k_j) D_ij u_j     (j ascending)
    o_i  = e_i S q_i + sum_{j<=i} (q_i . k_j) D_ij u_j
    S'   = e_15 S + sum_j D_15,j u_j k_j^T

Grouping-invariant: a row reads the border state and the earlier tokens of its own chunk, in one
order, whatever was committed together. Unused rows hold k = v = beta = 0, d = 1 and add exact
zeros. Oracle: the token-by-token recurrence (HF `torch_recurrent_gated_delta_rule`).
"""

import jax
import jax.numpy as jnp

from mmflash_jax.layers import HIGHEST

BORDER = 16  # a state stands on a multiple of this


def _mm(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, precision=HIGHEST)


def decay_products(decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """decay [..., 16] -> D [..., 16, 16] (zero above the diagonal) and e [..., 16]."""
    size = decay.shape[-1]
    one_hot = jnp.eye(size, dtype=decay.dtype)
    rows = [jnp.broadcast_to(one_hot[0], decay.shape)]
    for i in range(1, size):
        rows.append(rows[-1] * decay[..., i:i + 1] + one_hot[i])
    products = jnp.stack(rows, -2)
    return products, products[..., 0] * decay[..., :1]


def chunk(state: jax.Array, q: jax.Array | None, k: jax.Array, v: jax.Array, beta: jax.Array,
          decay: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """16 tokens on state [..., dv, dk]; q, k [..., 16, dk], v [..., 16, dv], beta, decay [..., 16]
    -> outputs [..., 16, dv] (None without q) and the state after them."""
    products, since = decay_products(decay)
    pull = _mm("...id,...jd->...ij", k, k) * products * beta[..., None]
    rest = beta[..., None] * (v - since[..., None] * _mm("...vk,...ik->...iv", state, k))
    rows = []
    for i in range(BORDER):
        row = rest[..., i, :]
        for j in range(i):
            row = row - pull[..., i, j, None] * rows[j]
        rows.append(row)
    u = jnp.stack(rows, -2)
    moved = since[..., -1, None, None] * state + _mm(
        "...jv,...jk->...vk", u, k * products[..., -1, :, None])
    if q is None:
        return None, moved
    look = jnp.tril(_mm("...id,...jd->...ij", q, k) * products)
    out = since[..., None] * _mm("...vk,...ik->...iv", state, q)
    return out + _mm("...ij,...jv->...iv", look, u), moved


def gdn_round(state: jax.Array, moved: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array,
              beta: jax.Array, decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """state [R, J, dv, dk] f32; moved [R] bool, whether the window's first chunk is to be folded
    in; q, k [R, 48, nk, dk], v [R, 48, J, dv], beta, decay [R, 48, J], all f32. Value head j reads
    key head j // (J / nk). -> outputs of the last 32 positions [R, 32, J, dv], state at the
    newest border."""
    ratio = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, ratio, 2) for x in (q, k))
    q, k, v, beta, decay = (jnp.moveaxis(x, 2, 1) for x in (q, k, v, beta, decay))

    def part(i):
        cut = slice(BORDER * i, BORDER * (i + 1))
        return q[:, :, cut], k[:, :, cut], v[:, :, cut], beta[:, :, cut], decay[:, :, cut]

    _, after = chunk(state, None, *part(0)[1:])
    state = jnp.where(moved[:, None, None, None], after, state)
    first, after = chunk(state, *part(1))
    second, _ = chunk(after, *part(2))
    return jnp.moveaxis(jnp.concatenate([first, second], 2), 1, 2), state
