"""What a round must never change: the text. Drafters that are right, wrong and right for exactly
a tokens, against plain decoding of each request alone (R2, R3, R15, R24, R29, R32, R46), the state
a round leaves against a fresh prefill (R1, R3, R4, R45), and both against each other bit for bit
(R49).

Everything runs on one target of three layers (GDN, attention, GDN) and through few programs: three
slots at each width, one slot at widths 1 and 16.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.config import PRESETS
from mmflash_jax.round import WIDTHS
from mmflash_jax.state import LENGTH, STOP, tape_bytes
from tests.mock_drafter import ALL
from tests.round_lab import (
    GREEDY,
    LIMIT,
    SAMPLED,
    START,
    Answer,
    Lab,
    Request,
    same_bits,
)
from tests.tiny import write_target


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, layers=3, interval=2, vision=False, mtp=False, shards=1)
    return Lab(folder)


def _requests(lab: Lab, options: dict) -> list[Request]:
    """Unequal prompts; the second ends early, and the fourth takes its slot."""
    sizes = ((5, 40), (40, 9), (23, 48), (17, 30))
    return [Request(lab.prompt(n), most, 2**40 + i, options=options)
            for i, (n, most) in enumerate(sizes)]


@pytest.fixture(scope="module")
def plain(lab):
    return {name: lab.alone(_requests(lab, options))
            for name, options in (("greedy", GREEDY), ("sampled", SAMPLED))}


def _check(got: list[Answer], want: list[Answer]) -> None:
    assert [a.ids for a in got] == [a.ids for a in want]
    assert [a.finish for a in got] == [a.finish for a in want]


MIXES = ([ALL] * 4, [0] * 4, [1, 2, 3, 7], [14, 5, 0, 9])


@pytest.mark.parametrize("how", ["greedy", "sampled"])
@pytest.mark.parametrize("width", WIDTHS)
def test_text_is_that_of_plain_decoding(lab, plain, width, how):
    """R15, R24, R32: three slots, staggered, against each request alone at width 1."""
    requests = _requests(lab, GREEDY if how == "greedy" else SAMPLED)
    want = plain[how]
    texts = [np.array(a.ids) for a in want]
    for right in MIXES if width > 1 else MIXES[:1]:
        got = lab.serve(requests, slots=3, width=width, truth=texts, right=right)
        _check(got, want)
        for answer, a in zip(got, right, strict=True):
            whole = answer.accepted[:-1]  # the last round may look past the end of the truth
            assert set(whole) <= {min(a, width - 1) + 1}


def test_text_of_one_slot_and_of_rounds_without_sampling(lab, plain):
    """R15 with the programs that a single greedy request uses; unequal acceptance by position."""
    requests = _requests(lab, GREEDY)
    texts = [np.array(a.ids) for a in plain["greedy"]]
    right = list(np.random.RandomState(5).randint(0, 16, (4, LIMIT)))
    for slots in (1, 3):
        got = lab.serve(requests, slots=slots, width=16, truth=texts, right=right, sampled=False)
        _check(got, plain["greedy"])
    got = lab.serve(_requests(lab, SAMPLED), slots=1, width=16, right=right,
                    truth=[np.array(a.ids) for a in plain["sampled"]])
    _check(got, plain["sampled"])


def test_seed_alone_decides_sampled_text(lab, plain):
    """R32: another seed gives another text; the same one again gives the same."""
    requests = _requests(lab, SAMPLED)[:2]
    _check(lab.alone(requests), plain["sampled"][:2])
    other = lab.alone([dataclasses.replace(r, seed=r.seed + 1) for r in requests])
    assert all(a.ids != b.ids for a, b in zip(other, plain["sampled"], strict=False))


def test_stop_id_inside_a_block(lab):
    """R2: every offset, oracle drafts; the queue gives each slot to the next request."""
    one = Request(lab.prompt(17), 64)
    base = lab.alone([one])[0].ids
    requests = [dataclasses.replace(one, stop=base[j]) for j in range(1, 32)]
    truth, right = [np.array(base)] * 31, [ALL] * 31
    assert len(set(base[:32])) > 8, "the text should vary"
    for request, got in zip(requests, lab.serve(requests, slots=3, width=16, truth=truth,
                                                right=right), strict=True):
        assert got.ids == base[:base.index(request.stop) + 1]
        assert got.finish == STOP


def test_token_limit_inside_a_block(lab):
    """R29: exactly as many as asked for."""
    sizes = (1, 2, 15, 16, 17, 31, 33)
    one = Request(lab.prompt(17), 64)
    base = lab.alone([one])[0].ids
    for right in (ALL, 3):
        answers = lab.serve([dataclasses.replace(one, most=n) for n in sizes], slots=3, width=16,
                            truth=[np.array(base)] * len(sizes), right=[right] * len(sizes))
        for size, got in zip(sizes, answers, strict=True):
            assert (got.ids, got.finish) == (base[:size], LENGTH)


def test_block_across_the_context_limit(lab):
    """R46: blocks that reach past the last page; neighbours and the next requests unaffected."""
    sizes = (LIMIT - 1, 20, LIMIT - 2, LIMIT - 15, 33, LIMIT - 16, LIMIT - 17, 24)
    requests = [Request(lab.prompt(n), min(50, LIMIT - n)) for n in sizes]
    want = lab.alone(requests)
    texts = [np.array(a.ids) for a in want]
    for right in (ALL, 0, 4):
        _check(lab.serve(requests, slots=3, width=16, truth=texts, right=[right] * 8), want)
    for request, answer in zip(requests, want, strict=True):
        assert len(answer.ids) == request.most and answer.finish == LENGTH


@pytest.mark.parametrize("length", [40, 41])
def test_state_after_a_partial_accept(lab, length):
    """R3, R4: exactly a accepted drafts, a = 0..15; then state, context and further text."""
    base = lab.alone([Request(lab.prompt(17), 90)])[0].ids
    text = np.concatenate([lab.prompt(17), base]).astype(np.int32)
    for group in np.array_split(np.arange(16), 6):
        state, params = lab.empty(3)
        for slot, a in enumerate(group):
            params["drafter"]["truth"][slot, :len(text)] = text
            params["drafter"]["right"][slot] = a
            state, first = lab.admit(params, state, slot, Request(text[:length], a + 2))
            assert first == text[length]
        state, new, accepted = lab.step(params, state, 16)
        for slot, a in enumerate(group):
            end = length + a + 1
            assert accepted[slot] == [a + 1] and new[slot] == list(text[length + 1:end + 1])
            fresh, _ = lab.admit(params, lab.empty(3)[0], 0, Request(text[:end], 1))
            lab.same_state(state, slot, fresh, end)
        used = jnp.arange(3) < len(group)
        state = state.replace(slots=state.slots.replace(
            active=used, remaining=jnp.where(used, 30, 0)))
        for _ in range(8):
            state, new_, _ = lab.step(params, state, 16)
            new = [x + y for x, y in zip(new, new_, strict=True)]
        for slot, a in enumerate(group):
            assert new[slot] == list(text[length + 1:length + a + 32])


def test_rounds_are_bit_equal_however_commits_are_grouped(lab):
    """R49 in float32: states, keys and the next logits, whatever was committed together."""
    base = lab.alone([Request(lab.prompt(START), 70)])[0].ids
    text = np.concatenate([lab.prompt(START), base]).astype(np.int32)
    for count in (12, 27, 43):
        want = lab.bits(lab.reach(text, count, (1,), 0), 0)
        patterns = [ALL, 0, 6, *np.random.RandomState(count + 1).randint(0, 16, (3, LIMIT))]
        for right in patterns:
            same_bits(lab.bits(lab.reach(text, count, (16,), right), 0), want)


@pytest.mark.parametrize("length", [2, 16, 17, 63, 64, 100, 127, 128])
def test_padding_and_chunks_do_not_change_the_state(lab, length):
    """R1, R4, R45: padded to 64 and to 128, whole and in chunks of 64, beside an old slot."""
    request = Request(lab.prompt(length), 1)
    state, params = lab.empty(3)
    want, first = lab.admit(params, state, 0, request, bucket=128)
    state, _ = lab.admit(params, lab.empty(3)[0], 1, Request(lab.prompt(50, 1), 20))
    state, again = lab.admit(params, state, 1, request)
    assert first == again
    lab.same_state(state, 1, want, length)


def test_state_is_donated_and_tapes_are_small(lab):
    """A round keeps no second copy of the state; a request's tape is a few megabytes."""
    state, params = lab.empty(3)
    before = state
    state, _ = lab.admit(params, state, 0, Request(lab.prompt(17), 9))
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    before = state
    state, _, _ = lab.step(params, state, 16)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert tape_bytes(PRESETS["qwen3.5-9b"]) <= 14e6
    assert tape_bytes(PRESETS["qwen3.8-27b"]) <= 38e6


def test_rope_delta_moves_rotary_positions_only(lab):
    """R6, R21: after a picture the text goes on at other rotary positions; the drafter's context
    stays at token indices."""
    prompt, delta = lab.prompt(33), -11
    index = np.arange(128, dtype=np.int32)
    places = np.broadcast_to(np.where(index < 20, index // 2, index + delta), (3, 128)).copy()
    places[1, :20] += index[:20] % 3
    texts = []
    for width, right in ((1, 0), (16, 6)):
        state, params = lab.empty(3)
        if texts:
            params["drafter"]["truth"][1, :len(texts[0])] = texts[0]
        params["drafter"]["right"][1] = right
        state, first = lab.admit(params, state, 1, Request(prompt, 40), positions=places[:, :33],
                                 delta=delta)
        new, accepted = [first], []
        while bool(state.slots.active[1]):
            state, some, lengths = lab.step(params, state, width)
            new, accepted = new + some[1], accepted + lengths[1]
        # The drafter, too, is asked at token indices: there it knows the text.
        assert set(accepted[:-1]) == {right + 1}
        texts.append(np.concatenate([prompt, new]).astype(np.int32))
        fresh, _ = lab.admit(params, lab.empty(3)[0], 0, Request(texts[-1][:-1], 1),
                             positions=places[:, :72], delta=delta)
        lab.same_state(state, 1, fresh, 72)
    np.testing.assert_array_equal(texts[0], texts[1])
    flat, _ = lab.admit(params, lab.empty(3)[0], 0, Request(texts[0][:-1], 1))
    assert any(np.abs(a - b).max() > 1e-2 for a, b in zip(
        lab.rows(flat, 0, 72), lab.rows(fresh, 0, 72), strict=True)), "positions should matter"
