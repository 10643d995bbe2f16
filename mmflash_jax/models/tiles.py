"""How the rows of a round are laid out: packed for products, 16 rows a slot for the mixers.

Products see the rows of all slots packed one after another and padded to whole tiles of 16, so
that plain decoding of one slot runs the same shape as its verify, and 32 plain slots run 32 rows.
Attention and Gated DeltaNet see 16 rows a slot at every width, so that both run one arithmetic.
"""

import jax
import jax.numpy as jnp
from flax import struct

from mmflash_jax.kernels.gdn_round import BORDER
from mmflash_jax.state import State, row_places


class Tile(struct.PyTreeNode):
    """Rows of one verify pass: `width` rows for each of R slots, M = R * width padded to 16."""

    width: int = struct.field(pytree_node=False)
    length: jax.Array  # [R] position of each slot's first row
    moved: jax.Array  # [R] bool: a chunk was completed since the border; the state moves by it
    pages: jax.Array  # [R, n] the pages to read
    page_ids: jax.Array  # [M] where each packed row's key goes; the pool's size: nowhere
    offsets: jax.Array  # [M]

    @property
    def border(self) -> jax.Array:
        """[R] the newest border at or below `length`."""
        return self.length // BORDER * BORDER

    def pack(self, x: jax.Array) -> jax.Array:
        """[R, width or 16, ...] -> [M, ...]."""
        return pad_rows(x[:, :self.width].reshape(-1, *x.shape[2:]))

    def unpack(self, x: jax.Array) -> jax.Array:
        """[M, ...] -> [R, 16, ...], zeros below the width."""
        slots = self.length.shape[0]
        x = x[:slots * self.width].reshape(slots, self.width, *x.shape[1:])
        return jnp.pad(x, ((0, 0), (0, BORDER - self.width)) + ((0, 0),) * (x.ndim - 2))


def pad_rows(x: jax.Array) -> jax.Array:
    """Rows [M, ...] to whole tiles of 16, zeros behind."""
    return jnp.pad(x, ((0, -x.shape[0] % BORDER),) + ((0, 0),) * (x.ndim - 1))


def tile_of(state: State, width: int, pages: int, page: int, pool: int) -> Tile:
    """The tile of a round. `pages` is how many pages of each slot are read: they must cover
    length + width of every active slot. Rows of inactive slots write no keys."""
    slots = state.slots
    rows = slots.length[:, None] + jnp.arange(width)
    keep = jnp.broadcast_to(slots.active[:, None], rows.shape)
    ids, offsets = row_places(state.pages, rows, keep, page, pool)
    missing = -ids.size % BORDER
    return Tile(
        width=width, length=slots.length, moved=slots.length - slots.border >= BORDER,
        pages=state.pages[:, :pages],
        page_ids=jnp.pad(ids.reshape(-1), (0, missing), constant_values=pool),
        offsets=jnp.pad(offsets.reshape(-1), (0, missing)))
