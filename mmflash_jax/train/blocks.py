"""From a row of training tokens to the blocks a drafter learns on, and who sees whom in them.

In: token ids, which of them are supervised, g, and a key. Out: anchors; the ids, positions,
targets and masks of their blocks; the attention rule as predicates over indices, for any kernel
or dense mask to use. Nothing here knows the drafter's weights, losses or files.
All blocks of a sequence run in one pass, as queries [block 0 | block 1 | ..] over keys
[context of the sequence | block 0 | block 1 | ..]; the context is shared, blocks are isolated.
Letters: B sequences, S positions of a row, N blocks of a sequence, K slots of a block.
Sources: SpecForge's DFlash and MMFlash training; z-lab `dflash`.
"""

import flax.struct
import jax
import jax.numpy as jnp

from mmflash_jax.train.objective import TEXT_ONLY


def sample_anchors(
    keys: jax.Array,  # [B] keys, one a row: a row's anchors do not depend on its neighbours
    supervised: jax.Array,  # [B, S] bool
    length: jax.Array,  # [B] i32, tokens of the row; what comes after is padding
    block: int,
    count: int = 512,
) -> tuple[jax.Array, jax.Array]:
    """(anchors i32 [B, count] in ascending order, valid bool [B, count]): supervised positions
    a with a + block <= length, drawn without replacement, all of them where there are no more than
    `count`. Entries that are not valid come last and hold 0."""
    if supervised.ndim != 2 or not keys.shape[:1] == supervised.shape[:1] == length.shape:
        raise ValueError(f"keys {keys.shape}, supervised {supervised.shape} and length "
                         f"{length.shape}, expected [B], [B, S] and [B]")
    if block < 2 or count < 1:
        raise ValueError(f"block {block} and count {count}, expected at least 2 and 1")
    size = supervised.shape[1]
    position = jnp.arange(size)
    allowed = supervised & (position + block <= length[:, None])
    # Random order by integers of 31 bits, not float32, whose 2^23 values tie at long rows.
    order = jax.vmap(lambda key: jax.random.bits(key, (size,), jnp.uint32) >> 1)(keys)
    order = jnp.where(allowed, order.astype(jnp.int32), -1)
    best, chosen = jax.lax.top_k(order, min(count, size))
    chosen = jnp.sort(jnp.where(best >= 0, chosen, size), -1)
    chosen = jnp.pad(chosen, ((0, 0), (0, count - chosen.shape[1])), constant_values=size)
    valid = chosen < size
    return jnp.where(valid, chosen, 0).astype(jnp.int32), valid


@flax.struct.dataclass
class Blocks:
    """What the drafter reads, and what it is to say in the rows after the anchor's."""

    ids: jax.Array  # [B, N, 1 + K] i32: the anchor's token, then mask tokens
    positions: jax.Array  # [B, N, 1 + K] i32, index in the row, image pads counted singly (R6)
    targets: jax.Array  # [B, N, K] i32: slot k's is the token at anchor + k
    mask: jax.Array  # [B, N, K] bool, supervised
    g: jax.Array  # [B, N, K] f32, TEXT_ONLY where not supervised


def make_blocks(
    ids: jax.Array,  # [B, S] i32
    supervised: jax.Array,  # [B, S] bool
    length: jax.Array,  # [B] i32
    g: jax.Array,  # [B, S] f32, TEXT_ONLY on text-only rows
    anchors: jax.Array,  # [B, N] i32
    valid: jax.Array,  # [B, N] bool
    block: int,
    mask_token_id: int,
) -> Blocks:
    """The blocks at `anchors`. A slot is supervised if its block is valid and its token is
    supervised and within the row."""
    if not ids.shape == supervised.shape == g.shape:
        raise ValueError(f"ids {ids.shape}, supervised {supervised.shape} and g {g.shape} differ, "
                         "expected the same [B, S]")
    positions = anchors[..., None] + jnp.arange(block, dtype=jnp.int32)
    inside = jnp.minimum(positions, ids.shape[1] - 1)
    tokens, known, score = (
        jnp.take_along_axis(x[:, None], inside, -1) for x in (ids, supervised, g))
    mask = known & valid[..., None] & (positions < length[:, None, None])
    own = jnp.where(jnp.arange(block) == 0, tokens, mask_token_id).astype(jnp.int32)
    mask = mask[..., 1:]
    return Blocks(own, positions, tokens[..., 1:].astype(jnp.int32), mask,
                  jnp.where(mask, score[..., 1:].astype(jnp.float32), TEXT_ONLY))


def sees_context(anchor, row, position, window: int | None = None):
    """Whether row `row` of the block at `anchor` sees context `position`: the anchor's own hidden
    state is not known when the block is drafted, so strictly before it. A window counts the row
    itself. Integers or arrays that broadcast."""
    before = position < anchor
    return before if window is None else before & (position > anchor + row - window)


def sees_block(row, column, *, causal: bool, window: int | None = None):
    """Whether row `row` of a block sees row `column` of the same block: all of them, or with
    `causal` those up to itself; no row beyond the window. A row always sees itself, so that no
    softmax is over nothing (R33)."""
    seen = (column <= row) | (not causal)
    return seen if window is None else seen & (column > row - window)


def visible(
    query,  # i32, index into [N * block] rows of blocks
    key,  # i32, index into [S + N * block]: context, then rows of blocks
    anchors: jax.Array,  # [N] i32, of one sequence
    block: int,
    context: int,  # S
    *,
    causal: bool,
    window: int | None = None,
):
    """The whole rule over flat indices that broadcast against each other: `query[:, None]`, `key`
    give the dense mask, a tile's indices give the tile's."""
    own, row = query // block, query % block
    other, column = (key - context) // block, (key - context) % block
    past = sees_context(anchors[own], row, key, window)
    near = (own == other) & sees_block(row, column, causal=causal, window=window)
    return jnp.where(key < context, past, near)
