"""The target's own token at every row of a round, and what of the block may stay.

In: logits of the rows, sampling parameters as arrays with a slot axis. Out: token ids, accepted
counts, how many tokens each slot emits. Knows nothing of models, caches, text or requests.

A row's token depends on its own logits, its slot's parameters and seed, and the position that the
token will take, on nothing else: not on the width, the other slots or the drafts. That is why a
round may keep drafts "while they equal the target's own token" at every temperature and still
emit exactly what plain decoding emits. Three choices make it hold bit for bit:

- noise is a counter-based hash of (seed, position, token id), written out below, so no flag and
  no library version changes it;
- sums over the vocabulary are integer sums, so their order (which a compiler picks from the
  shape) cannot change a filter's threshold;
- everything else is elementwise, or a maximum, or an argmax (lowest id on ties).

Logits are finite or -inf. Letters: R slots, W rows of a slot (width), V vocabulary, E stop ids.
Sampling parameters, each [R]: temperature (0 = greedy), top_k (0 = off), top_p (1 = off),
min_p (0 = off), presence, frequency (0 = off); seed [R, 2] (`seed_words`).
"""

import jax
import jax.numpy as jnp

_INF_BITS = 0x7F800000  # float32 +inf: the largest depth, "keep everything"
_PART_BITS = 10  # a token's probability mass is an integer of three such parts, summed apart
_WEIGHT_BITS = 3 * _PART_BITS  # its resolution, relative to the likeliest token
_MAX_VOCAB = 2**21  # sums of parts stay below 2**32


def seed_words(seed: int) -> tuple[int, int]:
    """The two uint32 words (high, low) of a seed, taken modulo 2**64, for an array [R, 2]."""
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def greedy(logits: jax.Array) -> jax.Array:
    """Argmax over the last axis [..., V] -> int32 [...]; the lowest id wins on ties."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def penalise(
    logits: jax.Array,  # [R, W, V]
    counts: jax.Array,  # [R, V] int32: generated tokens so far, the anchor among them
    ids: jax.Array,  # [R, W] int32: anchor, drafts
    presence: jax.Array,  # [R]
    frequency: jax.Array,  # [R]
) -> jax.Array:
    """OpenAI's presence and frequency penalties over generated tokens -> float32 [R, W, V].

    Row j continues the text that ends with ids[:, j], so it also counts the drafts ids[:, 1..j].
    Counts of the rows are compared into being, element by element, so that everything fuses into
    one pass and no [R, W, V] array of counts is stored.
    """
    _, width, vocab = logits.shape
    token = jnp.arange(vocab, dtype=jnp.int32)
    row = jnp.arange(width, dtype=jnp.int32)[:, None]
    seen = counts[:, None, :]  # [R, 1 -> W, V]
    for i in range(1, width):
        seen = seen + ((ids[:, i, None, None] == token) & (row >= i)).astype(jnp.int32)
    seen = seen.astype(jnp.float32)
    present = jnp.where(seen > 0, _per_slot(presence), 0.0)
    return logits.astype(jnp.float32) - (present + _per_slot(frequency) * seen)


def count_tokens(
    counts: jax.Array,  # [R, V] int32
    own: jax.Array,  # [R, W] int32: tokens of this round
    count: jax.Array,  # [R] int32: how many of them each slot emits
) -> jax.Array:
    """Add each slot's first `count` tokens to its counts -> int32 [R, V]."""
    slots, width = own.shape
    emitted = jnp.arange(width) < count[:, None]
    return counts.at[jnp.arange(slots)[:, None], own].add(emitted.astype(counts.dtype))


def filtered(
    logits: jax.Array,  # [R, W, V]
    temperature: jax.Array,  # [R]
    top_k: jax.Array,  # [R] int32
    top_p: jax.Array,  # [R]
    min_p: jax.Array,  # [R]
) -> jax.Array:
    """Log-probabilities up to a constant (the likeliest token has 0), -inf outside the filters.

    In this order: temperature; the top_k largest; of the renormalised rest the smallest set of
    the likeliest tokens whose mass reaches top_p, at least one; of these the tokens with at least
    min_p times the probability of the likeliest. Tokens tied with the last one kept are all kept.
    Masses are counted in steps of 2**-30 of the likeliest token's. Rows with temperature 0 are
    filtered as if it were 1. Returns float32 [R, W, V].

    Nothing is sorted. Depth below the maximum is a float >= 0, and such floats order like their
    bits, so 31 halvings of the bit range find a threshold exactly.
    """
    vocab = logits.shape[-1]
    if vocab > _MAX_VOCAB:
        raise ValueError(f"vocabulary of {vocab}, but masses are exact only up to {_MAX_VOCAB}")
    logits = logits.astype(jnp.float32)
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0.0, top)  # a row of -inf stays one, without a NaN
    # The floor is the smallest normal float32: anything smaller would divide 0 by 0.
    warmth = jnp.where(temperature > 0, jnp.maximum(temperature, 1.2e-38), 1.0)
    depth = (top - logits) / _per_slot(warmth)  # [R, W, V], 0 at the maximum, +inf at -inf
    bits = jax.lax.bitcast_convert_type(depth, jnp.int32)
    keep_all = jnp.full(bits.shape[:-1], _INF_BITS, jnp.int32)

    def top_k_cut() -> jax.Array:
        wanted = top_k[:, None].astype(jnp.int32)

        def enough(cut: jax.Array) -> jax.Array:
            return jnp.sum(bits <= cut[..., None], axis=-1, dtype=jnp.int32) >= wanted

        return jnp.where(wanted > 0, _least(enough, keep_all), keep_all)

    cut = jax.lax.cond(jnp.any(top_k > 0), top_k_cut, lambda: keep_all)

    def top_p_cut() -> jax.Array:
        weight = jnp.round(jnp.exp(-depth) * 2.0**_WEIGHT_BITS).astype(jnp.uint32)
        wanted = top_p[:, None] * _mass(weight, bits <= cut[..., None])

        def enough(least: jax.Array) -> jax.Array:
            return _mass(weight, bits <= least[..., None]) >= wanted

        nucleus = jnp.maximum(_least(enough, cut), 0)  # depth 0, the maximum, always stays
        return jnp.where(top_p[:, None] < 1, nucleus, cut)

    cut = jax.lax.cond(jnp.any(top_p < 1), top_p_cut, lambda: cut)
    deepest = -jnp.log(jnp.clip(min_p, 0.0, 1.0))
    kept = (bits <= cut[..., None]) & (depth <= _per_slot(deepest))
    return jnp.where(kept, -depth, -jnp.inf)


def gumbel(
    seed: jax.Array,  # [R, 2] uint32
    positions: jax.Array,  # [R, W] int32
    vocab: int,
) -> jax.Array:
    """Standard Gumbel noise [R, W, V] float32, a hash of (seed, position, token id) alone.

    The bits are those of `jax.random` with key fold_in(key(seed), position) (threefry2x32, one
    counter for each token id). All 32 go into the uniform, counted from the end that makes large
    noise, so that tokens down to a probability of 2**-32 are drawn as often as they should be.
    """
    seed = seed[:, None, :].astype(jnp.uint32)  # [R, 1, 2]
    zero = jnp.uint32(0)
    key = _threefry(seed[..., 0], seed[..., 1], zero, positions.astype(jnp.uint32))
    token = jnp.arange(vocab, dtype=jnp.uint32)
    high, low = _threefry(key[0][..., None], key[1][..., None], zero, token)
    uniform = ((high ^ low).astype(jnp.float32) + 0.5) * 2.0**-32
    uniform = jnp.minimum(uniform, 1 - 2.0**-24)  # rounding may reach 1, whose noise is -inf
    return -jnp.log(-jnp.log1p(-uniform))


def sample(
    logits: jax.Array,  # [R, W, V], penalised where penalties are on
    positions: jax.Array,  # [R, W] int32: the position that the drawn token will take
    seed: jax.Array,  # [R, 2] uint32
    temperature: jax.Array,  # [R]
    top_k: jax.Array,  # [R] int32
    top_p: jax.Array,  # [R]
    min_p: jax.Array,  # [R]
) -> jax.Array:
    """The target's own token at each row -> int32 [R, W].

    Gumbel-max over the filtered logits: an exact draw from their softmax. Greedy where the slot's
    temperature is 0; a batch that is greedy throughout skips filters and noise.
    """

    def draw() -> jax.Array:
        scores = filtered(logits, temperature, top_k, top_p, min_p)
        scores = scores + gumbel(seed, positions, logits.shape[-1])
        return greedy(jnp.where(_per_slot(temperature) > 0, scores, logits.astype(jnp.float32)))

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy(logits))


def accept(
    ids: jax.Array,  # [R, W] int32: anchor, drafts
    own: jax.Array,  # [R, W] int32: the target's own token after each of them
) -> jax.Array:
    """How many leading drafts are the target's own tokens -> int32 [R], 0..W-1."""
    right = (ids[:, 1:] == own[:, :-1]).astype(jnp.int32)
    return jnp.sum(jnp.cumprod(right, axis=1), axis=1, dtype=jnp.int32)


def emit(
    own: jax.Array,  # [R, W] int32
    accepted: jax.Array,  # [R] int32
    active: jax.Array,  # [R] bool
    remaining: jax.Array,  # [R] int32: tokens the slot may still emit (token and context limits)
    stop_ids: jax.Array,  # [R, E] int32, padded with -1; all -1 ignores stops
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cut a round's tokens own[:, :accepted + 1] at the first stop id and at the limit.

    Returns count [R] int32 (the stop id counts), finished_by_stop [R] and finished_by_length [R]
    bool, never both: a stop id on the very last allowed place is a stop. Inactive slots emit 0
    tokens and do not finish; an active slot with no room left emits 0 and finishes by length.
    """
    width = own.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)
    usable = jnp.minimum(accepted + 1, jnp.maximum(remaining, 0))
    stops = jnp.any(own[:, :, None] == stop_ids[:, None, :], axis=-1)
    stops = stops & (own >= 0) & (place < usable[:, None])
    by_stop = jnp.any(stops, axis=1) & active
    count = jnp.where(by_stop, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, usable)
    count = jnp.where(active, count, 0).astype(jnp.int32)
    by_length = active & ~by_stop & (count >= remaining)
    return count, by_stop, by_length


def _per_slot(parameter: jax.Array) -> jax.Array:
    """[R] -> float32 [R, 1, 1]."""
    return parameter.astype(jnp.float32)[:, None, None]


def _least(enough, most: jax.Array) -> jax.Array:
    """The least int32 in 0..most for which the monotone `enough` holds; `most` if none below."""

    def halve(_, bounds):
        low, high = bounds  # enough(high), not enough(low)
        middle = low + (high - low) // 2
        yes = enough(middle)
        return jnp.where(yes, low, middle), jnp.where(yes, middle, high)

    return jax.lax.fori_loop(0, 31, halve, (jnp.full_like(most, -1), most))[1]


def _mass(weight: jax.Array, kept: jax.Array) -> jax.Array:
    """Sum of uint32 weights [..., V] where kept, as float32 [...], the same in any order.

    The parts are summed as integers and joined by a product with a power of two, which is exact,
    so that it cannot matter whether the compiler fuses it with the addition.
    """
    weight = jnp.where(kept, weight, 0)
    ones = 2**_PART_BITS - 1

    def total(shift: int) -> jax.Array:
        return jnp.sum((weight >> shift) & ones, axis=-1, dtype=jnp.uint32)

    low, middle = total(0), total(_PART_BITS)
    high = jnp.sum(weight >> 2 * _PART_BITS, axis=-1, dtype=jnp.uint32)
    middle = middle + (low >> _PART_BITS)
    high = high + (middle >> _PART_BITS)
    low = ((middle & ones) << _PART_BITS) | (low & ones)  # below 2**20: exact as float32
    return high.astype(jnp.float32) * 2.0 ** (2 * _PART_BITS) + low.astype(jnp.float32)


def _threefry(
    key0: jax.Array, key1: jax.Array, word0: jax.Array, word1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32, 20 rounds (Salmon et al. 2011), on uint32 that broadcast together."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    word0, word1 = word0 + key0, word1 + key1
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            word0 = word0 + word1
            word1 = (word1 << turn) | (word1 >> (32 - turn))
            word1 = word1 ^ word0
        word0 = word0 + keys[(group + 1) % 3]
        word1 = word1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return word0, word1
