"""Anchors, blocks and masks of drafter training, against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmflash_jax.config import DrafterConfig, RopeConfig
from mmflash_jax.drafters.dflash import Layer
from mmflash_jax.train.blocks import (
    make_blocks,
    sample_anchors,
    sees_block,
    sees_context,
    visible,
)
from mmflash_jax.train.objective import TEXT_ONLY, Objective, total_loss

SIZE, COUNT = 48, 12  # fixed, so that everything is compiled once


def keys(seed, rows):
    return jax.random.split(jax.random.key(seed), rows)


def draw(seed, supervised, length, block, count=COUNT):
    return sample_anchors(keys(seed, len(supervised)), jnp.asarray(supervised),
                          jnp.asarray(length), block, count)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 2**31), st.sampled_from((2, 4, 16)))
def test_anchors_are_supervised_and_their_blocks_inside_the_row(data, seed, block):
    supervised = np.array(data.draw(st.lists(
        st.lists(st.booleans(), min_size=SIZE, max_size=SIZE), min_size=2, max_size=2)))
    length = np.array(data.draw(st.lists(st.integers(0, SIZE), min_size=2, max_size=2)))
    anchors, valid = map(np.asarray, draw(seed, supervised, length, block))
    for b in range(2):
        allowed = {a for a in range(SIZE) if supervised[b, a] and a + block <= length[b]}
        chosen = anchors[b][valid[b]].tolist()
        assert chosen == sorted(set(chosen)) and set(chosen) <= allowed
        assert len(chosen) == min(COUNT, len(allowed))
        assert valid[b].tolist() == sorted(valid[b].tolist(), reverse=True)
        assert not anchors[b][~valid[b]].any()


def test_anchors_are_drawn_evenly_anew_for_each_key_and_alone_for_each_row():
    supervised = np.zeros((400, SIZE), bool)
    supervised[:, 8:40] = True
    length = np.full(400, 44)
    anchors, valid = map(np.asarray, draw(0, supervised, length, 16, 7))
    allowed = np.arange(8, 29)
    assert valid.all()
    seen = np.bincount(anchors.ravel(), minlength=SIZE)
    assert seen.sum() == seen[allowed].sum() == 2800
    expected = 2800 / len(allowed)
    assert ((seen[allowed] - expected) ** 2 / expected).sum() < 45  # chi-square, p = 0.001, 20
    assert len({tuple(a) for a in anchors}) > 390
    some = sample_anchors(keys(0, 400)[5:7], jnp.asarray(supervised[5:7]),
                          jnp.asarray(length[5:7]), 16, 7)
    np.testing.assert_array_equal(some[0], anchors[5:7])


def test_more_anchors_asked_for_than_positions():
    anchors, valid = draw(0, np.ones((1, 6), bool), [6], 2, 512)
    assert anchors.shape == valid.shape == (1, 512)
    assert anchors[0, :5].tolist() == [0, 1, 2, 3, 4] and valid.sum() == 5


def test_blocks_hold_the_tokens_after_their_anchors():
    rng = np.random.default_rng(0)
    rows, block, mask_id = 3, 8, 99
    ids = rng.integers(0, 90, (rows, SIZE)).astype(np.int32)
    supervised = rng.random((rows, SIZE)) < 0.6
    length = np.array([SIZE, 30, 3])
    g = rng.random((rows, SIZE), np.float32)
    g[1] = TEXT_ONLY
    anchors, valid = map(np.asarray, draw(1, supervised, length, block))
    found = make_blocks(ids, supervised, length, g, anchors, valid, block, mask_id)
    assert valid[2].sum() == 0 and valid[0].sum() == COUNT
    for b in range(rows):
        for n in range(COUNT):
            a = anchors[b, n]
            assert found.ids[b, n].tolist() == [ids[b, a]] + [mask_id] * (block - 1)
            assert found.positions[b, n].tolist() == list(range(a, a + block))
            for k in range(1, block):
                known = valid[b, n] and supervised[b, a + k]
                assert found.mask[b, n, k - 1] == known
                assert found.targets[b, n, k - 1] == ids[b, a + k]
                assert found.g[b, n, k - 1] == (g[b, a + k] if known else TEXT_ONLY)


def test_blocks_past_the_row_are_masked_not_wrapped():
    ids = np.arange(10)[None]
    found = make_blocks(ids, np.ones((1, 10), bool), np.array([7]), np.ones((1, 10)),
                        np.array([[5, 9]]), np.ones((1, 2), bool), 4, 99)
    assert found.mask.tolist() == [[[True, False, False], [False] * 3]]
    assert found.positions.tolist() == [[[5, 6, 7, 8], [9, 10, 11, 12]]]


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("window", (None, 1, 3, 6, 100))
def test_masks_are_those_of_brute_force(causal, window):
    block, context, anchors = 4, 13, [0, 2, 3, 9]
    rows = len(anchors) * block
    want = np.zeros((rows, context + rows), bool)
    for i in range(rows):
        anchor = anchors[i // block]
        position = anchor + i % block
        for j in range(context + rows):
            if j < context:
                seen, other = j < anchor, j
            else:
                other = anchors[(j - context) // block] + (j - context) % block
                seen = (j - context) // block == i // block and (not causal or other <= position)
            if window is not None:
                seen = seen and position - window < other
            want[i, j] = seen
    query, key = jnp.arange(rows)[:, None], jnp.arange(context + rows)
    got = visible(query, key, jnp.array(anchors), block, context, causal=causal, window=window)
    np.testing.assert_array_equal(got, want)
    assert want.any(1).all()
    tile = visible(query[5:9], key[11:20], jnp.array(anchors), block, context, causal=causal,
                   window=window)
    np.testing.assert_array_equal(tile, want[5:9, 11:20])


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("window", (None, 1, 5, 40))
def test_a_block_sees_in_training_what_it_sees_when_drafting(causal, window):
    """R6: one rule for training and serving."""
    block, cache = 16, 64
    config = DrafterConfig(
        hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1,
        head_dim=8, vocab_size=9, rms_norm_eps=1e-6, max_position_embeddings=64,
        rope=RopeConfig(1e4, 8), block_size=block, mask_token_id=8, target_layer_ids=(0,),
        num_target_layers=1, windows=(window,), causal=(causal,))
    length = jnp.array([0, 1, 7, 48])
    layer = Layer(config, window, causal, jnp.float32)
    in_context, in_block = layer._visible(length, block, cache)
    row = jnp.arange(block)[:, None]
    ours = sees_context(length[:, None, None], row, jnp.arange(cache), window)
    np.testing.assert_array_equal(
        jnp.broadcast_to(ours, in_context.shape), in_context)
    np.testing.assert_array_equal(
        sees_block(row, jnp.arange(block), causal=causal, window=window), in_block[0])


@pytest.mark.parametrize("base", ("dflash", "prefix", "dpace"))
def test_r33_a_short_and_a_long_answer_and_none_give_a_finite_loss(base):
    size, block, hidden = 2100, 16, 4
    start, length = np.array([90, 60, 50]), np.array([93, 2060, 50])
    position = np.arange(size)
    supervised = (position >= start[:, None]) & (position < length[:, None])
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 11, (3, size)).astype(np.int32)
    g = np.where(supervised, 0.5, TEXT_ONLY)
    found = {}
    for whole in (True, False):  # rows end where their answers end, or where the padding does
        end = length if whole else np.full(3, size)
        anchors, valid = draw(3, supervised, end, block, 32)
        found[whole] = valid.sum(1).tolist()
        blocks = make_blocks(ids, supervised, end, g, anchors, valid, block, 11)
        rows = jnp.asarray(rng.standard_normal((3, 32, block - 1, hidden)), jnp.float32)
        head = jnp.asarray(rng.standard_normal((12, hidden)), jnp.float32)
        value, gradient = jax.jit(jax.value_and_grad(lambda x, head, b: total_loss(
            Objective(base), x, head, b.targets, b.mask, b.g, 8)[0]))(rows, head, blocks)
        assert np.isfinite(value) and np.isfinite(gradient).all() and value > 0
        assert not np.any(gradient[2]) and np.any(gradient[1])
    assert found == {True: [0, 32, 0], False: [3, 32, 0]}


def test_arrays_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="expected \\[B\\], \\[B, S\\] and \\[B\\]"):
        draw(0, np.ones((2, 6), bool), [6], 2)
    with pytest.raises(ValueError, match="block 1"):
        draw(0, np.ones((1, 6), bool), [6], 1)
    with pytest.raises(ValueError, match="differ"):
        make_blocks(np.zeros((1, 6)), np.ones((1, 5), bool), np.array([5]), np.zeros((1, 6)),
                    np.zeros((1, 1), int), np.ones((1, 1), bool), 2, 9)
