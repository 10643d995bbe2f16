"""The drafter against the torch model of PyPI `dflash`, on random context features.

Full, sliding and mixed layers, causal inside the block and not. Against the committed references
always, against the live model where torch is installed.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity import cases
from tests.parity.ours import Ours
from tests.parity.references import ANCHOR, CONTEXTS
from tests.parity.test_target_hf import compare

CAPACITY = 64  # positions of the context cache, padded: rows past the length hold noise


@pytest.fixture(scope="module")
def ours(folders):
    made: dict[str, Ours] = {}

    def get(name: str) -> Ours:
        if name not in made:
            made[name] = Ours(*folders(name, pair=True))
        return made[name]

    return get


def block(us: Ours, features: np.ndarray, length: int | None = None
          ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normed hidden [B, H], logits [B, V] and draft ids [B - 1] of the block after `features`
    [n, taps * H]; the cache's rows past them come from other features."""
    length = len(features) if length is None else length
    drafter, target, params = us.models.drafter, us.params["target"], us.params["drafter"]
    noise = np.random.RandomState(5).random_sample((CAPACITY - len(features), features.shape[1]))
    rows = np.concatenate([features, 9 * noise.astype(np.float32)])
    keys, values = drafter.apply({"params": params}, jnp.asarray(rows), jnp.arange(CAPACITY),
                                 method="extend")
    keys, values = (tuple(x.swapaxes(0, 1)[None] for x in side) for side in (keys, values))
    place = (jnp.asarray([ANCHOR]), jnp.asarray([length]), keys, values)
    hidden = drafter.apply({"params": params}, target["embed"], *place, method="block_hidden")
    ids = drafter.apply({"params": params}, target["embed"], target["head"], *place,
                        method="draft")
    logits = us.apply(hidden[0], method="logits")
    return np.asarray(hidden[0]), np.asarray(logits), np.asarray(ids[0])


@pytest.mark.parametrize("name", cases.DRAFTERS)
@pytest.mark.parametrize("length", CONTEXTS)
def test_block_equals_dflash(ours, expected, name, length):
    reference = expected("drafter")
    hidden, logits, ids = block(ours(name), cases.context_features(name, length))
    compare(hidden, reference[f"{name}/{length}/hidden"], f"{name}: hidden rows")
    theirs = reference.get(f"{name}/{length}/logits")
    if theirs is not None:
        compare(logits, theirs, f"{name}: logits")
        np.testing.assert_array_equal(ids, theirs[1:].argmax(-1))


@pytest.mark.parametrize("name, reaches", [("sliding", False), ("mixed", True), ("full", True)])
def test_window_bounds_the_context_r20(ours, name, reaches):
    """R20: features older than the window change no bit in a drafter that only slides, and reach
    the block through a full layer. Context rows never see each other: layers do not add up."""
    features = cases.context_features(name, 40)
    oldest = 29  # with window 12, row 0 of the block stands at 40 and sees 29 .. 40
    old = features.copy()
    old[:oldest] += 1.0
    inside = features.copy()
    inside[oldest] += 1.0
    before, after, near = (block(ours(name), x)[0] for x in (features, old, inside))
    assert np.array_equal(before, after) == (not reaches)
    assert np.abs(near[0] - before[0]).max() > 1e-3
