"""Sampling against brute force: filters by sorting in numpy, stops and limits by a Python loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mmflash_jax import sampling

WIDTHS = (1, 4, 8, 16)
jit_sample = jax.jit(sampling.sample)
jit_filtered = jax.jit(sampling.filtered)
jit_gumbel = jax.jit(sampling.gumbel, static_argnums=2)
jit_emit = jax.jit(sampling.emit)
jit_accept = jax.jit(sampling.accept)


def slots(value, count=1, dtype=jnp.float32):
    return jnp.full((count,), value, dtype)


def seeds(*values):
    return jnp.array([sampling.seed_words(v) for v in values], jnp.uint32)


def filter_by_sorting(row, temperature, top_k, top_p, min_p):
    """Kept ids of one row [V]: temperature, top-k, top-p of the renormalised rest, min-p."""
    scaled = row.astype(np.float64) / temperature
    kept = np.isfinite(scaled)
    if top_k > 0:
        kept &= scaled >= np.sort(scaled)[::-1][min(top_k, len(row)) - 1]
    if top_p < 1:
        exp = np.where(kept, np.exp(scaled - scaled.max()), 0)
        descending = np.sort(exp)[::-1]
        reached = np.searchsorted(np.cumsum(descending / exp.sum()), top_p)
        kept &= exp >= descending[min(reached, len(row) - 1)]
    exp = np.exp(scaled - scaled.max())
    return kept & (exp >= min_p)


def kept_by_us(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Kept ids [..., V] of rows [..., V], all with the same parameters."""
    rows = jnp.asarray(logits, jnp.float32).reshape(1, -1, np.shape(logits)[-1])
    out = jit_filtered(
        rows, slots(temperature), slots(top_k, dtype=jnp.int32), slots(top_p), slots(min_p)
    )
    out = np.asarray(out)
    assert not np.isnan(out).any()
    return np.isfinite(out).reshape(np.shape(logits))


# --- filters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(
    "top_k, top_p, min_p",
    [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (20, 1.0, 0.0),
        (5000, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 1e-6, 0.0),
        (0, 0.999, 0.0),
        (0, 1.0, 0.05),
        (20, 0.9, 0.0),
        (50, 0.95, 0.1),
    ],
)
def test_filters_equal_sorting(temperature, top_k, top_p, min_p):
    rng = np.random.default_rng(5)
    rows = rng.normal(0, 3, (8, 997)).astype(np.float32)
    rows[1] = rows[1].astype(jnp.bfloat16).astype(np.float32)  # many exact ties
    rows[2] = np.round(rows[2])
    rows[3, rng.permutation(997)[:800]] = -np.inf
    ours = kept_by_us(rows, temperature, top_k, top_p, min_p)
    for row, kept in zip(rows, ours, strict=True):
        expected = filter_by_sorting(row, np.float32(temperature), top_k, top_p, min_p)
        np.testing.assert_array_equal(kept, expected)


def test_filtered_values_are_the_tempered_log_probabilities():
    rows = np.random.default_rng(0).normal(0, 2, (3, 65)).astype(np.float32)
    out = jit_filtered(rows[None], slots(0.7), slots(9, dtype=jnp.int32), slots(1.0), slots(0.0))[0]
    kept = np.isfinite(out)
    expected = jax.nn.softmax(np.where(kept, rows / np.float32(0.7), -np.inf), axis=-1)
    np.testing.assert_allclose(jax.nn.softmax(out, axis=-1), expected, rtol=2e-6)
    np.testing.assert_array_equal(out.max(-1), 0)


def test_ties_with_the_last_kept_token_all_stay():
    row = [3.0, 2.0, 2.0, 2.0, 1.0]
    assert kept_by_us(row, top_k=2).tolist() == [True, True, True, True, False]
    assert kept_by_us(row, top_p=0.5).tolist() == [True, True, True, True, False]
    assert kept_by_us(row, top_k=1).tolist() == [True, False, False, False, False]


def test_equal_logits_all_stay():
    assert kept_by_us(np.full(33, 1.5)).all()
    assert kept_by_us(np.full(33, 1.5), top_k=1, top_p=1e-9, min_p=1.0).all()


def test_at_least_one_token_stays():
    row = np.array([0.0, 9.0, -np.inf, 8.0], np.float32)
    only = [False, True, False, False]
    assert kept_by_us(row, top_p=0.0).tolist() == only
    assert kept_by_us(row, min_p=1.0).tolist() == only
    assert kept_by_us(row, temperature=1e-38, top_p=0.5).tolist() == only
    assert kept_by_us(row, temperature=1e30).tolist() == [True, True, False, True]


def test_top_p_counts_the_mass_left_by_top_k():
    probabilities = np.array([0.4, 0.2, 0.2 - 1e-3, 0.2 + 1e-3])
    kept = kept_by_us(np.log(probabilities), top_k=2, top_p=0.65)
    assert kept.tolist() == [True, False, False, False]  # 0.4 / 0.601 reaches 0.65


def test_infinitely_unlikely_tokens_never_return_and_make_no_nan():
    row = np.array([-np.inf, 1.0, -np.inf, 0.0], np.float32)
    for top_k in (0, 1, 3, 4, 9):
        assert not kept_by_us(row, top_k=top_k, top_p=0.9999)[[0, 2]].any()
    assert not kept_by_us(np.full(7, -np.inf), top_k=2, top_p=0.5).any()  # and stays free of NaN


def test_each_slot_has_its_own_filters():
    rows = np.random.default_rng(3).normal(0, 2, (4, 2, 130)).astype(np.float32)
    temperature = jnp.array([0.5, 1.0, 0.0, 2.0])
    top_k = jnp.array([0, 5, 3, 40], jnp.int32)
    top_p = jnp.array([0.8, 1.0, 0.5, 0.9])
    min_p = jnp.array([0.0, 0.1, 0.0, 0.02])
    together = jit_filtered(rows, temperature, top_k, top_p, min_p)
    for r in range(4):
        one = slice(r, r + 1)
        alone = jit_filtered(rows[one], temperature[one], top_k[one], top_p[one], min_p[one])
        np.testing.assert_array_equal(alone[0], together[r])
        scale = float(temperature[r]) or 1.0
        for w in range(2):
            expected = filter_by_sorting(
                rows[r, w], scale, int(top_k[r]), float(top_p[r]), float(min_p[r])
            )
            np.testing.assert_array_equal(np.isfinite(together[r, w]), expected)


def test_a_vocabulary_too_large_for_exact_masses_is_refused():
    shape = jax.ShapeDtypeStruct((1, 1, 2**21 + 1), jnp.float32)
    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    with pytest.raises(ValueError, match="2097153.*2097152"):
        jax.eval_shape(sampling.filtered, shape, one, one, one, one)


@pytest.mark.slow
def test_filters_equal_sorting_at_full_vocabulary():
    rows = np.random.default_rng(9).normal(0, 2.5, (2, 248320)).astype(np.float32)
    for top_k, top_p in ((0, 0.95), (20, 0.95), (0, 0.5), (1000, 1.0)):
        ours = kept_by_us(rows, 0.8, top_k, top_p)
        for row, kept in zip(rows, ours, strict=True):
            expected = filter_by_sorting(row, np.float32(0.8), top_k, top_p, 0.0)
            if top_p == 1:
                np.testing.assert_array_equal(kept, expected)
            # float32 exponentials: the border may be a few of the many tiny tokens off
            exp = np.exp((row - row.max()).astype(np.float64) / np.float32(0.8))
            assert exp[kept != expected].sum() < 1e-5 * exp.sum()


# --- greedy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_r49_lowest_id_wins_on_ties_on_every_path(dtype):
    """R49: equal logits go to the lowest id, alone, in a block, beside slots that sample."""
    logits = np.random.default_rng(1).integers(-3, 4, (2, 16, 1031)).astype(np.float32)
    expected = np.argmax(logits, -1)
    logits = jnp.asarray(logits, dtype)
    np.testing.assert_array_equal(sampling.greedy(logits), expected)
    off = slots(0, 2, jnp.int32), slots(1.0, 2), slots(0.0, 2)
    where = jnp.zeros((2, 16), jnp.int32)
    for temperatures in ([0.0, 0.0], [0.0, 1.0]):
        ids = jit_sample(logits, where, seeds(1, 2), jnp.array(temperatures), *off)
        np.testing.assert_array_equal(ids[0], expected[0])
    assert (np.asarray(ids[1]) != expected[1]).any()
    ids = jit_sample(logits[:, :1], where[:, :1], seeds(1, 2), jnp.array([0.0, 1.0]), *off)
    np.testing.assert_array_equal(ids[0], expected[0, :1])


# --- penalties ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_penalties_count_the_text_and_the_drafts_before_a_row(width):
    rng = np.random.default_rng(width)
    slots_, vocab = 3, 40
    logits = rng.normal(size=(slots_, width, vocab)).astype(np.float32)
    counts = rng.integers(0, 3, (slots_, vocab)).astype(np.int32)
    ids = rng.integers(0, 6, (slots_, width)).astype(np.int32)  # the same drafts several times
    presence = np.array([0.0, 0.7, -1.5], np.float32)
    frequency = np.array([0.0, 0.3, 2.0], np.float32)
    ours = jax.jit(sampling.penalise)(logits, counts, ids, presence, frequency)
    for r in range(slots_):
        seen = counts[r].copy()
        for j in range(width):
            if j > 0:
                seen[ids[r, j]] += 1
            expected = logits[r, j] - presence[r] * (seen > 0) - frequency[r] * seen
            np.testing.assert_allclose(ours[r, j], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(ours[0], logits[0])


def test_penalised_row_is_the_same_in_a_block_and_alone():
    rng = np.random.default_rng(0)
    vocab = 1000
    logits = rng.normal(size=(1, 16, vocab)).astype(np.float32)
    ids = rng.integers(0, 12, (1, 16)).astype(np.int32)
    counts = np.zeros((1, vocab), np.int32)
    counts[0, ids[0, 0]] = 1
    presence, frequency = slots(0.37), slots(0.123)
    penalise = jax.jit(sampling.penalise)
    block = penalise(logits, counts, ids, presence, frequency)
    for j in range(16):
        alone = penalise(logits[:, j : j + 1], counts, ids[:, j : j + 1], presence, frequency)
        np.testing.assert_array_equal(alone[:, 0], block[:, j])
        if j < 15:
            counts = np.asarray(
                sampling.count_tokens(jnp.asarray(counts), ids[:, j + 1 : j + 2], jnp.array([1]))
            )


def test_count_tokens_adds_only_what_was_emitted():
    own = jnp.array([[4, 4, 2, 0], [1, 1, 1, 1]], jnp.int32)
    counts = jnp.zeros((2, 5), jnp.int32).at[0, 2].set(7)
    out = jax.jit(sampling.count_tokens)(counts, own, jnp.array([3, 0], jnp.int32))
    assert out.tolist() == [[0, 0, 8, 0, 2], [0, 0, 0, 0, 0]]


# --- draws --------------------------------------------------------------------------------------


def test_noise_is_jax_random_threefry_without_its_flags():
    """The hash equals jax.random's, so it is the published one, on every jax version."""
    for seed in (0, 7, 2**40 + 3):
        high, low = sampling.seed_words(seed)
        key = jax.random.wrap_key_data(jnp.array([high, low], jnp.uint32), impl="threefry2x32")
        with jax.threefry_partitionable(True):
            bits = jax.random.bits(jax.random.fold_in(key, 1234), (513,), jnp.uint32)
        uniform = np.minimum((np.asarray(bits).astype(np.float64) + 0.5) / 2**32, 1 - 2.0**-24)
        expected = -np.log(-np.log1p(-uniform))
        ours = jit_gumbel(seeds(seed), jnp.array([[1234]], jnp.int32), 513)[0, 0]
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)


def test_draws_do_not_change_between_versions():
    """Golden ids: a saved seed must answer the same after an upgrade."""
    logits = jnp.zeros((1, 16, 1000))
    off = slots(0, dtype=jnp.int32), slots(1.0), slots(0.0)
    ids = jit_sample(logits, jnp.arange(16, dtype=jnp.int32)[None], seeds(7), slots(1.0), *off)
    golden = [756, 45, 149, 49, 350, 27, 996, 286, 688, 946, 480, 713, 114, 386, 384, 291]
    assert ids[0].tolist() == golden


def test_noise_is_standard_gumbel_and_finite():
    noise = np.asarray(jit_gumbel(seeds(11), jnp.arange(16, dtype=jnp.int32)[None], 20_000))
    assert np.isfinite(noise).all()
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("width", WIDTHS)
def test_r32_noise_depends_on_seed_position_and_id_alone(width):
    """R32: bit for bit the same at every width, among neighbours, and for a longer vocabulary."""
    where = 40 + jnp.arange(16, dtype=jnp.int32)
    reference = np.asarray(jit_gumbel(seeds(7), where[None], 1003))[0]
    neighbours = jnp.stack([where[:width] * 3, where[:width], where[:width] + 500])
    noise = np.asarray(jit_gumbel(seeds(1, 7, 2), neighbours, 1003))
    np.testing.assert_array_equal(noise[1], reference[:width])
    longer = np.asarray(jit_gumbel(seeds(7), where[None, :width], 2048))[0]
    np.testing.assert_array_equal(longer[:, :1003], reference[:width])


@pytest.mark.parametrize("width", WIDTHS)
def test_r32_draw_is_the_same_at_every_width_and_among_neighbours(width):
    """R32, R8: the token at (seed, position) is a function of its own row."""
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 2, (16, 700)).astype(np.float32)
    where = np.arange(100, 116, dtype=np.int32)
    parameters = [0.9, 30, 0.9, 0.01]

    def draw(rows, positions, seed, *others):
        """Ids of slot 0; `others` are slots (logits, positions, seed, parameters) beside it."""
        table = [parameters, *(o[3] for o in others)]
        columns = [
            jnp.array([p[i] for p in table], jnp.int32 if i == 1 else jnp.float32) for i in range(4)
        ]
        return np.asarray(
            jit_sample(
                np.stack([rows, *(o[0] for o in others)]),
                np.stack([positions, *(o[1] for o in others)]),
                seeds(seed, *(o[2] for o in others)),
                *columns,
            )
        )[0]

    reference = np.concatenate([draw(logits[j : j + 1], where[j : j + 1], 7) for j in range(16)])
    assert len(set(reference.tolist())) > 4
    for start in range(0, 17 - width, 5):
        rows, positions = logits[start : start + width], where[start : start + width]
        expected = reference[start : start + width]
        greedy_slot = (rows[:, ::-1], positions, 3, [0.0, 0, 1.0, 0.0])
        wild = (rows * -1, positions + 9, 7, [1.9, 0, 1.0, 0.0])
        tight = (rows * 5, positions, 8, [0.2, 3, 0.3, 0.2])
        np.testing.assert_array_equal(draw(rows, positions, 7), expected)
        np.testing.assert_array_equal(draw(rows, positions, 7), expected)
        np.testing.assert_array_equal(draw(rows, positions, 7, greedy_slot, wild, tight), expected)
    assert (draw(logits, where, 8) != reference).any()
    assert (draw(logits, where + 1, 7) != reference).any()


def test_seeds_of_64_bits_differ_in_either_word():
    where = jnp.zeros((4, 1), jnp.int32)
    noise = np.asarray(jit_gumbel(seeds(1, 2**32 + 1, 2**33 + 1, 0), where, 50))
    assert len({n.tobytes() for n in noise}) == 4
    assert sampling.seed_words(-1) == (2**32 - 1, 2**32 - 1)


@pytest.mark.parametrize(
    "temperature, top_k, top_p, min_p",
    [(0.8, 0, 1.0, 0.0), (1.0, 20, 0.9, 0.0), (1.3, 0, 1.0, 0.08)],
)
def test_r8_draws_follow_the_exact_distribution(temperature, top_k, top_p, min_p):
    """R8: chi-square of 20,000 draws against exact probabilities; no filtered token occurs."""
    draws, vocab = 20_000, 64
    row = np.random.default_rng(8).normal(0, 1.5, vocab).astype(np.float32)
    kept = filter_by_sorting(row, np.float32(temperature), top_k, top_p, min_p)
    exact = np.where(kept, np.exp((row - row.max()).astype(np.float64) / temperature), 0)
    exact /= exact.sum()
    ids = jit_sample(
        jnp.broadcast_to(row, (draws // 16, 16, vocab)),
        jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), (draws // 16, 16)),
        seeds(*range(draws // 16)),
        *(
            slots(value, draws // 16, dtype)
            for value, dtype in [
                (temperature, jnp.float32),
                (top_k, jnp.int32),
                (top_p, jnp.float32),
                (min_p, jnp.float32),
            ]
        ),
    )
    found = np.bincount(np.asarray(ids).ravel(), minlength=vocab)
    assert found[~kept].sum() == 0
    expected = exact * draws
    rare = expected < 5  # chi-square wants at least five in a class: the rare ones are one class
    classes = [np.append(x[~rare], x[rare].sum()) for x in (found, expected)]
    if classes[1][-1] < 5:
        classes = [np.append(c[:-2], c[-2:].sum()) for c in classes]
    assert stats.chisquare(*classes).pvalue > 1e-3


# --- accept, stops, limits ----------------------------------------------------------------------


def test_accept_counts_leading_drafts_only():
    ids = jnp.array([[9, 1, 2, 3], [9, 1, 5, 3], [9, 0, 2, 3], [9, 1, 2, 4]], jnp.int32)
    own = jnp.array([[1, 2, 3, 7]] * 4, jnp.int32)
    assert jit_accept(ids, own).tolist() == [3, 1, 0, 2]
    assert jit_accept(ids[:, :1], own[:, :1]).tolist() == [0, 0, 0, 0]


def naive_round(ids, own, active, remaining, stop_ids):
    """One slot, token by token: (accepted, emitted tokens, finish reason or None)."""
    accepted = 0
    while accepted + 1 < len(ids) and ids[accepted + 1] == own[accepted]:
        accepted += 1
    if not active:
        return accepted, [], None
    out = []
    for token in own[: accepted + 1]:
        if len(out) >= remaining:
            break
        out.append(token)
        if token in stop_ids and token != -1:
            return accepted, out, "stop"
    return accepted, out, "length" if len(out) >= remaining else None


TOKEN = st.integers(0, 3)


@st.composite
def rounds(draw):
    width = draw(st.sampled_from(WIDTHS))
    own = draw(st.lists(TOKEN, min_size=width, max_size=width))
    ids = [0, *own[:-1]] if width > 1 else [0]
    for j in draw(st.lists(st.integers(1, 15), max_size=2)):
        if j < width:
            ids[j] = draw(TOKEN)  # perhaps the right one
    stop_ids = draw(st.lists(st.sampled_from([-1, -1, 0, 1, 2, 3, 9]), min_size=2, max_size=2))
    return ids, own, draw(st.booleans()), draw(st.integers(-1, 18)), stop_ids


@settings(max_examples=400, deadline=None)
@given(rounds(), rounds())
def test_r2_r29_r46_rounds_equal_a_loop_over_tokens(first, second):
    """R2, R29, R46: stops inside a block, and token or context limits at any place."""
    cases = [first, second if len(second[0]) == len(first[0]) else first]
    ids, own, active, remaining, stop_ids = (
        jnp.array(column, jnp.bool_ if i == 2 else jnp.int32)
        for i, column in enumerate(zip(*cases, strict=True))
    )
    accepted = jit_accept(ids, own)
    count, by_stop, by_length = jit_emit(own, accepted, active, remaining, stop_ids)
    for r, case in enumerate(cases):
        want_accepted, want_out, reason = naive_round(*case)
        assert int(accepted[r]) == want_accepted
        assert int(count[r]) == len(want_out)
        assert bool(by_stop[r]) == (reason == "stop")
        assert bool(by_length[r]) == (reason == "length")


@functools.partial(pytest.mark.parametrize, "offset")(range(16))
def test_r2_stop_at_every_offset_of_a_block(offset):
    """R2: nothing behind the stop id is emitted, wherever in the block it stands."""
    own = jnp.arange(16, dtype=jnp.int32)[None]
    stop = jnp.array([[-1, offset]], jnp.int32)
    for remaining in (offset + 1, 100):  # on the very last allowed place it is still a stop
        count, by_stop, by_length = jit_emit(
            own, slots(15, dtype=jnp.int32), slots(1, dtype=jnp.bool_),
            slots(remaining, dtype=jnp.int32), stop,
        )  # fmt: skip
        assert (int(count[0]), bool(by_stop[0]), bool(by_length[0])) == (offset + 1, True, False)
    if offset > 0:
        count, by_stop, by_length = jit_emit(
            own, slots(15, dtype=jnp.int32), slots(1, dtype=jnp.bool_),
            slots(offset, dtype=jnp.int32), stop,
        )  # fmt: skip
        assert (int(count[0]), bool(by_stop[0]), bool(by_length[0])) == (offset, False, True)


@pytest.mark.parametrize("limit", [0, 1, 2, 15, 16, 17, 31, 33])
def test_r29_limits_with_ignored_stops_are_met_exactly(limit):
    """R29: rounds of 16 right drafts, stop ids all -1, until the limit; exactly `limit` tokens."""
    own = jnp.full((1, 16), 5, jnp.int32)
    left, done = limit, False
    while not done:
        count, by_stop, by_length = jit_emit(
            own, slots(15, dtype=jnp.int32), slots(1, dtype=jnp.bool_),
            slots(left, dtype=jnp.int32), jnp.full((1, 4), -1, jnp.int32),
        )  # fmt: skip
        left, done = left - int(count[0]), bool(by_length[0])
        assert not bool(by_stop[0]) and (done or int(count[0]) == 16)
    assert left == 0
