"""Greedy text against HF decoding token by token; the speculative loop against `dflash`'s model.

The reduced test decodes a few prompts for some tokens, the slow one all of them for 200. Against
the committed references always, against the live models where torch is installed.
"""

import numpy as np
import pytest

from tests.parity import cases
from tests.parity.ours import Ours
from tests.parity.references import (
    GREEDY_TARGET,
    GREEDY_TOKENS,
    LOOP_TEXTS,
    LOOP_TOKENS,
    LOOPS,
    PICTURE_TOKENS,
    stop_token,
)


def prompts(which) -> list[cases.Case]:
    return [cases.text(cases.TEXTS[i]) if isinstance(i, int) else cases.prompts()[i]
            for i in which]


@pytest.fixture(scope="module")
def plain(folders):
    return Ours(folders(GREEDY_TARGET))


@pytest.fixture(scope="module")
def pairs(folders):
    made: dict[str, Ours] = {}

    def get(name: str) -> Ours:
        if name not in made:
            made[name] = Ours(*folders(name, pair=True))
        return made[name]

    return get


def check_greedy(us: Ours, reference: dict, which, count: int, width: int, slots: int = 5
                 ) -> None:
    """All prompts in flight together, one a slot."""
    results = us.greedy(prompts(which), count, width=width, slots=slots)
    for i, (tokens, lengths) in zip(which, results, strict=True):
        np.testing.assert_array_equal(tokens, reference[f"greedy/{i}"][:count], f"prompt {i}")
        assert width > 1 or lengths == [1] * (count - 1)


def test_greedy_text_equals_hf(plain, expected):
    check_greedy(plain, expected("generation"), (0, 4, 6), 40, width=1)


def test_greedy_after_pictures_equals_hf_r21(plain, expected):
    """R21: text after an image, two images, a video goes on at the rotary position that HF gives
    it, also beside other requests in flight."""
    which = ("image", "two_images", "video", "image_and_video", 2)
    check_greedy(plain, expected("generation"), which, 40, width=1)


@pytest.mark.slow
def test_ten_prompts_of_200_tokens_equal_hf(plain, expected):
    which = tuple(range(len(cases.TEXTS)))
    assert len(which) == 10
    check_greedy(plain, expected("generation"), which, GREEDY_TOKENS, width=1, slots=10)


@pytest.mark.slow
def test_ten_prompts_of_200_tokens_drafted_equal_hf(pairs, expected):
    """The same text with a random drafter, whose drafts are nearly always wrong (R15)."""
    which = tuple(range(len(cases.TEXTS)))
    check_greedy(pairs("full"), expected("generation"), which, GREEDY_TOKENS, width=16,
                 slots=10)


@pytest.mark.slow
def test_picture_prompts_drafted_equal_hf(pairs, expected):
    which = ("image", "two_images", "video", "image_and_video")
    check_greedy(pairs("full"), expected("generation"), which, PICTURE_TOKENS, width=16,
                 slots=10)


@pytest.mark.parametrize("name", LOOPS)
def test_speculative_loop_equals_dflash(pairs, expected, name):
    """Tokens and the acceptance length of every round equal those of the torch drafter with the
    target prefilled anew in every round; one request at a time and all together."""
    reference = expected("generation")
    longest = 0
    results = pairs(name).greedy(prompts(LOOP_TEXTS), LOOP_TOKENS, width=16)
    for i, (tokens, lengths) in zip(LOOP_TEXTS, results, strict=True):
        np.testing.assert_array_equal(tokens, reference[f"loop/{name}/{i}/tokens"])
        np.testing.assert_array_equal(lengths, reference[f"loop/{name}/{i}/lengths"])
        longest = max(longest, *lengths)
    assert longest > 2, "no round accepted anything worth the name"


@pytest.mark.parametrize("name", LOOPS)
def test_stop_inside_a_block_equals_dflash_r2(pairs, expected, name):
    """R2: the text ends with the stop id, also in the middle of accepted drafts; no round more."""
    reference = expected("generation")
    for i in LOOP_TEXTS:
        at = f"loop/{name}/{i}"
        stop = stop_token(reference[f"{at}/tokens"], reference[f"{at}/lengths"])
        [(tokens, lengths)] = pairs(name).greedy(prompts([i]), LOOP_TOKENS, width=16, stop=stop)
        np.testing.assert_array_equal(tokens, reference[f"{at}/stopped_tokens"])
        np.testing.assert_array_equal(lengths, reference[f"{at}/stopped_lengths"])
        assert tokens[-1] == stop and stop not in tokens[:-1]
