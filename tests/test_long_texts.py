"""States, context and text at positions about 1,000 and for prompts of every kind of length, where
an error in the state has had time to grow (R1, R3, R4, R45; R15 with many prompts is slow).

Pages of 64 positions, 17 to a slot; what the short tests of `test_round.py` check, at length.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.config import read_json
from mmflash_jax.round import draft
from tests.mock_drafter import ALL
from tests.parity.ours import Ours
from tests.round_lab import LIMIT, SAMPLED, Lab, Request
from tests.tiny import write_drafter, write_target

BUCKET = 256
SIZES = {"layers": 3, "interval": 2, "vision": False, "mtp": False, "shards": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, **SIZES)
    return folder


@pytest.fixture(scope="module")
def lab(folder):
    return Lab(folder, page=64, pages=17)


def test_r3_r4_partial_accepts_at_position_1000(lab):
    """Exactly a accepted drafts, a = 0..15, on a text of which 1,000 tokens are history: state,
    keys and drafter context equal a fresh prefill's, and 64 further tokens plain decoding's."""
    prompt, length = lab.prompt(970), 1000
    base = lab.alone([Request(prompt, 118)], bucket=BUCKET)[0].ids
    text = np.concatenate([prompt, base]).astype(np.int32)
    for group in (range(0, 8), range(8, 16)):
        state, params = lab.empty(8)
        for slot, a in enumerate(group):
            params["drafter"]["truth"][slot, :len(text)] = text
            params["drafter"]["right"][slot] = a
            state, first = lab.admit(params, state, slot, Request(text[:length], a + 2),
                                     bucket=BUCKET)
            assert first == text[length]
        state, new, accepted = lab.step(params, state, 16)
        fresh, _ = lab.empty(8)
        for slot, a in enumerate(group):
            end = length + a + 1
            assert accepted[slot] == [a + 1] and new[slot] == list(text[length + 1:end + 1])
            fresh, _ = lab.admit(params, fresh, slot, Request(text[:end], 1), bucket=BUCKET)
            lab.same_state(state, slot, fresh, end, other=slot)
        params["drafter"]["right"][:] = ALL
        state = state.replace(slots=state.slots.replace(
            active=jnp.ones((8,), bool), remaining=jnp.full((8,), 64)))
        while bool(state.slots.active.any()):
            state, more, _ = lab.step(params, state, 16)
            new = [x + y for x, y in zip(new, more, strict=True)]
        for slot, a in enumerate(group):
            assert new[slot] == list(text[length + 1:length + a + 66])


def test_r4_r45_chunks_of_any_size_give_one_state_and_the_same_drafts(folder, tmp_path, lab):
    """1,000 tokens whole, in chunks of 256, and in chunks of 64 into a slot that another request
    has used: states and context rows agree, and a drafter of random weights that reads them
    proposes the same block."""
    request, other = Request(lab.prompt(1000), 2), Request(lab.prompt(700, 1), 9)

    def run(one, params, bucket, used):
        state = one.empty(8)[0]
        if used:
            state, _ = one.admit(params, state, 3, other, bucket=bucket)
        return one.admit(params, state, 3, request, bucket=bucket)

    params = lab.empty(8)[1]
    want, first = run(lab, params, 1024, False)
    for bucket, used in ((BUCKET, False), (64, True)):
        state, again = run(lab, params, bucket, used)
        assert again == first
        lab.same_state(state, 3, want, 1000, other=3)

    write_drafter(tmp_path, read_json(folder / "config.json"), layers=2, taps=(0, 2))
    pair, real = Ours(folder, tmp_path), Lab(folder, page=64, pages=17)
    real.drafter, real.models = pair.drafter, pair.models
    params |= {"drafter": pair.params["drafter"]}
    show = jax.jit(draft, static_argnums=0, static_argnames=("width", "pages"))
    drafts = []
    for bucket, used in ((1024, False), (64, True)):
        state, _ = run(real, params, bucket, used)
        drafts.append(show(real.models, params, state, width=16, pages=17)[3].tolist())
    assert len(set(drafts[0])) > 3, "the drafts should vary"
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("lengths", [(1, 3, 16, 63, 65, 128), (2, 15, 17, 64, 127, 129)])
def test_r1_padding_and_neighbours_leave_no_trace(lab, lengths):
    """Prompts padded to 64 alone and to 256 beside one four times as long: states, context and
    32 tokens agree."""
    state, params = lab.empty(8)
    state, _ = lab.admit(params, state, 7, Request(lab.prompt(4 * max(lengths)), 40),
                         bucket=BUCKET)
    new = []
    for slot, length in enumerate(lengths):
        state, first = lab.admit(params, state, slot, Request(lab.prompt(length), 32),
                                 bucket=BUCKET)
        new.append([first])
    for slot, length in enumerate(lengths):
        # Without any padding where that makes few programs.
        bucket = length if length in (3, 65) else 64
        want, _ = lab.admit(params, lab.empty(1)[0], 0, Request(lab.prompt(length), 32),
                            bucket=bucket)
        lab.same_state(state, slot, want, length)
    while bool(state.slots.active.any()):
        state, more, _ = lab.step(params, state, 1)
        new = [x + y for x, y in zip(new, more, strict=False)]
    for length, got in zip(lengths, new, strict=True):
        assert got == lab.alone([Request(lab.prompt(length), 32)])[0].ids


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"options": SAMPLED}], ids=["greedy", "sampled"])
def test_r15_two_hundred_prompts_of_256_tokens(folder, options):
    """Eight slots at width 16 with drafters right, wrong and in between, against plain decoding
    of each prompt alone."""
    lab = Lab(folder, page=64, pages=6)
    assert lab.limit > 2 * LIMIT
    random = np.random.RandomState(7)
    requests = [Request(lab.prompt(int(n), i), 256, i, **options)
                for i, n in enumerate(random.randint(1, lab.limit - 256, 200))]
    plain = lab.alone(requests)
    truth = [np.array(a.ids) for a in plain]
    right = [np.full(lab.limit, (0, ALL, i % 16)[i % 3]) if i % 4 else
             random.randint(0, 16, lab.limit) for i in range(200)]
    got = lab.serve(requests, slots=8, width=16, truth=truth, right=right)
    assert [(a.ids, a.finish) for a in got] == [(a.ids, a.finish) for a in plain]
