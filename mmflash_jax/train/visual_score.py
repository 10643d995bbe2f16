"""How much a picture mattered for a token: two rows of logits -> a divergence -> g in [0, 1].

In: float32 logits of the target with and without the picture, for tokens it wrote itself. Out:
divergence and entropy in nats, on the device; a scale fitted to a corpus, and g, in numpy, since
they are made while data is read. Nothing here knows models, rows of data or files.
Letters: T tokens, V vocabulary. Sources: MMFlash; PGPO arXiv 2604.01840 for the counterfactual.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

DIVERGENCES = ("kl_forward", "kl_reverse", "js", "tv", "nll_delta")
TRANSFORMS = ("quantile", "saturate", "binary", "identity")
KNOTS = 1000


def divergence(
    with_picture: jax.Array,  # [T, V] logits, p
    without: jax.Array,  # [T, V] logits, q
    kind: str = "kl_forward",
    tokens: jax.Array | None = None,  # [T] i32, for nll_delta
) -> jax.Array:
    """float32 [T]: KL(p || q), KL(q || p), Jensen-Shannon (at most log 2), total variation (at most
    1) or log p(y) - log q(y), the only one that can be negative."""
    if kind not in DIVERGENCES:
        raise ValueError(f"divergence is {kind!r}, expected one of {list(DIVERGENCES)}")
    if with_picture.shape != without.shape or with_picture.ndim != 2:
        raise ValueError(f"logits with the picture {with_picture.shape} and without "
                         f"{without.shape}, expected the same [T, V]")
    if (tokens is None) == (kind == "nll_delta"):
        raise ValueError(f"divergence {kind!r} with{'out' if tokens is None else ''} tokens: "
                         "nll_delta reads them, no other does")
    log_p, log_q = (jax.nn.log_softmax(x.astype(jnp.float32), -1) for x in (with_picture, without))
    if kind == "nll_delta":
        assert tokens is not None
        return jnp.take_along_axis(log_p - log_q, tokens[:, None], -1)[:, 0]
    if kind == "tv":
        return 0.5 * jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)).sum(-1)
    if kind == "kl_forward":
        found = _kl(log_p, log_q)
    elif kind == "kl_reverse":
        found = _kl(log_q, log_p)
    else:
        middle = jnp.logaddexp(log_p, log_q) - np.float32(np.log(2))
        found = 0.5 * (_kl(log_p, middle) + _kl(log_q, middle))
    return jnp.maximum(found, 0.0)  # rounding may leave equal rows a little below 0


def _kl(log_p, log_q):
    return _mean(log_p, log_p - log_q)


def _mean(log_p, value):
    # Where p is 0 the term is 0, also if the value is not finite there.
    return jnp.where(log_p == -jnp.inf, 0.0, jnp.exp(log_p) * value).sum(-1)


def entropy(logits: jax.Array) -> jax.Array:  # [T, V] -> [T] f32
    """Entropy of a row in nats."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -_mean(log_p, log_p)


@dataclasses.dataclass(frozen=True)
class Scale:
    """The divergences of a corpus, as their empirical distribution at KNOTS points."""

    knots: np.ndarray  # [KNOTS] f64, ascending

    @property
    def third_quartile(self) -> float:
        return float(np.quantile(self.knots, 0.75))

    def rank(self, scores: np.ndarray) -> np.ndarray:
        """The share of the knots not above each score, 0 to 1."""
        return np.searchsorted(self.knots, scores, side="right") / len(self.knots)


def fit_scale(scores: np.ndarray) -> Scale:  # [any] divergences of all scored tokens
    """The scale of a corpus. Raises ValueError if there is no score or one is not finite."""
    scores = _finite(scores).ravel()
    if not len(scores):
        raise ValueError("0 scores to fit a scale to, expected at least 1")
    return Scale(np.quantile(scores, np.linspace(0, 1, KNOTS)))


def grounding(
    scores: np.ndarray,  # [...] divergences
    entropies: np.ndarray,  # [...] of the rows with the picture
    scale: Scale | None,
    transform: str = "quantile",
    confidence_gate: bool = True,
) -> np.ndarray:
    """g float32 [...] in [0, 1]: the rank in the corpus; score / (score + third quartile); 1 from
    rank 0.75 up; or the score itself, clipped. The gate multiplies by exp(-entropy): a drafter
    cannot learn what the target is unsure of. `identity` alone needs no scale."""
    if transform not in TRANSFORMS:
        raise ValueError(f"transform is {transform!r}, expected one of {list(TRANSFORMS)}")
    scores, entropies = _finite(scores), _finite(entropies)
    if scores.shape != entropies.shape:
        raise ValueError(f"scores {scores.shape} and entropies {entropies.shape} differ")
    if transform == "identity":
        g = np.clip(scores, 0, 1)
    elif scale is None:
        raise ValueError(f"transform {transform!r} without a scale, expected the corpus's")
    elif transform == "saturate":
        positive = np.maximum(scores, 0)
        total = positive + max(scale.third_quartile, 0)
        g = np.divide(positive, total, out=np.zeros_like(positive), where=total > 0)
    else:
        g = scale.rank(scores)
        if transform == "binary":
            g = (g >= 0.75).astype(np.float64)
    if confidence_gate:
        g = g * np.exp(-np.maximum(entropies, 0))
    return g.astype(np.float32)


def _finite(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float64)
    bad = values.size - np.count_nonzero(np.isfinite(values))
    if bad:
        raise ValueError(f"{bad} of {values.size} scores are not finite, expected none")
    return values
