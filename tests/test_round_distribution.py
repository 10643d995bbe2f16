"""R8: three sampled tokens follow the target's own distribution, enumerated exactly.

The vocabulary has 64 tokens. Filters are written out once more here, with a sort in float64. The
drafter proposes the greedy text, which is sometimes what is drawn, or something always wrong.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mmflash_jax.sampling import seed_words
from tests.mock_drafter import ALL
from tests.round_lab import GREEDY, PAGES, Lab, Request
from tests.tiny import write_target

VOCAB, SLOTS, WIDTH, LENGTH = 64, 64, 4, 20
SETTINGS = {"warm": (0.8, 1.0, 0), "nucleus": (1.0, 0.9, 20)}  # temperature, top_p, top_k
DRAFTERS = {"plain": (1, 0), "greedy": (WIDTH, ALL), "half": (WIDTH, 1), "wrong": (WIDTH, 0)}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, layers=3, interval=2, vision=False, mtp=False, shards=1)
    return Lab(folder, VOCAB)


@pytest.fixture(scope="module")
def start(lab):
    """All slots hold the same prompt up to its last token, which is the anchor."""
    prompt = lab.prompt(LENGTH) % VOCAB
    state, params = lab.empty(SLOTS)
    for slot in range(SLOTS):
        state, _ = lab.admit(params, state, slot, Request(prompt[:-1], 3))
    slots = state.slots
    return prompt, state.replace(slots=slots.replace(
        anchor=jnp.full((SLOTS,), prompt[-1], jnp.int32), counts=jnp.zeros_like(slots.counts)))


def _filtered(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Probabilities [..., V] after temperature, top_k and top_p, by sorting."""
    p = np.exp((logits - logits.max(-1, keepdims=True)).astype(np.float64) / temperature)
    order = np.argsort(-p, -1, kind="stable")
    p = np.take_along_axis(p, order, -1)
    p[..., top_k or VOCAB:] = 0
    p /= p.sum(-1, keepdims=True)
    p[np.cumsum(p, -1) - p >= top_p] = 0
    p /= p.sum(-1, keepdims=True)
    out = np.zeros_like(p)
    np.put_along_axis(out, order, p, -1)
    return out


@pytest.fixture(scope="module")
def logits(lab, start):
    """After the prompt and every pair of tokens: rows [64, 64, 3, V]."""
    _, state = start

    @jax.jit
    def look(first):
        second = jnp.arange(SLOTS, dtype=jnp.int32)
        ids = jnp.stack([state.slots.anchor, jnp.full_like(second, first), second], 1)
        variables = {"params": lab.target}
        hidden, _, _ = lab.models.target.apply(variables, ids, state, PAGES, method="verify")
        return lab.models.target.apply(variables, hidden, method="logits")

    return np.stack([np.asarray(look(first)) for first in range(VOCAB)])


def _joint(logits: np.ndarray, setting: tuple) -> np.ndarray:
    p = _filtered(logits, *setting)
    return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]


def _draw(lab: Lab, start, setting: tuple, width: int, right: int, draws: int, seed: int):
    """[draws, 3] tokens, a seed each."""
    prompt, ready = start
    temperature, top_p, top_k = setting
    params = lab.empty(SLOTS)[1]
    greedy = [Request(prompt, 5, options=GREEDY)]
    text = np.concatenate([prompt, lab.alone(greedy)[0].ids])
    params["drafter"]["truth"][:, :len(text)] = text
    params["drafter"]["right"][:] = right
    found = []
    for begin in range(seed, seed + draws, SLOTS):
        seeds = np.array([seed_words(begin + i) for i in range(SLOTS)], np.uint32)
        state = jax.tree.map(jnp.copy, ready)
        state = state.replace(slots=state.slots.replace(
            active=jnp.ones((SLOTS,), bool), remaining=jnp.full((SLOTS,), 3, jnp.int32),
            seed=seeds, temperature=jnp.full((SLOTS,), temperature),
            top_p=jnp.full((SLOTS,), top_p), top_k=jnp.full((SLOTS,), top_k, jnp.int32)))
        found += lab.step(params, state, width)[1]
    return np.array(found[:draws])


def _p_value(found: np.ndarray, expected: np.ndarray, least: int) -> float:
    """Chi-square of counts against probabilities, flat; rare outcomes share one bin. At least
    `least` bins must remain."""
    draws = found.sum()
    common = expected * draws >= 5
    seen = np.append(found[common], found[~common].sum())
    want = np.append(expected[common], expected[~common].sum()) * draws
    if want[-1] < 5:
        seen, want = (np.append(x[:-2], x[-2:].sum()) for x in (seen, want))
    assert len(seen) >= least, "too little is tested"
    return stats.chisquare(seen, want * draws / want.sum()).pvalue


def _check(lab, start, logits, how: str, drafter: str, draws: int) -> None:
    joint = _joint(logits, SETTINGS[how])
    assert abs(joint.sum() - 1) < 1e-9
    seed = 10**6 * (1 + list(DRAFTERS).index(drafter)) + 2**33
    found = _draw(lab, start, SETTINGS[how], *DRAFTERS[drafter], draws, seed)
    assert found.shape == (draws, 3)
    assert (joint[tuple(found.T)] > 0).all(), "a token outside the filters"
    counts = np.zeros(joint.shape)
    np.add.at(counts, tuple(found.T), 1)
    for axes, least in (((), 20), ((1, 2), 3), ((0, 2), 3), ((0, 1), 3)):
        p = _p_value(counts.sum(axes).ravel(), joint.sum(axes).ravel(), least)
        assert p > 0.001, f"summed over {axes}: p {p}"


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("how", SETTINGS)
def test_joint_distribution(lab, start, logits, how, drafter):
    _check(lab, start, logits, how, drafter, 2048)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("how", SETTINGS)
def test_joint_distribution_of_many_draws(lab, start, logits, how, drafter):
    _check(lab, start, logits, how, drafter, 20_000)


def test_a_wrong_distribution_is_noticed(lab, start, logits):
    """The same draws against a temperature that is off by a fifth."""
    found = _draw(lab, start, SETTINGS["warm"], *DRAFTERS["greedy"], 2048, 5)
    counts = np.zeros((VOCAB,) * 3)
    np.add.at(counts, tuple(found.T), 1)
    assert _p_value(counts.ravel(), _joint(logits, (0.96, 1.0, 0)).ravel(), 20) < 1e-6
