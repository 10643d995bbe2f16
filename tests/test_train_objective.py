"""The training objective against a plain float64 computation, slot by slot."""

import dataclasses
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.train.objective import (
    TEXT_ONLY,
    Objective,
    Slots,
    loss,
    loss_terms,
    slot_losses,
    slot_weights,
    summary,
    total_loss,
)

B, N, K, H, V = 3, 5, 15, 8, 37
OPTIONS = [
    Objective(base, smoothing, gamma, alpha, fade, mass)
    for base, (smoothing, gamma), (alpha, fade, mass) in itertools.product(
        ("dflash", "prefix", "dpace"), ((0.5, 7.0), (0.2, 4.0)),
        [(0.0, True, False), *itertools.product((1.0, 3.0), (True, False), (False, True))])
]


def batch(seed=0, supervised=0.8, rows=B):
    """A batch whose first row is text-only and whose masks have holes."""
    rng = np.random.default_rng(seed)
    g = rng.random((rows, N, K), np.float32)
    g[0] = TEXT_ONLY
    return {
        "hidden": rng.standard_normal((rows, N, K, H), np.float32),
        "head": rng.standard_normal((V, H), np.float32),
        "targets": rng.integers(0, V, (rows, N, K)),
        "mask": rng.random((rows, N, K)) < supervised,
        "g": g,
    }


def plain(o, hidden, head, targets, mask, g):
    """Weights, cross-entropies, loss and its gradient by loops in float64."""
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    rows = len(hidden)
    weight, ce, slope = np.zeros(mask.shape), np.zeros(mask.shape), np.zeros(hidden.shape)
    for b in range(rows):
        bases = np.zeros(mask.shape[1:])
        for n in range(mask.shape[1]):
            confidence, product = [], 1.0
            for k in range(K):
                if mask[b, n, k]:
                    logits = head @ hidden[b, n, k]
                    e = np.exp(logits - logits.max())
                    prob = e / e.sum()
                    y = targets[b, n, k]
                    ce[b, n, k] = -math.log(prob[y])
                    slope[b, n, k] = (prob - np.eye(V)[y]) @ head
                    product *= (1 - o.smoothing) * prob[y] + o.smoothing
                confidence.append(product)
            for k in range(K):
                if not mask[b, n, k]:
                    continue
                later = sum(confidence[m] for m in range(k, K) if mask[b, n, m])
                base = {"dflash": math.exp(-k / o.gamma), "prefix": confidence[k],
                        "dpace": later}[o.base]
                fade = 1 - math.exp(-ce[b, n, k]) if o.fade else 1.0
                bases[n, k] = base
                weight[b, n, k] = base * (1 + o.alpha * max(g[b, n, k], 0) * fade)
        if o.mass_conserving and weight[b].sum() > 0:
            weight[b] *= bases.sum() / weight[b].sum()
    count = weight.sum() + 1e-6 if o.base == "dflash" else rows
    return weight, ce, (weight * ce).sum() / count, weight[..., None] * slope / count


@partial(jax.jit, static_argnums=(0, 1))
def step(o, chunk, hidden, head, targets, mask, g):
    return jax.value_and_grad(
        lambda x: total_loss(o, x, head, targets, mask, g, chunk)[0])(hidden)


def value_and_grad(o, data, chunk=2):
    return step(o, chunk, *(data[n] for n in ("hidden", "head", "targets", "mask", "g")))


def from_ce(o, ce, mask, g):
    """Loss and its gradient of cross-entropies."""
    def run(ce):
        weighted, count, _ = loss_terms(o, Slots(ce, jnp.exp(-ce), mask), mask, g)
        return loss(o, weighted, count)

    return jax.value_and_grad(run)(ce)


compiled_from_ce = jax.jit(from_ce, static_argnums=0)


@jax.jit
def losses_and_slope(hidden, head, targets, mask, cotangent):
    def run(x):
        slots = slot_losses(x, head, targets, mask, 3)
        return slots.ce, slots.p

    ce, back, p = jax.vjp(run, hidden, has_aux=True)
    return ce, p, back(cotangent)[0]


@pytest.mark.parametrize("o", OPTIONS, ids=lambda o: "-".join(map(str, dataclasses.astuple(o))))
def test_weights_loss_and_gradient_are_those_of_plain_float64(o):
    data = batch()
    weight, ce, value, gradient = plain(o, **data)
    ours, _ = slot_weights(o, np.exp(-ce), data["mask"], data["g"])
    np.testing.assert_allclose(ours, weight, rtol=2e-6, atol=1e-9)
    got, slope = from_ce(o, jnp.asarray(ce, jnp.float32), data["mask"], data["g"])
    np.testing.assert_allclose(got, value, rtol=2e-6)
    got_ce, p, got_gradient = losses_and_slope(
        *(data[n] for n in ("hidden", "head", "targets", "mask")), slope)
    np.testing.assert_allclose(got_ce, ce, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(p, np.exp(-ce), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got_gradient, gradient, rtol=1e-5, atol=1e-6 * abs(gradient).max())
    assert ours.dtype == got_ce.dtype == p.dtype == jnp.float32


VISUAL = tuple(itertools.product((True, False), (True, False)))


@pytest.mark.parametrize("base", ("dflash", "prefix", "dpace"))
@pytest.mark.parametrize("fade, mass", VISUAL)
def test_without_the_visual_term_the_loss_is_bit_identical_to_the_base(base, fade, mass):
    data = batch(seed=1)
    ce = jnp.asarray(plain(Objective(base), **data)[1], jnp.float32)
    off = np.zeros_like(data["g"])
    alone = Objective(base, alpha=0.0)
    o = Objective(base, alpha=2.0, fade=fade, mass_conserving=mass)
    want = compiled_from_ce(alone, ce, data["mask"], off)
    for ours, g in ((alone, data["g"]), (o, off), (o, off + TEXT_ONLY)):
        for x, y in zip(compiled_from_ce(ours, ce, data["mask"], g), want, strict=True):
            np.testing.assert_array_equal(x, y)
    assert not np.array_equal(compiled_from_ce(o, ce, data["mask"], data["g"])[1], want[1])


@pytest.mark.parametrize("base", ("dflash", "prefix", "dpace"))
def test_without_the_visual_term_the_whole_step_is_bit_identical_to_the_base(base):
    data = batch(seed=1)
    want = value_and_grad(Objective(base, alpha=0.0), data)
    text = {**data, "g": np.full_like(data["g"], TEXT_ONLY)}
    for ours, theirs in zip(value_and_grad(Objective(base), text), want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("base", ("dflash", "prefix", "dpace"))
@pytest.mark.parametrize("mass", (True, False))
def test_a_text_row_beside_picture_rows_weighs_what_it_weighs_alone(base, mass):
    data = batch(seed=2)
    ce = jnp.asarray(plain(Objective(base), **data)[1], jnp.float32)
    on, _ = jax.jit(slot_weights, static_argnums=0)(
        Objective(base, mass_conserving=mass), jnp.exp(-ce), data["mask"], data["g"])
    off, _ = jax.jit(slot_weights, static_argnums=0)(
        Objective(base, alpha=0.0), jnp.exp(-ce), data["mask"], data["g"])
    np.testing.assert_array_equal(on[0], off[0])
    assert not np.array_equal(on[1], off[1])
    if mass:
        np.testing.assert_allclose(on.sum((1, 2)), off.sum((1, 2)), rtol=1e-6)


def test_no_gradient_flows_through_weights_g_or_the_head():
    data = batch()
    o = Objective("prefix")
    head, ce = jnp.asarray(data["head"]), jnp.asarray(plain(o, **data)[1], jnp.float32)

    def through(ce, g):
        p = jnp.exp(-ce)  # attached on purpose
        return loss_terms(o, Slots(ce, p, data["mask"]), data["mask"], g)[0]

    of_ce, of_g = jax.grad(through, (0, 1))(ce, jnp.asarray(data["g"]))
    weight, _ = slot_weights(o, jnp.exp(-ce), data["mask"], data["g"])
    np.testing.assert_allclose(of_ce, weight, rtol=1e-6)
    assert not np.any(of_g)
    of_head = jax.grad(lambda h: total_loss(
        o, data["hidden"], h, data["targets"], data["mask"], data["g"])[0])(head)
    assert not np.any(of_head)


@pytest.mark.parametrize("chunk", (1, 3, 64))
def test_chunks_change_nothing(chunk):
    data = batch(seed=3)
    want = plain(Objective("dpace"), **data)
    value, gradient = value_and_grad(Objective("dpace"), data, chunk)
    np.testing.assert_allclose(value, want[2], rtol=1e-5)
    np.testing.assert_allclose(gradient, want[3], rtol=1e-4, atol=1e-6)
    slots = slot_losses(data["hidden"], data["head"], data["targets"], data["mask"], chunk)
    scores = data["hidden"] @ data["head"].T
    np.testing.assert_array_equal(slots.hit, (scores.argmax(-1) == data["targets"]) & data["mask"])


def largest_with_vocabulary(jaxpr, vocabulary):
    most = 0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            shape = getattr(variable.aval, "shape", ())
            if shape and shape[-1] == vocabulary:
                most = max(most, math.prod(shape))
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                most = max(most, largest_with_vocabulary(inner, vocabulary))
    return most


def test_logits_of_all_blocks_never_exist():
    blocks, vocabulary, chunk = 32, 1009, 4
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (
        ((1, blocks, K, H), jnp.bfloat16), ((vocabulary, H), jnp.bfloat16),
        ((1, blocks, K), jnp.int32), ((1, blocks, K), bool), ((1, blocks, K), jnp.float32))]

    def run(*arrays):
        return total_loss(Objective(), *arrays, chunk)[0]

    step = jax.value_and_grad(run)
    most = largest_with_vocabulary(jax.make_jaxpr(step)(*shapes).jaxpr, vocabulary)
    assert most == chunk * K * vocabulary
    memory = jax.jit(step).lower(*shapes).compile().memory_analysis()
    if memory is not None:
        assert memory.temp_size_in_bytes < blocks * K * vocabulary * 4 // 2


def test_bfloat16_rows_give_float32_losses_near_the_exact_ones():
    data = batch(seed=4)
    exact = {n: np.asarray(jnp.asarray(data[n], jnp.bfloat16), np.float32)
             for n in ("hidden", "head")}
    _, ce, value, gradient = plain(Objective(), **{**data, **exact})
    narrow = {**data, **{n: jnp.asarray(data[n], jnp.bfloat16) for n in exact}}
    got, got_gradient = value_and_grad(Objective(), narrow)
    assert got.dtype == jnp.float32 and got_gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(got, value, rtol=1e-4)
    flat, want = np.asarray(got_gradient, np.float64).ravel(), gradient.ravel()
    assert flat @ want / np.linalg.norm(flat) / np.linalg.norm(want) > 0.9999
    assert abs(np.linalg.norm(flat) / np.linalg.norm(want) - 1) < 1e-2


def test_ties_of_the_argmax_go_to_the_lowest_id():
    head = jnp.ones((4, 2))
    targets = jnp.array([[[0, 1]]])
    slots = slot_losses(jnp.ones((1, 1, 2, 2)), head, targets, jnp.ones((1, 1, 2), bool))
    assert slots.hit.tolist() == [[[True, False]]]


def one_row(mask, seed):
    data = batch(seed, rows=1)
    mask = np.broadcast_to(np.arange(N * K).reshape(1, N, K) < mask, (1, N, K))
    return {**data, "mask": mask, "head": batch(0)["head"]}


@pytest.mark.parametrize("base", ("dflash", "prefix", "dpace"))
def test_r23_gradients_of_uneven_micro_batches_add_up_to_those_of_one_batch(base):
    """A short answer, a long one, and a row without any supervised token."""
    o = Objective(base)
    parts = [one_row(2, 5), one_row(N * K, 6), one_row(0, 7)]
    parts[1]["g"] = np.abs(batch(8)["g"][1:2])

    def weighted(hidden, part):
        slots = slot_losses(hidden, *(part[n] for n in ("head", "targets", "mask")), 2)
        value, count, _ = loss_terms(o, slots, part["mask"], part["g"])
        return value, count

    run = jax.jit(jax.value_and_grad(weighted, has_aux=True))
    found = [run(p["hidden"], p) for p in parts]
    count = sum(c for (_, c), _ in found)
    value = loss(o, sum(v for (v, _), _ in found), count)
    gradient = np.concatenate([loss(o, x, count) for _, x in found])
    whole = {n: np.concatenate([p[n] for p in parts]) for n in parts[0] if n != "head"}
    whole["head"] = parts[0]["head"]
    want, want_gradient = value_and_grad(o, whole)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-5, atol=1e-9)
    assert not np.any(gradient[2])


@pytest.mark.parametrize("base", ("dflash", "prefix", "dpace"))
def test_r33_rows_without_supervision_give_zero_and_no_nan(base):
    data = {**batch(), "mask": np.zeros((B, N, K), bool)}
    value, gradient = value_and_grad(Objective(base, mass_conserving=True), data)
    assert value == 0 and not np.any(gradient)


def test_r33_what_stands_in_unsupervised_slots_reaches_nothing():
    data = batch()
    want = value_and_grad(Objective(), data)
    dirty = {**data, "hidden": data["hidden"].copy(), "targets": data["targets"].copy()}
    dirty["hidden"][~data["mask"]] = np.nan
    dirty["targets"][~data["mask"]] = V + 1000
    for ours, theirs in zip(value_and_grad(Objective(), dirty), want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_infinite_row_that_counts_is_seen_in_the_loss():
    """R33: the step that follows can be skipped only if the loss tells."""
    data = batch()
    data["mask"][1, 2, 3] = True
    data["hidden"][1, 2, 3] = np.inf
    assert not np.isfinite(value_and_grad(Objective(), data)[0])


def test_metrics_count_runs_of_hits_by_modality():
    hit = np.zeros((2, 2, K), bool)
    mask = np.ones((2, 2, K), bool)
    hit[0, 0, :3] = True  # text: run of 3, then a miss, then one more hit
    hit[0, 0, 5] = True
    mask[0, 1] = False  # text: not a block at all
    hit[1, 0] = True  # picture: run of 15
    hit[1, 1, :6] = True  # picture: the answer ends after 4
    mask[1, 1, 4:] = False
    g = np.full(mask.shape, 0.5, np.float32)
    g[0] = TEXT_ONLY
    ce = np.where(mask, 2.0, 0.0).astype(np.float32)
    o = Objective("dflash", alpha=1.0, fade=False)
    weighted, count, totals = loss_terms(
        o, Slots(jnp.asarray(ce), jnp.exp(-ce), jnp.asarray(hit)), mask, g)
    found = summary(totals)
    assert found["text_acceptance_length"] == 4
    assert found["image_acceptance_length"] == 1 + (15 + 4) / 2
    assert found["text_accuracy"] == pytest.approx(4 / 15)
    assert found["image_accuracy"] == 1
    assert found["image_ce"] == found["text_ce"] == 2
    assert found["image_g"] == 0.5 and found["image_boost"] == 1.5
    decay = np.exp(-np.arange(K) / 7)
    image = 1.5 * (decay.sum() + decay[:4].sum())
    assert found["image_weight_share"] == pytest.approx(image / (image + decay.sum()), rel=1e-5)
    assert found["image_loss_share"] == pytest.approx(found["image_weight_share"], rel=1e-5)
    assert float(totals.loss.sum()) == pytest.approx(float(weighted), rel=1e-6)
    assert float(totals.weight.sum()) == pytest.approx(float(count), rel=1e-6)
    twice = summary(jax.tree.map(lambda x: 2 * x, totals))
    assert twice == pytest.approx(found)
    assert math.isnan(summary(jax.tree.map(jnp.zeros_like, totals))["image_ce"])


def test_arms_of_an_experiment_can_be_mapped():
    """Several drafters on the same blocks in one program."""
    data = batch()
    arms = jnp.stack([data["hidden"], data["hidden"] * 0.5])
    g = jnp.stack([data["g"], jnp.zeros_like(data["g"])])

    def run(hidden, g):
        return total_loss(Objective(), hidden, data["head"], data["targets"], data["mask"], g, 2)[0]

    both = jax.jit(jax.vmap(jax.value_and_grad(run)))(arms, g)
    for i in range(2):
        alone = value_and_grad(Objective(), {**data, "hidden": arms[i], "g": g[i]})
        for ours, theirs in zip(both, alone, strict=True):
            np.testing.assert_allclose(ours[i], theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wrong, message", [
    ({"base": "mmflash"}, "base is 'mmflash'"),
    ({"smoothing": 1.5}, "smoothing is 1.5"),
    ({"gamma": 0}, "gamma is 0"),
    ({"alpha": -1}, "alpha is -1"),
    ({"alpha": float("nan")}, "alpha is nan"),
])
def test_objectives_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Objective(**wrong)


def test_arrays_that_do_not_belong_together_are_refused():
    data = batch()
    with pytest.raises(ValueError, match="differ"):
        slot_losses(data["hidden"], data["head"], data["targets"], data["mask"][:1])
    with pytest.raises(ValueError, match="hidden size is 8, but the head's is 7"):
        slot_losses(data["hidden"], data["head"][:, :7], data["targets"], data["mask"])
    with pytest.raises(ValueError, match="chunk is 0"):
        slot_losses(data["hidden"], data["head"], data["targets"], data["mask"], 0)
