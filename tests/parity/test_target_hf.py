"""The target against HF transformers in float32: logits, hidden states, recurrent states, pictures.

Against the committed references always, against the live model where torch is installed.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.layers import rms_norm
from tests.parity import cases
from tests.parity.ours import CHUNK, Ours

BOUND = 1e-4  # of the largest magnitude
FEATURES_BOUND = 2e-5  # of the vision tower: a tanh gelu in its merger is off by no more than 2e-4
PROMPTS = [(name, prompt) for name in cases.TARGETS for prompt in cases.prompts_of(name)]


@pytest.fixture(scope="module")
def ours(folders):
    made: dict[str, Ours] = {}

    def get(name: str) -> Ours:
        if name not in made:
            made[name] = Ours(folders(name), tap_all=True)
        return made[name]

    return get


def compare(mine: np.ndarray, theirs: np.ndarray, what: str, bound: float = BOUND) -> None:
    assert mine.shape == theirs.shape, f"{what}: shape {mine.shape}, expected {theirs.shape}"
    error = np.abs(mine - theirs).max() / np.abs(theirs).max()
    assert error < bound, f"{what}: differs by {error:.1e} of the largest magnitude"


def check(arrays: dict, reference: dict, at: str) -> set[str]:
    """Compare all arrays of the reference under `at`; returns their names."""
    rows = reference[f"{at}/rows"]
    names = {key.removeprefix(f"{at}/") for key in reference if key.startswith(f"{at}/")}
    for name in names - {"rows", "positions", "rope_delta"}:
        mine, theirs = arrays[name], reference[f"{at}/{name}"]
        if name == "logits":
            mine = mine[rows]
        if name != "hidden":
            bound = FEATURES_BOUND if name.startswith("features") else BOUND
            compare(mine, theirs, f"{at}/{name}", bound)
            continue
        for layer, (a, b) in enumerate(zip(mine[:, rows], theirs, strict=True)):
            compare(a, b, f"{at}: output of layer {layer}")
    for name in ("positions", "rope_delta"):
        np.testing.assert_array_equal(arrays[name], reference[f"{at}/{name}"], f"{at}/{name}")
    return names


@pytest.mark.parametrize("name, prompt", PROMPTS)
def test_prefill_equals_hf(ours, expected, name, prompt):
    """Logits, every layer's output (R11, R12), GDN and conv states, 3-D positions (R21), vision
    features; heads in threes, a tied and an untied head (R19), YaRN; padded by 24 to 139 rows."""
    case = cases.prompts()[prompt]
    arrays = ours(name).forward(case)
    arrays |= {f"features_{i}": rows for i, rows in enumerate(ours(name).features(case))}
    names = check(arrays, expected("target"), f"{name}/{prompt}")
    assert {"logits", "hidden", "state_0", "positions"} <= names
    assert case.kinds == () or "features_0" in names


@pytest.mark.parametrize("prompt", ["text", "video"])
def test_chunked_prefill_equals_hf(ours, expected, prompt):
    """The same in chunks of 64 tokens, which cut the text twice and the video inside a frame."""
    case = cases.prompts()[prompt]
    assert len(case.ids) > CHUNK
    arrays = ours("plain").forward(case, CHUNK)
    arrays |= {f"features_{i}": rows for i, rows in enumerate(ours("plain").features(case))}
    check(arrays, expected("target"), f"plain/{prompt}")


@pytest.mark.parametrize("width", [1, 16])
def test_verify_equals_hf(ours, expected, width):
    """Rows of a verify pass after a prefill of half the text: the other arithmetic of the target.
    The text is committed `width` tokens at a time, across pages and borders."""
    reference, at = expected("target"), "plain/text"
    case, us = cases.prompts()["text"], ours("plain")
    half = 53
    (ids, positions, _, features), _ = next(us.chunks(case, None))
    _, taps, state = us.apply(ids, positions, jnp.int32(half), features, jnp.int32(0),
                              us.state(), method="prefill")
    outputs, length = [taps[:half]], half

    def at_length(state, length):
        slots = state.slots
        return state.replace(slots=slots.replace(
            active=slots.active.at[0].set(True), length=slots.length.at[0].set(length)))

    while length < len(case.ids):
        count = min(width, len(case.ids) - length)
        block = np.full(width, 7, np.int32)  # rows past the text are rejected drafts
        block[:count] = case.ids[length:length + count]
        _, taps, state = us.apply(jnp.asarray(block)[None], at_length(state, length),
                                  method="verify")
        outputs.append(taps[0, :count])
        length += count
    state = at_length(state, length)
    arrays = us.named(jnp.concatenate(outputs)) | us.recurrent(state, 0)
    positions, delta = us.positions(case)
    check(arrays | {"positions": positions, "rope_delta": delta}, reference, at)


def test_taps_are_layer_outputs_r12(ours):
    """R12: tap l is HF's hidden_states[l + 1]; one layer off is far off, so the check above
    would notice."""
    case = cases.prompts()["text"]
    hidden = ours("plain").forward(case)["hidden"]
    for one, next_ in zip(hidden[:-1], hidden[1:], strict=True):
        with pytest.raises(AssertionError, match="differs by"):
            compare(one, next_, "neighbouring layers", bound=0.05)


def test_both_norm_conventions_r11():
    """R11: the text norms store an offset from one, formed in float32; the others the weight."""
    x = jnp.asarray([[3.0, -4.0, 0.0, 0.0]], jnp.float32)
    weight = jnp.asarray([2.0**-10, 0.5, -0.25, 0.0], jnp.bfloat16)  # 1 + 2^-10 is no bfloat16
    unit = np.asarray([[1.2, -1.6, 0.0, 0.0]])
    np.testing.assert_allclose(rms_norm(x, weight, 0.0, plus_one=True),
                               unit * [1 + 2.0**-10, 1.5, 0.75, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rms_norm(x, weight, 0.0, plus_one=False),
                               unit * [2.0**-10, 0.5, -0.25, 0.0], rtol=1e-6)


def test_head_is_the_checkpoints_r19(ours):
    """R19: an untied head is its own tensor, a tied one does not exist."""
    untied, tied = ours("plain").params["target"], ours("tied").params["target"]
    assert untied["head"].shape == untied["embed"].shape
    assert not np.array_equal(untied["head"], untied["embed"])
    assert "head" not in tied
