"""Field cases that need more than a round or two: grouping-invariant arithmetic (R49 in float32),
what verify must not write and nothing must read (R1, R3, R24), requests among many others and in
another slot (R15, R21, R24, R32), and the pieces of a round as a notebook uses them.

In: the lab of the round tests. Long texts are in `test_long_texts.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.config import PRESETS, drafter_preset
from mmflash_jax.layers import linear
from mmflash_jax.models.gdn import GatedDeltaNet
from mmflash_jax.round import admit, draft, prefill_chunk, round_, rounds
from mmflash_jax.state import init_state, tape_bytes
from tests.mock_drafter import ALL
from tests.round_lab import (
    CHUNK,
    GREEDY,
    LIMIT,
    PAGES,
    SAMPLED,
    START,
    Lab,
    Request,
    look,
    same_bits,
)
from tests.tiny import write_target


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, layers=3, interval=2, vision=False, mtp=False, shards=1)
    return Lab(folder)


@pytest.fixture(scope="module")
def text(lab):
    base = lab.alone([Request(lab.prompt(START), 90)])[0].ids
    return np.concatenate([lab.prompt(START), base]).astype(np.int32)


@pytest.mark.parametrize("count", [12, 27, 43, 60])
def test_r49_no_grouping_of_commits_changes_a_bit(lab, text, count):
    """States, conv inputs, gates, keys, values, drafter context and the next logits of one text,
    committed one by one, by whole and partial blocks, and at changing widths."""
    want = lab.bits(lab.reach(text, count, (1,), 0), 0)
    random = np.random.RandomState(count).randint(0, 16, (3, LIMIT))
    for widths, right in (((16,), ALL), ((8,), ALL), ((4,), ALL), ((16,), 6), ((1, 16), ALL),
                          ((16, 4, 1, 8), random[0]), ((4, 16), random[1]),
                          ((8, 1, 4), random[2])):
        same_bits(lab.bits(lab.reach(text, count, widths, right), 0), want)


def test_r49_neighbours_and_place_change_no_bit(lab, text):
    """The same among two and seven slots of other texts, in any place."""
    want = lab.bits(lab.reach(text, 43, (1,), 0), 0)
    for slots, slot, every in ((3, 0, ((1,), (16,), (4, 8))), (3, 2, ((16,),)),
                               (8, 0, ((1,), (16,))), (8, 5, ((1, 16),))):
        for widths in every:
            got = lab.bits(lab.reach(text, 43, widths, 9, slots=slots, slot=slot), slot)
            same_bits(got, want)


def test_r15_r24_r32_eight_slots_one_of_them_unused(lab):
    """Greedy and sampled requests of 3 to 100 tokens side by side, arriving one by one, unequal
    acceptance, slots used again: text and acceptance of each are those of the request alone."""
    sizes = (100, 3, 64, 17, 41, 1, 90, 30, 16, 73)
    requests = [Request(lab.prompt(n, 3), min(LIMIT - n, 12 + 3 * i), 2**40 + i,
                        options=(GREEDY, SAMPLED)[i % 2]) for i, n in enumerate(sizes)]
    plain = lab.alone(requests)
    truth = [np.array(a.ids) for a in plain]
    right = list(np.random.RandomState(2).randint(0, 16, (len(sizes), LIMIT)))
    alone = [lab.serve([one], slots=1, width=16, truth=[t], right=[r])[0]
             for one, t, r in zip(requests, truth, right, strict=True)]
    assert [(a.ids, a.finish) for a in alone] == [(a.ids, a.finish) for a in plain]
    assert max(max(a.accepted) for a in alone) == 16
    assert lab.serve(requests, slots=8, width=16, truth=truth, right=right, unused=4) == alone
    assert lab.serve(requests, slots=8, width=1, unused=4) == plain


@pytest.mark.parametrize("slots", [1, 3])
def test_r49_logits_of_a_row_are_the_same_at_every_width(lab, text, slots):
    """The rows that plain decoding and a block have in common, as a round computes them."""
    state, params = lab.empty(slots)
    for slot in range(slots):
        state, _ = lab.admit(params, state, slot, Request(text[:37 + slot], 40))

    @jax.jit
    def run(state, ids):
        apply, variables = lab.models.target.apply, {"params": lab.target}
        hidden, taps, _ = apply(variables, ids, state, PAGES, method="verify")
        return hidden, taps, apply(variables, hidden, method="logits")

    ids = np.stack([text[37 + slot:][:16] for slot in range(slots)])
    want = run(state, ids)
    for width in (4, 1):
        for a, b in zip(run(state, ids[:, :width]), want, strict=True):
            np.testing.assert_array_equal(a, b[:, :width])


def test_verify_writes_no_state(lab, text):
    """R3: what is committed is the same bits after a pass over any block, so that nothing has to
    be undone, and no pass sees what another left behind."""
    state, params = lab.empty(3)
    for slot, length in enumerate((37, 48, 61)):
        state, _ = lab.admit(params, state, slot, Request(text[:length], 40))
    _, state = look(lab.models.target, lab.target, state, PAGES)  # the states to the newest border
    want = [lab.committed(state, slot) for slot in range(3)]

    @jax.jit
    def run(state, ids):
        return lab.models.target.apply({"params": lab.target}, ids, state, PAGES, method="verify")

    anchors = np.asarray(state.slots.anchor)[:, None]
    hidden, first = [], state
    for seed in range(3):
        ids = np.random.RandomState(seed).randint(0, 256, (3, 15))
        rows, _, state = run(state, np.concatenate([anchors, ids], 1).astype(np.int32))
        hidden.append(np.asarray(rows))
        for slot in range(3):
            same_bits(lab.committed(state, slot), want[slot])
    again, _, _ = run(first, np.concatenate([anchors, ids], 1).astype(np.int32))
    np.testing.assert_array_equal(hidden[-1], again)
    assert (hidden[0][:, 0] == again[:, 0]).all() and (hidden[0][:, 5] != again[:, 5]).any()
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), first)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes, "no copy of a state a row"


def test_only_committed_numbers_are_read(lab, text):
    """R1, R3, R24: large numbers in every place that is not history (rejected keys, the tape past
    the length, pages of others, a slot that was left) change no bit."""
    state, params = lab.empty(3)
    params["drafter"]["truth"][:, :len(text)] = text
    params["drafter"]["right"][:] = 5
    for slot, length in ((0, 37), (2, 48)):
        state, _ = lab.admit(params, state, slot, Request(text[:length], 60))
    state, _, _ = lab.step(params, state, 16)
    length, border = (np.asarray(x) for x in (state.slots.length, state.slots.border))
    dirty = np.arange(LIMIT) >= np.where(np.asarray(state.slots.active), length, 0)[:, None]
    dirty = dirty.reshape(-1, 1, lab.page, 1)  # pages are handed out in order

    def spoil(x, where):
        return jnp.where(where, jnp.asarray(1e5, x.dtype), x)

    def spoil_tape(x, past):
        keep = np.arange(x.shape[1]) < (length - border + past)[:, None]
        return spoil(x, ~(keep & np.asarray(state.slots.active)[:, None])[..., None])

    idle = ~np.asarray(state.slots.active)[:, None, None, None]
    spoilt = state.replace(
        attention=jax.tree.map(lambda x: spoil(x, dirty), state.attention),
        context=jax.tree.map(lambda x: spoil(x, dirty), state.context),
        gdn=tuple(c.replace(state=spoil(c.state, idle), conv=spoil_tape(c.conv, 3),
                            beta=spoil_tape(c.beta, 0), decay=spoil_tape(c.decay, 0))
                  for c in state.gdn))
    ends = []
    for one in (jax.tree.map(jnp.copy, state), spoilt):
        one, _ = lab.admit(params, one, 1, Request(lab.prompt(23), 60))  # into the left slot
        one, new, _ = lab.step(params, one, 16)
        one, more, _ = lab.step(params, one, 4)
        ends.append((new, more, [lab.committed(one, slot) for slot in range(3)]))
    assert ends[0][:2] == ends[1][:2]
    for a, b in zip(ends[0][2], ends[1][2], strict=True):
        same_bits(a, b)


def test_any_page_table_gives_the_same_bits(lab, text):
    """Pages in any order, slots' pages mixed in one pool, and none past what a request needs."""
    def run(order):
        lab.order = order
        try:
            state, params = lab.empty(3)
            params["drafter"]["truth"][:, :len(text)] = text
            params["drafter"]["right"][:] = 4
            for slot, length in ((0, 37), (1, 5), (2, 48)):
                state, _ = lab.admit(params, state, slot, Request(text[:length], 22))
            for _ in range(6):
                state, _, _ = lab.step(params, state, 16)
        finally:
            lab.order = None
        assert not state.slots.active.any()
        state = state.replace(pages=jnp.minimum(state.pages, 3 * PAGES - 1))
        return [lab.committed(state, slot) for slot in range(3)]

    want = run(None)
    order = np.random.RandomState(8).permutation(3 * PAGES).astype(np.int32)
    needed = np.repeat([-(-(n + 22) // lab.page) for n in (37, 5, 48)], PAGES)
    short = np.where(np.tile(np.arange(PAGES), 3) < needed, order, 3 * PAGES)
    for table in (order, short.astype(np.int32)):
        for got, expected in zip(run(table), want, strict=True):
            same_bits(got, expected)


def test_r21_r24_a_request_goes_on_in_another_slot(lab):
    """The rotary delta, sampling parameters, counts, pages and states move with the slot, also
    when requests join afterwards."""
    prompts, delta = [lab.prompt(n) for n in (33, 20, 9)], (-11, 0, -4)
    answers = []
    for places in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        state, params = lab.empty(3)
        new = {}
        for slot in range(2):  # the third joins later
            request = Request(prompts[slot], 40, slot, options=SAMPLED)
            state, new[slot] = lab.admit(params, state, slot, request, delta=delta[slot])
        state, before, _ = lab.step(params, state, 4)
        back = np.argsort(places)
        state = jax.jit(lambda s, back=back: s.replace(
            **{name: jax.tree.map(lambda x: x[back], getattr(s, name))
               for name in ("slots", "gdn", "pages")}))(state)
        table = np.asarray(state.pages)
        lab.order = table.reshape(-1)
        try:
            state, new[2] = lab.admit(params, state, places[2],
                                      Request(prompts[2], 30, 7, options=SAMPLED), delta=delta[2])
        finally:
            lab.order = None
        texts = [[new[0], *before[0]], [new[1], *before[1]], [new[2]]]
        while bool(state.slots.active.any()):
            state, more, _ = lab.step(params, state, 16)
            for which, slot in enumerate(places):
                texts[which] += more[slot]
        assert [len(t) for t in texts] == [40, 40, 30]
        answers.append(texts)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("preset, tape, states", [("qwen3.5-9b", 14e6, 48),
                                                  ("qwen3.8-27b", 38e6, 144)])
def test_memory_of_a_slot(preset, tape, states):
    """The tape that a request in flight needs, and its states in MiB, from the arrays themselves
    at full size: no array has an axis of a block's rows."""
    config = PRESETS[preset]

    def make(slots):
        return jax.eval_shape(partial(init_state, config, drafter_preset(config), slots=slots,
                                      pages_per_slot=32, page=256, dtype=jnp.bfloat16))

    def nbytes(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    state = make(1)
    mine = nbytes([(c.conv, c.beta, c.decay) for c in state.gdn])
    assert mine == tape_bytes(config) <= tape
    assert nbytes([c.state for c in state.gdn]) == states * 2**20
    assert {c.state.dtype for c in state.gdn} == {jnp.dtype(jnp.float32)}
    assert nbytes(make(4).gdn) == 4 * nbytes(state.gdn)
    vocab = config.vocab_size * 4  # the counts of emitted tokens
    assert nbytes(state.slots) < vocab + 200


def test_r36_decay_is_float32_whatever_is_stored(lab):
    """A_log and dt_bias stored in bfloat16 or in float32 give the same gates, in float32, in a
    bfloat16 run: exp of an exp forgives no rounding in between."""
    params = lab.target["layers_0"]["mixer"]
    x = jnp.asarray(np.random.RandomState(4).randn(16, lab.config.hidden_size), jnp.bfloat16)
    half = {name: jnp.asarray(value, jnp.bfloat16) for name, value in params.items()}
    wide = half | {n: half[n].astype(jnp.float32) for n in ("A_log", "dt_bias", "norm")}
    module = GatedDeltaNet(lab.config)
    got = []
    for one in (half, wide):
        _, _, beta, g = module.apply({"params": one}, x, method=lambda s, x: s._project(x))
        assert beta.dtype == g.dtype == jnp.float32
        got.append(np.asarray(g))
    np.testing.assert_array_equal(got[0], got[1])
    a = np.asarray(linear(x, half["qkvzba"]), np.float64)[:, -lab.config.linear_num_value_heads:]
    bias, rate = (np.asarray(half[n], np.float64) for n in ("dt_bias", "A_log"))
    np.testing.assert_allclose(got[0], -np.exp(rate) * np.log1p(np.exp(a + bias)), rtol=1e-5)


def test_pieces_can_be_jitted_and_donated(lab, text):
    """As in a notebook: `round_`, its draft, `admit` and `prefill_chunk` under one's own jit give
    what `rounds` gives, and the state given away is gone."""
    state, params = lab.empty(2)
    params["drafter"]["truth"][:, :len(text)] = text
    params["drafter"]["right"][:] = 7
    want, _ = lab.admit(params, jax.tree.map(jnp.copy, state), 1, Request(text[:40], 12),
                        sampled=False)

    @partial(jax.jit, donate_argnames="state")
    def begin(params, state, tokens):
        state = admit(state, 1, jnp.arange(PAGES) + PAGES, {
            "remaining": 12, "stop_ids": jnp.full((2,), -1), "rope_delta": 0})
        positions = jnp.broadcast_to(jnp.arange(CHUNK), (3, CHUNK))
        return prefill_chunk(lab.models, params, state, 1, tokens, positions, 40, None, True,
                             sampled=False)

    before = state
    state, first = begin(params, state, jnp.pad(jnp.asarray(text[:40]), (0, CHUNK - 40)))
    assert int(first) == text[40] and all(x.is_deleted() for x in jax.tree.leaves(before))
    lab.same_state(state, 1, want, 40, other=1)
    step = jax.jit(round_, static_argnums=0, donate_argnames="state",
                   static_argnames=("width", "pages", "sampled"))
    show = jax.jit(draft, static_argnums=0, static_argnames=("width", "pages"))
    ids = show(lab.models, params, state, width=8, pages=PAGES)
    assert ids[1].tolist() == text[40:48].tolist()  # the anchor and seven drafts, all right
    new = []
    for _ in range(2):
        before = state
        state, emitted = step(lab.models, params, state, width=8, pages=PAGES, sampled=False)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        assert int(emitted.count[0]) == int(emitted.acceptance_length[0]) == 0
        new += emitted.ids[1, :int(emitted.count[1])].tolist()
    want, whole, _ = lab.step(params, want, 8, sampled=False)
    assert new == whole[1] == text[41:52].tolist()
    same_bits(lab.committed(state, 1), lab.committed(want, 1))


def test_admit_leaves_nothing_of_the_request_before(lab):
    state, _ = lab.empty(2)
    old = {"remaining": 5, "temperature": 0.9, "top_k": 3, "stop_ids": 7, "seed": 9,
           "rope_delta": 4, "presence": 1.0}
    fresh = jax.tree.map(np.asarray, state.slots)
    state = admit(state, jnp.int32(1), state.pages[1], old)
    assert float(state.slots.temperature[1]) == np.float32(0.9)
    state = admit(state, jnp.int32(1), state.pages[1], {})
    jax.tree.map(np.testing.assert_array_equal, state.slots, fresh)


def test_rounds_end_before_one_that_reads_past_its_pages(lab, text):
    state, params = lab.empty(1)
    page = state.attention[0].keys.shape[2]
    state, _ = lab.admit(params, state, 0, Request(text[:page - 6], 40))
    state, _, ran = rounds(lab.models, params, state, 16, width=4, pages=1, sampled=False)
    assert 1 <= int(ran) < 16 and bool(state.slots.active[0])
    assert page - 4 < int(state.slots.length[0]) <= page


def test_width_without_a_drafter_is_refused(lab):
    state, params = lab.empty(1)
    with pytest.raises(ValueError, match="width is 4, but there is no drafter"):
        round_(lab.models._replace(drafter=None), params, state, 4, PAGES, False)
