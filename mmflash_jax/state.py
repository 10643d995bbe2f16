"""Every array that outlives a call, with its axes.

Letters: R slots, P pages, S positions of a page, K kv heads, D head size, J GDN value heads,
C GDN conv channels, V vocabulary, E stop ids. Rejected work is never undone, only never read: all
that makes a row "committed" is that its position lies below `Slots.length`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from mmflash_jax.config import DrafterConfig, TargetConfig
from mmflash_jax.kernels.gdn_round import BORDER

TAPE = 2 * BORDER - 1  # tokens a tape holds: 15 before a round and the 16 of the round
RUNNING, STOP, LENGTH = 0, 1, 2  # Slots.finish


class KvPages(struct.PyTreeNode):
    """Keys (after norm and rotary) and values of one attention layer, in pages of positions.
    The drafter's context K/V has the same form and the same page table."""

    keys: jax.Array  # [P, K, S, D]
    values: jax.Array  # [P, K, S, D]


class GdnState(struct.PyTreeNode):
    """One Gated DeltaNet layer: its state at the border, and the tape of the tokens since."""

    state: jax.Array  # [R, J, dv, dk] float32, after the tokens below the border
    conv: jax.Array  # [R, 3 + TAPE, C] conv inputs of positions border - 3 .. border + TAPE - 1
    beta: jax.Array  # [R, TAPE, J] float32 write strength of positions border ..
    decay: jax.Array  # [R, TAPE, J] float32 factor on the state, exp(g)


class Slots(struct.PyTreeNode):
    """What is known of each request. A slot that is not active commits nothing."""

    active: jax.Array  # [R] bool
    finish: jax.Array  # [R] i32 RUNNING, STOP or LENGTH
    length: jax.Array  # [R] i32 committed tokens below the anchor; the anchor's position
    border: jax.Array  # [R] i32 position at which the GDN states stand
    anchor: jax.Array  # [R] i32 last committed token, not yet seen by the target
    rope_delta: jax.Array  # [R] i32 rotary position minus sequence index (pictures)
    remaining: jax.Array  # [R] i32 tokens that may still be emitted
    stop_ids: jax.Array  # [R, E] i32, -1: unused
    seed: jax.Array  # [R, 2] u32, high and low word
    temperature: jax.Array  # [R] f32, 0: greedy
    top_p: jax.Array  # [R] f32, 1: off
    top_k: jax.Array  # [R] i32, 0: off
    min_p: jax.Array  # [R] f32, 0: off
    presence: jax.Array  # [R] f32
    frequency: jax.Array  # [R] f32
    counts: jax.Array  # [R, V] i32 how often each token was emitted


EMPTY_SLOT: dict[str, Any] = {  # what each field of Slots is before a request says otherwise
    "active": np.bool_(False), "finish": np.int32(RUNNING), "length": np.int32(0),
    "border": np.int32(0), "anchor": np.int32(0), "rope_delta": np.int32(0),
    "remaining": np.int32(0), "stop_ids": np.int32(-1), "seed": np.uint32(0),
    "temperature": np.float32(0), "top_p": np.float32(1), "top_k": np.int32(0),
    "min_p": np.float32(0), "presence": np.float32(0), "frequency": np.float32(0),
    "counts": np.int32(0)}


class State(struct.PyTreeNode):
    """All of it. `pages[r, i]` is the page that holds positions i*S .. i*S+S-1 of slot r; an
    entry of P or more means none, and writes to it are dropped."""

    slots: Slots
    pages: jax.Array  # [R, pages of a slot] i32
    attention: tuple[KvPages, ...]  # one a full-attention layer
    gdn: tuple[GdnState, ...]  # one a GDN layer
    context: tuple[KvPages, ...]  # one a drafter layer; empty without a drafter


def init_state(target: TargetConfig, drafter: DrafterConfig | None, *, slots: int,
               pages_per_slot: int, page: int, dtype, pool: int | None = None,
               stop_ids: int = 8) -> State:
    """An empty state of `slots` inactive slots. `pool` pages are shared by all (default: enough
    for every slot, and handed out in order); `page` positions each, a multiple of BORDER."""
    if page % BORDER:
        raise ValueError(f"page is {page} positions, expected a multiple of {BORDER}")
    own = pool is None
    pool = slots * pages_per_slot if pool is None else pool
    r, c = slots, target
    j, dk, dv = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim

    def kv(heads, dim):
        shape = (pool, heads, page, dim)
        return KvPages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def gdn():
        gates = (r, TAPE, j)
        columns = c.linear_conv_kernel_dim - 1 + TAPE
        return GdnState(jnp.zeros((r, j, dv, dk), jnp.float32),
                        jnp.zeros((r, columns, c.conv_dim), dtype),
                        jnp.zeros(gates, jnp.float32), jnp.ones(gates, jnp.float32))

    more = {"stop_ids": (stop_ids,), "seed": (2,), "counts": (target.vocab_size,)}
    empty = {name: jnp.full((r, *more.get(name, ())), value, value.dtype)
             for name, value in EMPTY_SLOT.items()}
    table = jnp.arange(slots * pages_per_slot, dtype=jnp.int32).reshape(slots, pages_per_slot)
    return State(
        slots=Slots(**empty),
        pages=table if own else jnp.full((slots, pages_per_slot), pool, jnp.int32),
        attention=tuple(kv(c.num_key_value_heads, c.head_dim) for _ in c.attention_layers),
        gdn=tuple(gdn() for _ in c.gdn_layers),
        context=() if drafter is None else tuple(
            kv(drafter.num_key_value_heads, drafter.head_dim)
            for _ in range(drafter.num_hidden_layers)))


def tape_bytes(target: TargetConfig, itemsize: int = 2) -> int:
    """Bytes of tape that a request in flight needs, all GDN layers together."""
    columns = target.linear_conv_kernel_dim - 1 + TAPE
    layer = columns * target.conv_dim * itemsize + 2 * TAPE * target.linear_num_value_heads * 4
    return layer * len(target.gdn_layers)


def row_places(pages: jax.Array, positions: jax.Array, keep: jax.Array, page: int, pool: int
               ) -> tuple[jax.Array, jax.Array]:
    """Page id and offset of each position of a slot. pages [..., n], positions [..., W], keep
    [..., W] bool -> two [..., W] i32. Rows that are not kept or lie past the table get page id
    `pool`, which a scatter with mode "drop" leaves out."""
    index = positions // page
    inside = keep & (index < pages.shape[-1])
    ids = jnp.take_along_axis(pages, jnp.minimum(index, pages.shape[-1] - 1), -1)
    return jnp.where(inside, ids, pool), positions % page


def write_rows(pages: KvPages, ids: jax.Array, offsets: jax.Array, keys: jax.Array,
               values: jax.Array) -> KvPages:
    """Put rows keys, values [M, K, D] at page ids [M] and offsets [M]; ids past the pool drop."""
    def put(pool, rows):
        return pool.at[ids, :, offsets].set(rows.astype(pool.dtype), mode="drop",
                                            unique_indices=False)

    return KvPages(put(pages.keys, keys), put(pages.values, values))
