"""The heart of the project: draft, verify, accept, commit, for all slots in one program.

    prefill_chunk   a piece of a prompt into a slot; the last piece also gives the first token
    round_          draft -> verify -> accept -> commit: up to `width` tokens for every slot
    rounds          many rounds on the device, without the host

In: parameters and a `State`; out: a `State` and what was emitted. State is donated: the caller
keeps only the result. Nothing here knows text, pictures, files or queues. What a slot emits is
what the target alone would emit: `own` below is the target's choice at every row, drafts are kept
while they equal it, and plain decoding is the same function at width 1.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from mmflash_jax import sampling
from mmflash_jax.models.target import Target
from mmflash_jax.state import (
    EMPTY_SLOT,
    LENGTH,
    RUNNING,
    STOP,
    KvPages,
    State,
    row_places,
    write_rows,
)

WIDTHS = (1, 4, 8, 16)  # rows verified for each slot; 1 is plain decoding


class Models(NamedTuple):
    """The modules, static in every program. Without a drafter only width 1 makes sense."""

    target: Target
    drafter: Any = None  # a module that satisfies `drafters.Drafter`


class Emitted(struct.PyTreeNode):
    """What one round gave each slot."""

    ids: jax.Array  # [R, W] i32; the first count[r] are slot r's new tokens
    count: jax.Array  # [R] i32 tokens emitted, stop id included; 0 for inactive slots
    acceptance_length: jax.Array  # [R] i32 accepted drafts + 1; 0 for inactive slots


def draft(models: Models, params: dict, state: State, width: int, pages: int) -> jax.Array:
    """The rows to verify, [R, width] i32: each slot's anchor, then the drafter's proposals."""
    anchor = state.slots.anchor[:, None]
    if width == 1:
        return anchor
    if models.drafter is None:
        raise ValueError(f"width is {width}, but there is no drafter; expected 1")
    target = params["target"]
    head = target.get("head", target["embed"])
    keys, values = zip(*(_gather(c, state.pages[:, :pages]) for c in state.context), strict=True)
    drafts = models.drafter.apply(
        {"params": params["drafter"]}, target["embed"], head, state.slots.anchor,
        state.slots.length, keys, values, width - 1, method=models.drafter.draft)
    return jnp.concatenate([anchor, drafts], 1)


def verify_accept_commit(models: Models, params: dict, state: State, ids: jax.Array, pages: int,
                         sampled: bool) -> tuple[State, Emitted]:
    """Verify ids [R, W] (anchor, drafts), keep what the target itself says, commit it.

    `sampled` (static) says whether any slot samples or has penalties; without it every slot is
    greedy and its sampling parameters are not looked at.
    """
    slots = state.slots
    width = ids.shape[1]
    # verify: one pass; it writes past each slot's length only
    hidden, taps, state = models.target.apply(
        {"params": params["target"]}, ids, state, pages, method=models.target.verify)
    logits = models.target.apply({"params": params["target"]}, hidden,
                                 method=models.target.logits)
    # accept: the target's own token at every row, and the drafts that equal it
    own = _own_tokens(logits, ids, slots, sampled)
    accepted = sampling.accept(ids, own)
    count, by_stop, by_length = sampling.emit(
        own, accepted, slots.active, slots.remaining, slots.stop_ids)
    # commit: rows 0 .. count - 1 become history by a change of length
    if models.drafter is not None:
        position = slots.length[:, None] + jnp.arange(width)
        keep = jnp.broadcast_to(slots.active[:, None], ids.shape)
        state = _extend(models, params, state, taps.reshape(-1, taps.shape[-1]),
                        position.reshape(-1), state.pages, position, keep)
    last = jnp.take_along_axis(own, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
    ended = jnp.where(by_stop, STOP, jnp.where(by_length, LENGTH, slots.finish))
    counts = sampling.count_tokens(slots.counts, own, count) if sampled else slots.counts
    state = state.replace(slots=state.slots.replace(
        active=slots.active & ~(by_stop | by_length), finish=ended,
        length=slots.length + count, anchor=jnp.where(count > 0, last, slots.anchor),
        remaining=slots.remaining - count, counts=counts))
    return state, Emitted(own, count, jnp.where(slots.active, accepted + 1, 0))


def round_(models: Models, params: dict, state: State, width: int, pages: int, sampled: bool
           ) -> tuple[State, Emitted]:
    """One round. `pages` (static) is how many pages of each slot are read; they must cover
    length + width of every active slot, or all the slot has."""
    ids = draft(models, params, state, width, pages)
    return verify_accept_commit(models, params, state, ids, pages, sampled)


@partial(jax.jit, static_argnames=("models", "n", "width", "pages", "sampled"),
         donate_argnames="state")
def rounds(models: Models, params: dict, state: State, n: int, *, width: int, pages: int,
           sampled: bool) -> tuple[State, Emitted, jax.Array]:
    """Up to `n` rounds on the device, ending early when no slot is active.

    `pages` as in `round_`: to run all n it must cover length + n * width of every active slot, or
    all the slot has; the rounds end before one that would read past it.
    -> state, Emitted with a leading axis of n (rows past the last round run are zero), and the
    number of rounds run.
    """
    def one(carry):
        state, emitted, i = carry
        state, now = round_(models, params, state, width, pages, sampled)
        emitted = jax.tree.map(lambda all_, row: all_.at[i].set(row), emitted, now)
        return state, emitted, i + 1

    def go_on(carry):
        state, _, i = carry
        slots, page = state.slots, state.attention[0].keys.shape[2]
        inside = slots.length + width <= pages * page
        covered = pages >= state.pages.shape[1] or (inside | ~slots.active).all()
        return (i < n) & slots.active.any() & covered

    slots = state.slots.length.shape[0]
    nothing = Emitted(jnp.zeros((n, slots, width), jnp.int32), jnp.zeros((n, slots), jnp.int32),
                      jnp.zeros((n, slots), jnp.int32))
    return lax.while_loop(go_on, one, (state, nothing, jnp.int32(0)))


@partial(jax.jit, static_argnames=("models", "sampled"), donate_argnames="state")
def prefill_chunk(models: Models, params: dict, state: State, slot: jax.Array, tokens: jax.Array,
                  positions: jax.Array, valid: jax.Array, features: jax.Array | None,
                  last: jax.Array, *, sampled: bool) -> tuple[State, jax.Array]:
    """A chunk of a prompt into `slot`: tokens [T], 3-D positions [3, T], `valid` of them real;
    every chunk but the last has a multiple of 64 of them. features [T, H] stand for the
    embeddings of image and video tokens. With `last` the slot becomes active, with the prompt's
    first answer token as its anchor. -> state, that token (-1 before the last chunk)."""
    start = state.slots.length[slot]
    hidden, taps, state = models.target.apply(
        {"params": params["target"]}, tokens, positions, valid, features, slot, state,
        method=models.target.prefill)
    row = jnp.arange(tokens.shape[0])
    if models.drafter is not None:
        state = _extend(models, params, state, taps, start + row, state.pages[slot], start + row,
                        row < valid)
    logits = models.target.apply({"params": params["target"]}, hidden[None, None],
                                 method=models.target.logits)
    mine = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, slot, 1), state.slots)
    mine = mine.replace(length=start[None] + valid, active=jnp.ones((1,), bool))
    own = _own_tokens(logits, jnp.zeros((1, 1), jnp.int32), mine.replace(length=mine.length - 1),
                      sampled)
    count, by_stop, by_length = sampling.emit(
        own, jnp.zeros((1,), jnp.int32), mine.active, mine.remaining, mine.stop_ids)
    done = mine.replace(
        active=~(by_stop | by_length), anchor=own[:, 0], remaining=mine.remaining - count,
        finish=jnp.where(by_stop, STOP, jnp.where(by_length, LENGTH, RUNNING)),
        counts=sampling.count_tokens(mine.counts, own, count))
    mine = jax.tree.map(lambda a, b: jnp.where(last, a, b), done,
                        mine.replace(active=jnp.zeros((1,), bool)))
    slots = jax.tree.map(lambda a, b: lax.dynamic_update_slice_in_dim(a, b, slot, 0),
                         state.slots, mine)
    return state.replace(slots=slots), jnp.where(last, own[0, 0], -1)


@partial(jax.jit, donate_argnames="state")
def admit(state: State, slot: jax.Array, pages: jax.Array, request: dict[str, jax.Array]) -> State:
    """Make `slot` ready for a prompt: its page table row pages [n], zero states, and of `Slots`
    the fields in `request` (rope_delta, remaining, stop_ids, seed, temperature, ...), the others
    as in an empty slot. `remaining` is min(token limit, context limit - prompt length)."""
    fresh = {**EMPTY_SLOT, **request}
    slots = state.slots.replace(**{
        name: getattr(state.slots, name).at[slot].set(value) for name, value in fresh.items()})
    gdn = jax.tree.map(lambda x: x.at[slot].set(0), state.gdn)
    return state.replace(slots=slots, gdn=gdn, pages=state.pages.at[slot].set(pages))


def _own_tokens(logits: jax.Array, ids: jax.Array, slots: Any, sampled: bool) -> jax.Array:
    """The target's own token [R, W] after each row; row j's takes position length + 1 + j."""
    if not sampled:
        return sampling.greedy(logits)
    logits = sampling.penalise(logits, slots.counts, ids, slots.presence, slots.frequency)
    position = slots.length[:, None] + 1 + jnp.arange(ids.shape[1])
    return sampling.sample(logits, position, slots.seed, slots.temperature, slots.top_k,
                           slots.top_p, slots.min_p)


def _extend(models: Models, params: dict, state: State, taps: jax.Array, index: jax.Array,
            pages: jax.Array, positions: jax.Array, keep: jax.Array) -> State:
    """Drafter context of taps [M, ...] at sequence index [M], at the same pages as the target's."""
    pool, _, page, _ = state.context[0].keys.shape
    keys, values = models.drafter.apply({"params": params["drafter"]}, taps, index,
                                        method=models.drafter.extend)
    ids, offsets = (x.reshape(-1) for x in row_places(pages, positions, keep, page, pool))
    context = tuple(write_rows(old, ids, offsets, k, v)
                    for old, k, v in zip(state.context, keys, values, strict=True))
    return state.replace(context=context)


def _gather(cache: KvPages, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pages [R, n] of a cache as keys, values [R, K, n*S, D]."""
    def rows(pool):
        taken = jnp.moveaxis(jnp.take(pool, pages, axis=0, mode="clip"), 1, 2)
        return taken.reshape(*taken.shape[:2], -1, taken.shape[-1])

    return rows(cache.keys), rows(cache.values)
