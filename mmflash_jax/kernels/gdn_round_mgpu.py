"""`gdn_round` as one Mosaic GPU kernel for Hopper; the maths is in `gdn_round.py`.

In and out as there, q, k, v in bfloat16, heads of 128. A program owns (slot, value head, 64 value
columns) and holds S^T of them (64 x 128, f32) in registers. q, k and v are bf16 as they come from
the convolution, so that their products are exact; everything else is f32, split into three bf16
parts, and multiplied in enough passes to keep f32 accuracy. The norms of q and k are scalars of a
row and ride with the row's other factors. What needs neither S nor v comes from `prologue`:

    T = (I + A)^-1,  P = (Q K^T o D) T          per chunk
    X = beta v - beta e |k| (S k),   U = X T^T,   O = e |q| (S q) + X P^T,   S <- e_15 S + (U o w) K

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
    matmul,
    unit_lower_inverse,
)

DIM = 128  # of keys and of values
COLUMNS = 64  # value columns of a program: the M side of a wgmma tile
PARTS = 3  # bf16 parts of an f32
VECTORS = 8  # rows of factors; 5 are used: a TMA copy must start at a multiple of 128 bytes
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


def _inverse_norm(x: jax.Array) -> jax.Array:
    """x [..., dk] bf16 -> 1 / |x| as f32 [...]."""
    x = x.astype(f32)
    return lax.rsqrt(jnp.sum(x * x, -1) + 1e-6)


def prologue(q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array):
    """q, k [R, 48, nk, 128], v [R, 48, J, 128] bf16, beta, decay [R, 48, J] -> what the kernel
    reads: k over q [R, nk, 3, 32, 128] bf16, v^T [R, J, 3, 128, 16] bf16, row factors
    [R, J, 3, 8, 16] f32, T over P in three parts [R, J, 3, 3, 32, 16] bf16."""
    ratio = v.shape[2] // k.shape[2]
    q, k, v, beta, decay = (by_chunk(x) for x in (q, k, v, beta, decay))
    norm_q, norm_k = _inverse_norm(q) * DIM**-0.5, _inverse_norm(k)

    def dot(x, y):
        return jnp.einsum("...id,...jd->...ij", x, y, preferred_element_type=f32)

    def heads(x):
        return jnp.repeat(x, ratio, 1)

    kk = heads(dot(k, k) * norm_k[..., None] * norm_k[..., None, :])
    qk = heads(dot(q, k) * norm_q[..., None] * norm_k[..., None, :])
    norm_q, norm_k = heads(norm_q), heads(norm_k)
    products, since = decay_products(decay)
    inverse = unit_lower_inverse(jnp.tril(kk * products * beta[..., None], -1))
    seen = matmul("...ij,...jk->...ik", qk * products, inverse)
    both = jnp.stack(split3(jnp.concatenate([inverse, seen], -2)), -3)
    last = jnp.broadcast_to(since[..., -1:], since.shape)
    factors = [beta, beta * since * norm_k, since * norm_q, products[..., -1, :] * norm_k, last]
    factors += [jnp.zeros_like(last)] * (VECTORS - len(factors))
    return (jnp.concatenate([k, q], -2), jnp.swapaxes(v, -1, -2), jnp.stack(factors, -2), both)


def _kernel(interpreted, moved_ref, kq_ref, v_ref, factor_ref, tp_ref, s_ref, o_ref, kq, v,
            factor, tp, bars):
    slot, head, column = (lax.axis_index(n) for n in ("slot", "head", "column"))
    columns = pl.ds(column * COLUMNS, COLUMNS)
    layout = plgpu.Layout.WGMMA
    # A tiled TMA copy has at most 5 dimensions: (slot, head) come flattened.
    at = slot * lax.axis_size("head") + head
    at_key = at // (s_ref.shape[0] // kq_ref.shape[0])
    moved = moved_ref[slot]

    def fetch(chunk, count, bar):
        for source, target, rows in ((kq_ref.at[at_key], kq, 2 * BORDER),
                                     (factor_ref.at[at], factor, 1),
                                     (tp_ref.at[at], tp, 2 * PARTS * BORDER)):
            cut = pl.ds(chunk * rows, count * rows)
            plgpu.copy_gmem_to_smem(source.at[cut], target.at[cut], bar)
        cut = pl.ds(chunk, count)
        plgpu.copy_gmem_to_smem(v_ref.at[at].at[cut, columns], v.at[cut], bar)

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

    def chunk(c, state):
        def factors(j):
            row = plgpu.load(factor.at[c, j], layout=layout.reduce(0))
            return lax.broadcast_in_dim(row, (COLUMNS, BORDER), [1])

        both = transposed(kq.at[pl.ds(c * 2 * BORDER, 2 * BORDER)])
        read = product([(part, both) for part in split3(state)[::-1]], 2 * BORDER)
        values = plgpu.load(v.at[c], layout=layout).astype(f32)
        x = split3(factors(0) * values - factors(1) * read[:, :BORDER])
        # Six of nine products of parts: those above 2^-24 of the largest.
        pairs = [(2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)]
        uo = product([(x[i], transposed(tp.at[pl.ds((c * PARTS + j) * 2 * BORDER, 2 * BORDER)]))
                      for i, j in pairs], 2 * BORDER)

        @pl.when(c > 0)
        def _():
            o_ref.at[at, c - 1, columns][...] = factors(2) * read[:, BORDER:] + uo[:, BORDER:]

        def advance():
            keys = kq.at[pl.ds(c * 2 * BORDER, BORDER)]
            parts = split3(uo[:, :BORDER] * factors(3))[::-1]
            return product([(part, keys) for part in parts], DIM, state * factor[c, 4, 0])

        state = lax.cond(c < WINDOW - 1, advance, lambda: state)

        @pl.when(c == 0)
        def _():
            s_ref.at[at, columns][...] = state

        return state

    fetch(1, WINDOW - 1, bars[0])

    @pl.when(moved > 0)
    def _():
        fetch(0, 1, bars[1])
        plgpu.barrier_wait(bars[1])

    state = plgpu.load(s_ref.at[at, columns], layout=layout, optimized=False)
    plgpu.barrier_wait(bars[0])
    lax.fori_loop(1 - moved, WINDOW, chunk, state)


def gdn_round_mgpu(state: jax.Array, moved: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array,
                   beta: jax.Array, decay: jax.Array, interpret=None
                   ) -> tuple[jax.Array, jax.Array]:
    """As `gdn_round.gdn_round`. `interpret`: `plgpu.InterpretGPUParams()` to run without a card."""
    slots, heads = state.shape[:2]
    smem = plgpu.SMEM

    def tiled(shape):
        transforms = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32))
        return smem(shape, bf16, transforms=transforms)

    def flat(x):
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def rows(x):
        return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])

    kq, v, factor, tp = prologue(q, k, v, beta, decay)
    in_place = jax.new_ref(flat(state))
    out = plgpu.kernel(
        functools.partial(_kernel, interpret is not None),
        out_type=jax.ShapeDtypeStruct((slots * heads, WINDOW - 1, DIM, BORDER), f32),
        grid=(slots, heads, DIM // COLUMNS), grid_names=("slot", "head", "column"),
        interpret=interpret,
        scratch_types=[tiled((2 * WINDOW * BORDER, DIM)),
                       smem((WINDOW, COLUMNS, BORDER), bf16),
                       smem((WINDOW, VECTORS, BORDER), f32),
                       tiled((2 * PARTS * WINDOW * BORDER, BORDER)),
                       [plgpu.Barrier(num_arrivals=4)] * 2],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(moved.astype(jnp.int32), rows(kq), flat(v), flat(factor), rows(tp), in_place)
    out = out.reshape(slots, heads, WINDOW - 1, DIM, BORDER)
    out = jnp.moveaxis(out, (2, 4), (1, 2)).reshape(slots, (WINDOW - 1) * BORDER, heads, DIM)
    return out, in_place[...].reshape(state.shape)
