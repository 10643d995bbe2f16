"""`gdn_round` as one Mosaic GPU kernel for Hopper; the maths is in `gdn_round.py`.

In and out as there, q, k, v in bfloat16, heads of 128. A program owns (slot, value head, 64 value
columns) and holds S^T of them (64 x 128, f32) in registers. q, k and v are bf16 as they come from
the convolution, so that their products are exact; the state is f32, split into three bf16 parts
for its products. The norms of q and k are scalars of a row and ride with the row's other factors.
`prologue` makes what needs neither S nor v, a table of rows for each chunk. With those the kernel
solves (I + A) U = X by forward substitution over the 16 tokens, and adds each finished u to the
outputs behind it:

    X = beta v - beta e |k| (S k),   O = e |q| (S q)
    for i = 0..15:  u = X_i;   X_t -= A_ti u  (t > i);   O_t += G_ti u  (t >= i)
    S <- e_15 S + (U o w) K

One loop body serves every chunk, so that a row has the same bits wherever its chunk sits in the
window. Chunk 0 runs only where the state moves.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mmflash_jax.kernels.gdn_round import (
    BORDER,
    WINDOW,
    by_chunk,
    decay_products,
    inverse_norm,
)

DIM = 128  # of keys and of values
COLUMNS = 64  # value columns of a program: the M side of a wgmma tile
# Rows of the table: -A by columns, G by columns, then five factors of rows.
PULL, LOOK, WRITE, READ_K, READ_Q, TO_END, FORGET = 0, BORDER, 32, 33, 34, 35, 36
TABLE = 40  # a TMA copy must start at a multiple of 128 bytes
f32, bf16 = jnp.float32, jnp.bfloat16


def supported(key_dim: int, value_dim: int, dtype) -> bool:
    """Whether the kernel serves heads of these sizes in this dtype."""
    return key_dim == value_dim == DIM and dtype == bf16


def split3(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """f32 x = high + middle + low, each exact in bf16. By a bit mask: the compiler folds
    x - f32(bf16(x)) to zero on the card."""
    def cut(y):
        bits = lax.bitcast_convert_type(y, jnp.int32) & jnp.int32(-65536)
        return lax.bitcast_convert_type(bits, f32)

    high = cut(x)
    middle = cut(x - high)
    return high.astype(bf16), middle.astype(bf16), (x - high - middle).astype(bf16)


def prologue(q: jax.Array, k: jax.Array, beta: jax.Array, decay: jax.Array) -> jax.Array:
    """q, k [R, 48, nk, 128] bf16, beta, decay [R, 48, J] -> table [R, J, 3, TABLE, 16] f32."""
    ratio = beta.shape[2] // k.shape[2]
    q, k, beta, decay = (by_chunk(x) for x in (q, k, beta, decay))
    norm_q, norm_k = inverse_norm(q)[..., 0] * DIM**-0.5, inverse_norm(k)[..., 0]

    def dot(x):  # [..., i of k, t of x]
        return jnp.einsum("...id,...td->...it", k, x, preferred_element_type=f32)

    def heads(x):
        return jnp.repeat(x, ratio, 1)

    kk = heads(dot(k) * norm_k[..., None] * norm_k[..., None, :])
    kq = heads(dot(q) * norm_k[..., None] * norm_q[..., None, :])
    norm_q, norm_k = heads(norm_q), heads(norm_k)
    products, since = decay_products(decay)
    ahead = jnp.swapaxes(products, -1, -2)  # [.., i, t]: decay from after i to t
    pull = jnp.triu(kk * ahead * -beta[..., None, :], 1)
    factors = [beta, beta * since * norm_k, since * norm_q, products[..., -1, :] * norm_k,
               jnp.broadcast_to(since[..., -1:], since.shape)]
    factors += [jnp.zeros_like(since)] * (TABLE - WRITE - len(factors))
    return jnp.concatenate([pull, kq * ahead, jnp.stack(factors, -2)], -2)


def _kernel(interpreted, moved_ref, k_ref, q_ref, v_ref, table_ref, s_ref, o_ref, kq, v, table,
            bars):
    slot, head, column = (lax.axis_index(n) for n in ("slot", "head", "column"))
    columns = pl.ds(column * COLUMNS, COLUMNS)
    layout = plgpu.Layout.WGMMA
    # A tiled TMA copy has at most 5 dimensions: (slot, head) come flattened.
    at = slot * lax.axis_size("head") + head
    at_key = at // (s_ref.shape[0] // k_ref.shape[0])
    moved = moved_ref[slot]

    def fetch(chunk, bar):
        rows = pl.ds(chunk * BORDER, BORDER)
        for i, source in enumerate((k_ref, q_ref)):
            target = kq.at[pl.ds((2 * chunk + i) * BORDER, BORDER)]
            plgpu.copy_gmem_to_smem(source.at[at_key].at[rows], target, bar)
        plgpu.copy_gmem_to_smem(table_ref.at[at, chunk], table.at[chunk], bar)
        plgpu.copy_gmem_to_smem(v_ref.at[at, chunk, columns], v.at[chunk], bar)

    def product(pairs, n, init=None):
        """Sum of a @ b into one accumulator, smallest terms first."""
        if interpreted:  # wgmma with operands in registers is not interpreted
            y = jnp.zeros((COLUMNS, n), f32) if init is None else init
            for a, b in pairs:
                y = y + jnp.dot(a.astype(f32), b[...].astype(f32), precision="highest")
            return y

        def run(acc):
            for a, b in pairs:
                plgpu.wgmma(acc, a, b)

        def fresh(acc):
            run(acc)
            return acc[...]

        if init is None:
            return pl.run_scoped(fresh, plgpu.ACC((COLUMNS, n), f32))
        return pl.run_state(run)(plgpu.ACC.init(init))

    def transposed(ref):
        return ref.transpose((1, 0))

    token = plgpu.broadcasted_iota(jnp.int32, (COLUMNS, BORDER), 1, layout=layout)

    def chunk(c, state):
        def row(j):
            values = plgpu.load(table.at[c, j], layout=layout.reduce(0))
            return lax.broadcast_in_dim(values, (COLUMNS, BORDER), [1])

        both = transposed(kq.at[pl.ds(c * 2 * BORDER, 2 * BORDER)])
        read = product([(part, both) for part in split3(state)[::-1]], 2 * BORDER)
        values = plgpu.load(v.at[c], layout=layout).astype(f32)

        def substitute(i, carry):
            x, o = carry
            u = jnp.sum(jnp.where(token == i, x, 0.0), 1)
            u = lax.broadcast_in_dim(u, (COLUMNS, BORDER), [0])
            return x + u * row(PULL + i), o + u * row(LOOK + i)

        u, o = lax.fori_loop(0, BORDER, substitute, (
            row(WRITE) * values - row(READ_K) * read[:, :BORDER], row(READ_Q) * read[:, BORDER:]))

        @pl.when(c > 0)
        def _():
            o_ref.at[at, c - 1, columns][...] = o

        def advance():
            keys = kq.at[pl.ds(c * 2 * BORDER, BORDER)]
            parts = split3(u * row(TO_END))[::-1]
            return product([(part, keys) for part in parts], DIM, state * table[c, FORGET, 0])

        state = lax.cond(c < WINDOW - 1, advance, lambda: state)

        @pl.when(c == 0)
        def _():
            s_ref.at[at, columns][...] = state

        return state

    for c in range(1, WINDOW):
        fetch(c, bars[0])

    @pl.when(moved > 0)
    def _():
        fetch(0, bars[1])
        plgpu.barrier_wait(bars[1])

    state = plgpu.load(s_ref.at[at, columns], layout=layout, optimized=False)
    plgpu.barrier_wait(bars[0])
    lax.fori_loop(1 - moved, WINDOW, chunk, state)


# Under jit of its own the kernel is lowered and compiled once for all layers.
@functools.partial(jax.jit, static_argnames="interpret")
def gdn_round_mgpu(state: jax.Array, moved: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array,
                   beta: jax.Array, decay: jax.Array, interpret=None
                   ) -> tuple[jax.Array, jax.Array]:
    """As `gdn_round.gdn_round`. `interpret`: `plgpu.InterpretGPUParams()` to run without a card."""
    slots, heads = state.shape[:2]

    def tiled(shape):
        transforms = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32))
        return plgpu.SMEM(shape, bf16, transforms=transforms)

    def flat(x):
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def rows(x):
        return flat(jnp.moveaxis(x, 2, 1))

    in_place = jax.new_ref(flat(state))
    out = plgpu.kernel(
        functools.partial(_kernel, interpret is not None),
        out_type=jax.ShapeDtypeStruct((slots * heads, WINDOW - 1, DIM, BORDER), f32),
        grid=(slots, heads, DIM // COLUMNS), grid_names=("slot", "head", "column"),
        interpret=interpret,
        scratch_types=[tiled((2 * WINDOW * BORDER, DIM)),
                       plgpu.SMEM((WINDOW, COLUMNS, BORDER), bf16),
                       plgpu.SMEM((WINDOW, TABLE, BORDER), f32),
                       [plgpu.Barrier(num_arrivals=4 * (WINDOW - 1)),
                        plgpu.Barrier(num_arrivals=4)]],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(moved.astype(jnp.int32), rows(k), rows(q), flat(jnp.swapaxes(by_chunk(v), -1, -2)),
      flat(prologue(q, k, beta, decay)), in_place)
    out = out.reshape(slots, heads, WINDOW - 1, DIM, BORDER)
    out = jnp.moveaxis(out, (2, 4), (1, 2)).reshape(slots, (WINDOW - 1) * BORDER, heads, DIM)
    return out, in_place[...].reshape(state.shape)
