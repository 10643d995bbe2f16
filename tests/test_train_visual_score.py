"""Divergences against float64, and how they become g."""

import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.train.visual_score import (
    DIVERGENCES,
    Scale,
    divergence,
    entropy,
    fit_scale,
    grounding,
)


def logits(seed, spread=3.0, size=(6, 50)):
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def plain(a, b, kind, tokens):
    found = []
    for x, y, token in zip(a.astype(np.float64), b.astype(np.float64), tokens, strict=True):
        p, q = np.exp(x) / np.exp(x).sum(), np.exp(y) / np.exp(y).sum()
        m = (p + q) / 2
        found.append({
            "kl_forward": (p * np.log(p / q)).sum(),
            "kl_reverse": (q * np.log(q / p)).sum(),
            "js": ((p * np.log(p / m)).sum() + (q * np.log(q / m)).sum()) / 2,
            "tv": abs(p - q).sum() / 2,
            "nll_delta": np.log(p[token] / q[token]),
        }[kind])
    return found


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_divergences_are_those_of_float64(kind):
    a, b, tokens = logits(0), logits(1), np.arange(6)
    given = {"tokens": jnp.asarray(tokens)} if kind == "nll_delta" else {}
    got = divergence(a, b, kind, **given)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, plain(a, b, kind, tokens), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(divergence(a, a + 5, kind, **given), 0, atol=2e-6)
    narrow = jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16)
    wide = [np.asarray(x, np.float32) for x in narrow]
    np.testing.assert_allclose(divergence(*narrow, kind, **given), plain(*wide, kind, tokens),
                               rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ("kl_forward", "kl_reverse", "js", "tv"))
def test_divergences_of_extreme_rows_are_finite_and_not_negative(kind):
    a = np.array([[0, 300, 0], [0, -np.inf, 1], [2, 2, 2]], np.float32)
    b = np.array([[300, 0, 0], [0, -np.inf, 2], [2, 2, 2]], np.float32)
    got = np.asarray(divergence(a, b, kind))
    assert np.isfinite(got).all() and (got >= 0).all() and got[2] == 0
    if kind in ("js", "tv"):
        assert got[0] == pytest.approx({"js": np.log(2), "tv": 1.0}[kind])


def test_entropy():
    a = logits(2)
    p = np.exp(a.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(entropy(a), -(p * np.log(p)).sum(-1), rtol=1e-5)
    assert entropy(np.array([[0, -np.inf]], np.float32))[0] == 0


def test_quantile_is_the_share_of_the_corpus_below():
    corpus = np.random.default_rng(0).lognormal(-3, 3, 20_000)
    scale = fit_scale(corpus)
    some = corpus[:500]
    want = (corpus[:, None] <= some).mean(0)
    g = grounding(some, np.zeros(500), scale, "quantile")
    np.testing.assert_allclose(g, want, atol=1.5e-3)
    assert g.dtype == np.float32 and g.min() > 0
    assert grounding(np.array([corpus.max(), -1.0]), np.zeros(2), scale).tolist() == [1, 0]
    binary = grounding(some, np.zeros(500), scale, "binary")
    assert set(binary) == {0, 1}
    np.testing.assert_array_equal(binary == 1, scale.rank(some) >= 0.75)
    assert abs(binary.mean() - 0.25) < 0.05


def test_saturate_is_one_half_at_the_third_quartile():
    corpus = np.random.default_rng(1).exponential(size=10_000)
    scale = fit_scale(corpus)
    c = np.quantile(corpus, 0.75)
    got = grounding(np.array([0, c, 3 * c, -1]), np.zeros(4), scale, "saturate")
    np.testing.assert_allclose(got, [0, 0.5, 0.75, 0], atol=1e-3)
    nothing = Scale(np.zeros(1000))
    assert grounding(np.array([0.0, 1.0]), np.zeros(2), nothing, "saturate").tolist() == [0, 1]


def test_identity_and_the_gate():
    scores, entropies = np.array([-0.5, 0.25, 7.0]), np.array([0.0, 1.0, np.log(4)])
    gated = grounding(scores, entropies, None, "identity")
    np.testing.assert_allclose(gated, [0, 0.25 * np.exp(-1), 0.25], rtol=1e-6)
    plainly = grounding(scores, entropies, None, "identity", confidence_gate=False)
    assert plainly.tolist() == [0, 0.25, 1]


def test_bad_input_is_refused():
    a = logits(0)
    with pytest.raises(ValueError, match="'kl', expected one of"):
        divergence(a, a, "kl")
    with pytest.raises(ValueError, match="expected the same"):
        divergence(a, a[:3])
    with pytest.raises(ValueError, match="'nll_delta' without tokens"):
        divergence(a, a, "nll_delta")
    with pytest.raises(ValueError, match="'js' with tokens"):
        divergence(a, a, "js", jnp.arange(6))
    with pytest.raises(ValueError, match="1 of 2 scores are not finite"):
        fit_scale(np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match="0 scores"):
        fit_scale(np.array([]))
    with pytest.raises(ValueError, match="'quantile' without a scale"):
        grounding(np.ones(2), np.ones(2), None)
    with pytest.raises(ValueError, match="'rank', expected one of"):
        grounding(np.ones(2), np.ones(2), None, "rank")
    with pytest.raises(ValueError, match="differ"):
        grounding(np.ones(2), np.ones(3), None, "identity")
