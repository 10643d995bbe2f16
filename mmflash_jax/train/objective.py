"""What the drafter is trained for: weighted cross-entropy over the slots of its blocks.

In: hidden rows of blocks, the frozen head, the tokens the target wrote, which slots are
supervised, and g, how much the picture mattered for a slot's token. Out: a sum of weighted
losses, what to divide it by, and sums for the metrics. Sums add up over micro-batches and
devices, and are divided once (R23). Nothing here knows the drafter, anchors or where g is from.
Letters: B sequences, N blocks of a sequence, K slots of a block (its rows but the anchor's),
H hidden, V vocabulary. Sources: DFlash arXiv 2602.06036, D-PACE arXiv 2605.18810, MMFlash.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmflash_jax.layers import linear, precision, tree_sum

BASES = ("dflash", "prefix", "dpace")
TEXT_ONLY = -1.0  # g of text-only rows and of padding


@dataclasses.dataclass(frozen=True)
class Objective:
    """Weight of slot k = 1 .. K, cross-entropy ce_k, p_k = exp(-ce_k):

        w_k = base_k * (1 + alpha * g_k * (1 - p_k))
        dflash  base_k = exp(-(k - 1) / gamma)              loss = sum w ce / (sum w + 1e-6)
        prefix  base_k = C_k = prod_{i <= k} ((1 - s) p_i + s)     loss = sum w ce / B
        dpace   base_k = sum_{m >= k} C_m                          loss = sum w ce / B

    Slots without supervision weigh nothing, are factors of 1 in C and no terms of its sum.
    Without `fade` the factor (1 - p_k) is 1. With `mass_conserving` the weights of a sequence are
    scaled to the sum they have at alpha = 0. Raises ValueError on a value out of range.
    """

    base: str = "prefix"
    smoothing: float = 0.5  # s
    gamma: float = 7.0
    alpha: float = 1.0
    fade: bool = True
    mass_conserving: bool = False

    def __post_init__(self):
        if self.base not in BASES:
            raise ValueError(f"base is {self.base!r}, expected one of {list(BASES)}")
        if not 0 <= self.smoothing <= 1:
            raise ValueError(f"smoothing is {self.smoothing}, expected 0 to 1")
        if not 0 < self.gamma < float("inf"):
            raise ValueError(f"gamma is {self.gamma}, expected a positive number")
        if not 0 <= self.alpha < float("inf"):
            raise ValueError(f"alpha is {self.alpha}, expected 0 (off) or a positive number")


@flax.struct.dataclass
class Slots:
    """What the drafter makes of each slot; slots without supervision hold 0, 1, False."""

    ce: jax.Array  # [B, N, K] f32, cross-entropy on the target's token
    p: jax.Array  # [B, N, K] f32, exp(-ce), no gradient
    hit: jax.Array  # [B, N, K] bool, the target's token is the argmax (ties to the lowest id)


def slot_losses(
    hidden: jax.Array,  # [B, N, K, H], final normed rows of the blocks, anchors' rows left out
    head: jax.Array,  # [V, H], frozen: no gradient
    targets: jax.Array,  # [B, N, K] i32
    mask: jax.Array,  # [B, N, K] bool, supervised
    chunk: int = 64,
) -> Slots:
    """Cross-entropy over the whole vocabulary, `chunk` blocks of each sequence at a time: logits
    [B, chunk, K, V] are the largest array there is. A chunk is cut from every sequence, so that
    a batch spread over devices stays where it is. Whatever stands in rows and targets without
    supervision, inf and NaN too, reaches neither values nor gradient (R33)."""
    if hidden.shape[:3] != targets.shape or mask.shape != targets.shape:
        raise ValueError(f"hidden rows {hidden.shape[:3]}, targets {targets.shape} and mask "
                         f"{mask.shape} differ, expected the same [B, N, K]")
    if hidden.shape[3] != head.shape[1]:
        raise ValueError(f"hidden size is {hidden.shape[3]}, but the head's is {head.shape[1]}")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk} blocks, expected at least 1")
    blocks = targets.shape[1]
    chunk = min(chunk, blocks)
    hidden = jnp.where(mask[..., None], hidden, 0)
    targets = jnp.where(mask, targets, 0)

    def cut(x):  # [B, N, ...] -> [chunks, B, chunk, ...]
        x = jnp.pad(x, [(0, 0), (0, -blocks % chunk)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0)

    def joined(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(len(x), -1, *x.shape[3:])[:, :blocks]

    ce, hit = _chunked_ce(cut(hidden), lax.stop_gradient(head), cut(targets))
    ce = jnp.where(mask, joined(ce), 0)
    return Slots(ce, jnp.exp(-lax.stop_gradient(ce)), joined(hit) & mask)


@jax.custom_vjp
def _chunked_ce(hidden, head, targets):  # [chunks, ..., H], [V, H], [chunks, ...]
    return lax.map(lambda xs: _ce(xs[0], head, xs[1])[:2], (hidden, targets))


def _ce(hidden, head, targets):
    logits = linear(hidden, head, jnp.float32)
    total = jax.nn.logsumexp(logits, -1)
    own = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return total - own, jnp.argmax(logits, -1) == targets, (logits, total)


def _chunked_ce_forward(hidden, head, targets):
    """A slot's cross-entropy depends on its own row only, so that its gradient is known, up to a
    factor, while the logits are at hand: [.., H] kept for each slot, and the backward pass needs
    no third product with the head. The head reads softmax minus one-hot in its own dtype."""
    def one(xs):
        x, target = xs
        ce, hit, (logits, total) = _ce(x, head, target)
        error = jnp.exp(logits - total[..., None])
        error -= target[..., None] == jnp.arange(len(head))
        slope = lax.dot_general(error.astype(head.dtype), head,
                                (((error.ndim - 1,), (0,)), ((), ())),
                                precision=precision(head.dtype),
                                preferred_element_type=jnp.float32)
        return (ce, hit), slope.astype(x.dtype)

    out, slope = lax.map(one, (hidden, targets))
    return out, slope


def _chunked_ce_backward(slope, cotangents):
    of_hidden = slope.astype(jnp.float32) * cotangents[0][..., None]
    return of_hidden.astype(slope.dtype), None, None


_chunked_ce.defvjp(_chunked_ce_forward, _chunked_ce_backward)


def base_weights(objective: Objective, p: jax.Array, mask: jax.Array) -> jax.Array:
    """base_k float32 [..., K] of p [..., K], 0 where mask is not set."""
    p = p.astype(jnp.float32)
    if objective.base == "dflash":
        slots = np.arange(p.shape[-1], dtype=np.float64)
        base = jnp.broadcast_to(np.exp(-slots / objective.gamma).astype(np.float32), p.shape)
    else:
        s = objective.smoothing
        base = jnp.cumprod(jnp.where(mask, (1 - s) * p + s, 1.0), -1)
        if objective.base == "dpace":
            base = lax.cumsum(jnp.where(mask, base, 0.0), p.ndim - 1, reverse=True)
    return jnp.where(mask, base, 0.0)


def slot_weights(
    objective: Objective,
    p: jax.Array,  # [B, N, K]
    mask: jax.Array,  # [B, N, K] bool
    g: jax.Array,  # [B, N, K] f32, 0 to 1, or TEXT_ONLY
) -> tuple[jax.Array, jax.Array]:
    """(w, boost) float32 [B, N, K], no gradient; boost is w over base. alpha = 0, g = 0 and
    text-only slots give the base bit for bit."""
    p, g = lax.stop_gradient((p.astype(jnp.float32), g.astype(jnp.float32)))
    base = base_weights(objective, p, mask)
    boost = objective.alpha * jnp.maximum(g, 0.0)
    if objective.fade:
        boost *= 1 - p
    boost = jnp.where(mask, 1 + boost, 1.0)
    if objective.mass_conserving:
        axes = (1, 2)
        before, after = base.sum(axes, keepdims=True), (base * boost).sum(axes, keepdims=True)
        # Two sums of the same numbers need not be formed in the same order: no ratio, no change.
        changed = jnp.any(boost != 1, axes, keepdims=True) & (after > 0)
        boost *= jnp.where(changed, before / jnp.where(after > 0, after, 1.0), 1.0)
    return base * boost, boost


def _sum(x: jax.Array) -> jax.Array:
    """Sum of x [B, N, K] in one written order: `jnp.sum` is compiled, and rounded, by what it is
    fused with, which would differ with and without the visual term."""
    return tree_sum(tree_sum(lax.optimization_barrier(x.reshape(len(x), -1)), 1), 0)


@flax.struct.dataclass
class Totals:
    """Sums over text-only blocks [..., 0] and blocks with a picture [..., 1]; of several batches,
    add them. `runs` are slots hit from the first on, as the target would accept them."""

    blocks: jax.Array  # [2] f32, all of them with at least one supervised slot
    slots: jax.Array  # [2] f32, supervised
    ce: jax.Array  # [2] f32
    hits: jax.Array  # [2] f32
    runs: jax.Array  # [2] f32
    weight: jax.Array  # [2] f32
    loss: jax.Array  # [2] f32, weighted cross-entropy
    g: jax.Array  # [2] f32
    boost: jax.Array  # [2] f32


def loss_terms(
    objective: Objective,
    slots: Slots,
    mask: jax.Array,  # [B, N, K] bool
    g: jax.Array,  # [B, N, K] f32
) -> tuple[jax.Array, jax.Array, Totals]:
    """(sum of w ce, what divides it, metrics) of a micro-batch. Only the first carries gradient.
    Add all three over micro-batches, then `loss`. Slots without supervision add nothing."""
    if not slots.ce.shape == mask.shape == g.shape:
        raise ValueError(f"cross-entropies {slots.ce.shape}, mask {mask.shape} and g {g.shape} "
                         "differ, expected the same [B, N, K]")
    weight, boost = slot_weights(objective, slots.p, mask, g)
    weighted = weight * jnp.where(mask, slots.ce, 0.0)
    count = _sum(weight) if objective.base == "dflash" else jnp.float32(len(mask))
    totals = _totals(slots, mask, g, weight, boost, weighted)
    return _sum(weighted), count, lax.stop_gradient(totals)


def loss(objective: Objective, weighted: jax.Array, count: jax.Array) -> jax.Array:
    """The loss of the summed terms. Gradients of `weighted` are divided by the same number, which
    `loss(objective, gradient, count)` does; without any supervised slot they are 0."""
    return weighted / (count + (1e-6 if objective.base == "dflash" else 0.0))


def _totals(slots, mask, g, weight, boost, weighted) -> Totals:
    pictured = jnp.any(mask & (g >= 0), -1)  # [B, N]
    used = jnp.any(mask, -1)
    side = jnp.stack([used & ~pictured, used & pictured], -1).astype(jnp.float32)
    runs = jnp.cumprod((slots.hit & mask).astype(jnp.float32), -1)

    def split(x):  # [B, N, K]
        return jnp.einsum("bn,bnm->m", jnp.where(mask, x, 0).sum(-1, dtype=jnp.float32), side,
                          precision=lax.Precision.HIGHEST)

    return Totals(
        blocks=side.sum((0, 1)), slots=split(mask), ce=split(slots.ce), hits=split(slots.hit),
        runs=split(runs), weight=split(weight), loss=split(weighted), g=split(jnp.maximum(g, 0.0)),
        boost=split(boost))


def summary(totals: Totals) -> dict[str, float]:
    """Named numbers for the log, nan where there was nothing to average: for each modality the
    mean cross-entropy, hit rate and simulated acceptance length (run + 1, mean over anchors); of
    blocks with a picture mean g, mean boost, and their share of weight and loss."""
    t: dict[str, np.ndarray] = {
        f.name: np.asarray(getattr(totals, f.name), np.float64)
        for f in dataclasses.fields(totals)
    }

    def over(a, b) -> float:
        return float(a / b) if b else float("nan")

    found = {}
    for i, kind in enumerate(("text", "image")):
        found[f"{kind}_ce"] = over(t["ce"][i], t["slots"][i])
        found[f"{kind}_accuracy"] = over(t["hits"][i], t["slots"][i])
        found[f"{kind}_acceptance_length"] = 1 + over(t["runs"][i], t["blocks"][i])
    for name in ("g", "boost"):
        found[f"image_{name}"] = over(t[name][1], t["slots"][1])
    for name in ("weight", "loss"):
        found[f"image_{name}_share"] = over(t[name][1], t[name].sum())
    return found


def total_loss(
    objective: Objective, hidden: jax.Array, head: jax.Array, targets: jax.Array,
    mask: jax.Array, g: jax.Array, chunk: int = 64,
) -> tuple[jax.Array, Totals]:
    """Loss and metrics of one whole batch: `slot_losses`, `loss_terms`, `loss`."""
    slots = slot_losses(hidden, head, targets, mask, chunk)
    weighted, count, totals = loss_terms(objective, slots, mask, g)
    return loss(objective, weighted, count), totals
