"""The DFlash drafter against a float64 forward written from its description, and the mistakes
that cost acceptance in the field without ever showing in the output."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.config import PRESETS, DrafterConfig, RopeConfig, drafter_preset
from mmflash_jax.drafters import DRAFTERS, drafter_class
from mmflash_jax.drafters.dflash import DFlash

TINY = DrafterConfig(
    hidden_size=24, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=50, rms_norm_eps=1e-6, max_position_embeddings=256, rope=RopeConfig(1e4, 8),
    block_size=5, mask_token_id=47, target_layer_ids=(1, 4, 6), num_target_layers=8,
    windows=(None,) * 2, causal=(False,) * 2)
LENGTHS = (9, 14, 0, 3)
CACHE = 16


def variant(windows, causal, **changes):
    return dataclasses.replace(TINY, windows=windows, causal=causal, **changes)


YARN = (("beta_fast", 4), ("factor", 4.0), ("original_max_position_embeddings", 16))
VARIANTS = {
    "full": TINY,
    "full-causal": variant((None,) * 2, (True, True)),
    "sliding": variant((6, 6), (True, True)),
    "sliding-not-causal": variant((6, 6), (False, False)),
    "window-shorter-than-block": variant((3, 2), (True, False)),
    "sliding-and-full": variant((4, 4, None), (True, True, False)),
    "one-layer-one-tap": variant((None,), (False,), target_layer_ids=(3,)),
    "as-many-kv-heads": variant((None, 5), (False, True), num_key_value_heads=4),
    "block-of-two": variant((None,) * 2, (False,) * 2, block_size=2),
    "yarn": variant((None,) * 2, (False,) * 2, rope=RopeConfig(1e4, 8, YARN)),
}


def shapes_of(drafter):
    c = drafter.config
    table = jnp.zeros((c.vocab_size, c.hidden_size), drafter.dtype)
    context = (jnp.zeros((1, c.num_key_value_heads, 1, c.head_dim), drafter.dtype),)
    context *= c.num_hidden_layers
    one = jnp.zeros((1,), jnp.int32)

    def init(table, context):
        return drafter.init(jax.random.key(0), table, table, one, one, context, context,
                            method="draft")["params"]

    return jax.eval_shape(init, table, context)


@functools.cache
def compiled(drafter, method):
    """A method as a program of (params, arguments), `rows` static."""
    def call(params, *arguments, **options):
        return drafter.apply({"params": params}, *arguments, method=method, **options)

    return jax.jit(call, static_argnames="rows")


class Case:
    """A drafter with all parameters random, taps of several slots and the target's tables."""

    def __init__(self, config, dtype=jnp.float32, has_mask_embedding=False, lengths=LENGTHS):
        self.config, self.lengths = config, lengths
        self.drafter = DFlash(config, dtype, has_mask_embedding)
        rng = np.random.default_rng(3)

        def random(shape, scale, mean=0.0):
            return jnp.asarray(mean + scale * rng.normal(size=shape), dtype)

        self.params = jax.tree.map(
            lambda s: random(s.shape, 0.4, 1.0) if len(s.shape) == 1
            else random(s.shape, 1.5 * s.shape[-1]**-0.5), shapes_of(self.drafter))
        self.embed = random((config.vocab_size, config.hidden_size), 1.0)
        self.head = random((config.vocab_size, config.hidden_size), 0.2)
        self.anchor = jnp.asarray(rng.integers(0, 40, len(lengths)), jnp.int32)
        width = len(config.target_layer_ids) * config.hidden_size
        self.taps = [random((length, width), 1.0) for length in lengths]

    def extend(self, taps, positions):
        return compiled(self.drafter, "extend")(self.params, taps, positions)

    def context(self, taps=None, cache=CACHE, garbage=3.0):
        """What the caller gathers, [R, K, cache, D] a layer; `garbage` from each length on."""
        c = self.config
        shape = (len(self.lengths), c.num_key_value_heads, cache, c.head_dim)
        out = [np.full(shape, garbage, np.float32) for _ in range(2 * c.num_hidden_layers)]
        for slot, rows in enumerate(self.taps if taps is None else taps):
            if len(rows):
                keys, values = self.extend(rows, jnp.arange(len(rows)))
                for array, new in zip(out, keys + values, strict=True):
                    array[slot, :, :len(rows)] = np.asarray(new, np.float32).swapaxes(0, 1)
        arrays = [jnp.asarray(a, self.drafter.dtype) for a in out]
        return arrays[:c.num_hidden_layers], arrays[c.num_hidden_layers:]

    def hidden(self, context=None):
        keys, values = context or self.context()
        return np.asarray(compiled(self.drafter, "block_hidden")(
            self.params, self.embed, self.anchor, jnp.array(self.lengths), keys, values),
            np.float32)

    def draft(self, head=None, rows=None):
        keys, values = self.context()
        return np.asarray(compiled(self.drafter, "draft")(
            self.params, self.embed, self.head if head is None else head, self.anchor,
            jnp.array(self.lengths), keys, values, rows=rows))

    def reference(self, slot):
        """Final normed hidden rows [B, H] in float64: a row, a head, a key at a time."""
        c = self.config
        p = jax.tree.map(lambda x: np.asarray(x, np.float64), self.params)
        heads, kv, d, length = (c.num_attention_heads, c.num_key_value_heads, c.head_dim,
                                self.lengths[slot])
        frequency, scale = frequencies(c.rope)

        def norm(x, weight):
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.rms_norm_eps) * weight

        def rotate(x, position):
            a, b = x[:d // 2], x[d // 2:]
            cos, sin = np.cos(position * frequency) * scale, np.sin(position * frequency) * scale
            return np.concatenate([a * cos - b * sin, b * cos + a * sin])

        taps = np.asarray(self.taps[slot], np.float64)
        features = norm(taps @ p["fc"].T, p["hidden_norm"])
        embed = np.asarray(self.embed, np.float64)
        if "mask_embedding" in p:
            embed[c.mask_token_id] = p["mask_embedding"]
        x = np.stack([embed[int(self.anchor[slot])]]
                     + [embed[c.mask_token_id]] * (c.block_size - 1))
        for i, (window, causal) in enumerate(zip(c.windows, c.causal, strict=True)):
            layer = p[f"layers_{i}"]
            wq, wk, wv = np.split(layer["qkv"], (heads * d, (heads + kv) * d))
            rows = np.concatenate([features, norm(x, layer["input_norm"])])
            keys = norm((rows @ wk.T).reshape(-1, kv, d), layer["k_norm"])
            values = (rows @ wv.T).reshape(-1, kv, d)
            queries = norm((rows[length:] @ wq.T).reshape(-1, heads, d), layer["q_norm"])
            mixed = np.zeros((c.block_size, heads, d))
            for b in range(c.block_size):
                at = length + b
                seen = [s for s in range(length + c.block_size)
                        if (window is None or s > at - window)
                        and (s <= at or not causal)]
                for n in range(heads):
                    g = n // (heads // kv)
                    q = rotate(queries[b, n], at)
                    e = np.exp([q @ rotate(keys[s, g], s) / np.sqrt(d) for s in seen])
                    mixed[b, n] = e / e.sum() @ values[seen, g]
            x = x + mixed.reshape(c.block_size, -1) @ layer["out"].T
            gate, up = np.split(norm(x, layer["post_norm"]) @ layer["mlp"]["gate_up"].T, 2, -1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down"].T
        return norm(x, p["norm"])


def frequencies(rope):
    """Plain, or YaRN of arXiv 2309.00071: slow dimensions interpolated, fast ones kept."""
    plain = np.array([rope.theta ** (-2 * i / rope.dim) for i in range(rope.dim // 2)])
    if not rope.yarn:
        return plain, 1.0
    yarn = dict(rope.yarn)
    s, long = yarn["factor"], yarn["original_max_position_embeddings"]

    def turning(beta):
        return rope.dim * np.log(long / (beta * 2 * np.pi)) / (2 * np.log(rope.theta))

    low = max(np.floor(turning(yarn["beta_fast"])), 0)
    high = min(np.ceil(turning(yarn.get("beta_slow", 1))), rope.dim - 1)
    kept = 1 - np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain * (kept + (1 - kept) / s), 0.1 * np.log(s) + 1


@pytest.mark.parametrize("name", VARIANTS)
def test_matches_float64_forward(name):
    case = Case(VARIANTS[name])
    mine = case.hidden()
    for slot in range(len(LENGTHS)):
        theirs = case.reference(slot)
        assert np.abs(mine[slot] - theirs).max() <= 2e-5 * np.abs(theirs).max(), slot


def test_variants_differ():
    """Windows and causality that a config states are not decoration (R20)."""
    outs = {name: Case(config).hidden() for name, config in VARIANTS.items()
            if config.num_hidden_layers == 2 and config.block_size == 5
            and config.num_key_value_heads == 2}
    names = list(outs)
    for i, one in enumerate(names):
        for other in names[i + 1:]:
            assert np.abs(outs[one] - outs[other]).max() > 1e-3, (one, other)


def test_draft_takes_row_j_for_position_j():
    case = Case(TINY)
    ids = case.draft()
    assert ids.shape == (len(LENGTHS), TINY.block_size - 1) and ids.dtype == np.int32
    for slot in range(len(LENGTHS)):
        logits = case.reference(slot)[1:] @ np.asarray(case.head, np.float64).T
        assert ids[slot].tolist() == logits.argmax(1).tolist()


def test_fewer_rows_are_the_first_of_all_rows():
    """A narrower verify shortens the head's work, never the block."""
    case = Case(TINY)
    every = case.draft()
    for rows in (1, 3, 4):
        assert np.array_equal(case.draft(rows=rows), every[:, :rows])


def test_ties_go_to_the_lowest_id():
    case = Case(TINY)
    before = case.draft()
    best = int(before[0, 0])
    head = np.asarray(case.head).copy()
    for tied in (2, 31, 49):
        head[tied] = head[best]
    after = case.draft(head=jnp.asarray(head))
    assert best > 2 and (after[before == best] == 2).all()


def test_r26_anchor_in_slot_0_and_masks_after():
    case = Case(TINY)
    ids = np.asarray(case.drafter.apply({"params": case.params}, case.anchor, method="block_ids"))
    assert ids[:, 0].tolist() == case.anchor.tolist()
    assert (ids[:, 1:] == TINY.mask_token_id).all() and ids.shape[1] == TINY.block_size
    before = case.hidden()
    case.embed = case.embed.at[TINY.mask_token_id].add(1.0)
    masked = case.hidden()
    assert (np.abs(masked - before).max((1, 2)) > 1e-3).all()
    case.anchor = (case.anchor + 1) % 40
    assert (np.abs(case.hidden() - masked).max((1, 2)) > 1e-3).all()


def test_r20_sliding_layers_never_read_behind_their_window():
    """In a sliding-only drafter, context older than the window of row 0 changes no row at all;
    the oldest key inside the window does."""
    for causal in (True, False):
        case = Case(variant((6, 6), (causal, causal)))
        before = case.hidden()
        first = [max(0, length - 5) for length in LENGTHS]  # p - W + 1 at p = length
        old = [t.at[:f].add(5.0) for t, f in zip(case.taps, first, strict=True)]
        assert np.array_equal(case.hidden(case.context(old)), before)
        edge = [t.at[f:f + 1].add(5.0) for t, f in zip(case.taps, first, strict=True)]
        moved = np.abs(case.hidden(case.context(edge)) - before).max(-1)
        assert moved[0, 0] > 1e-3 and moved[1, 0] > 1e-3
        # One layer: later rows have moved on, so that only row 0 reads the edge.
        single = Case(variant((6,), (True,)))
        edge = [t.at[f:f + 1].add(5.0) for t, f in zip(single.taps, first, strict=True)]
        moved = np.abs(single.hidden(single.context(edge)) - single.hidden()).max(-1)
        assert moved[0, 0] > 1e-3 and (moved[:2, 1:] == 0).all()


def test_causal_layers_hide_later_rows():
    """The same block, one mask shorter, gives the same first rows only if rows look back only."""
    for causal, equal in ((True, True), (False, False)):
        long = Case(variant((None,) * 2, (causal,) * 2))
        short = Case(variant((None,) * 2, (causal,) * 2, block_size=4))
        gap = np.abs(long.hidden()[:, :4] - short.hidden()).max()
        assert (gap < 1e-5) == equal


def test_rows_behind_the_length_are_never_read():
    """Rejected rows stay in the cache until they are overwritten; a longer cache adds nothing."""
    case = Case(VARIANTS["sliding-and-full"])
    clean = case.hidden(case.context(garbage=0.0))
    assert np.array_equal(case.hidden(case.context(garbage=1e4)), clean)
    longer = case.hidden(case.context(cache=40, garbage=-7.0))
    np.testing.assert_allclose(longer, clean, atol=2e-6)


def test_slots_do_not_see_each_other():
    case = Case(TINY)
    before = case.hidden()
    taps = [case.taps[0] + 1.0] + case.taps[1:]
    after = case.hidden(case.context(taps))
    assert np.array_equal(after[1:], before[1:]) and not np.allclose(after[0], before[0])


def test_context_rows_come_alone_or_together():
    """A chunk of prefill, a+1 rows of a round: the rows of a token depend on it alone."""
    case = Case(TINY)
    taps = case.taps[1]
    whole = case.extend(taps, jnp.arange(14))
    halves = [case.extend(taps[a:b], jnp.arange(a, b)) for a, b in ((0, 5), (5, 14))]
    for which in (0, 1):
        assert len(whole[which]) == TINY.num_hidden_layers
        for layer, rows in enumerate(whole[which]):
            assert rows.shape == (14, 2, 8)
            joined = jnp.concatenate([h[which][layer] for h in halves])
            np.testing.assert_allclose(joined, rows, atol=2e-6)


def test_r12_taps_are_read_in_the_order_of_their_ids():
    case = Case(TINY)
    before = case.extend(case.taps[0], jnp.arange(9))[1][0]
    a, b, c = jnp.split(case.taps[0], 3, 1)
    after = case.extend(jnp.concatenate([b, a, c], 1), jnp.arange(9))[1][0]
    assert np.abs(before - after).max() > 1e-2


def test_r6_positions_are_the_caller_s_index():
    """Keys turn with the position given, values never; the block continues at `length`."""
    case = Case(TINY)
    keys, values = case.extend(case.taps[0], jnp.arange(9))
    later, same = case.extend(case.taps[0], jnp.arange(9) + 100)
    assert np.abs(keys[0] - later[0]).max() > 1e-2 and np.array_equal(values[0], same[0])
    # Angles add: turning by 100 everywhere keeps every product of two keys.
    one, other = (np.einsum("mkd,nkd->kmn", k, k) for k in (keys[0], later[0]))
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_mask_embedding_replaces_the_target_s_row():
    case = Case(TINY, has_mask_embedding=True)
    assert case.params["mask_embedding"].shape == (24,)
    before = case.hidden()
    for slot in range(len(LENGTHS)):
        np.testing.assert_allclose(before[slot], case.reference(slot), atol=1e-4)
    case.embed = case.embed.at[TINY.mask_token_id].set(9.0)
    assert np.array_equal(case.hidden(), before)


def test_bfloat16_stays_close():
    case = Case(TINY, jnp.bfloat16)
    mine = case.hidden()
    for slot in range(len(LENGTHS)):
        theirs = case.reference(slot)
        assert np.linalg.norm(mine[slot] - theirs) <= 0.04 * np.linalg.norm(theirs)
    assert case.draft().shape == (4, 4)


def test_bad_calls_are_refused():
    case = Case(TINY)
    with pytest.raises(ValueError, match=r"5 rows to draft, expected 1 to 4"):
        case.draft(rows=5)
    with pytest.raises(ValueError, match=r"0 rows to draft"):
        case.draft(rows=0)
    with pytest.raises(ValueError, match=r"\(9, 48\), expected \[rows, 72\]"):
        case.extend(case.taps[0][:, :48], jnp.arange(9))
    keys, values = case.context()
    with pytest.raises(ValueError, match="1 key and 2 value arrays"):
        case.hidden((keys[:1], values))


@pytest.mark.parametrize("target,count", [("qwen3.5-9b", 1_048_626_432),
                                          ("qwen3.8-27b", 1_730_213_120)])
def test_published_parameter_counts(target, count):
    config = drafter_preset(PRESETS[target])
    small = dataclasses.replace(config, vocab_size=8, mask_token_id=7)  # the tables are no part
    leaves = jax.tree.leaves(shapes_of(DFlash(small)))
    assert sum(leaf.size for leaf in leaves) == config.parameter_count() == count
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}


def test_parameter_tree():
    tree = shapes_of(DFlash(TINY, jnp.float32))
    assert set(tree) == {"fc", "hidden_norm", "norm", "layers_0", "layers_1"}
    layer = jax.tree.map(lambda leaf: leaf.shape, tree["layers_1"])
    assert layer == {"input_norm": (24,), "post_norm": (24,), "qkv": (64, 24), "q_norm": (8,),
                     "k_norm": (8,), "out": (24, 32),
                     "mlp": {"gate_up": (80, 24), "down": (24, 40)}}
    assert tree["fc"].shape == (24, 72)


def test_drafters_by_name():
    assert drafter_class("mmflash") is drafter_class("dflash") is DFlash
    with pytest.raises(ValueError, match="'eagle9'.*dflash.*mmflash"):
        drafter_class("eagle9")
    for drafter in DRAFTERS.values():
        assert callable(drafter.extend) and callable(drafter.draft)
