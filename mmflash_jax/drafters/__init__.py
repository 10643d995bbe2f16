"""Drafters by name, and what a drafter has to offer.

A new drafter is one file here, one name table in `ports`, one entry in `DRAFTERS` and one parity
test. A drafter may be approximate, slow or wrong: the target's output does not depend on it.
"""

from typing import Any, Protocol

import jax

from mmflash_jax.drafters.dflash import DFlash


class Drafter(Protocol):
    """A flax.linen module with attributes `config` and `dtype` and these methods, called through
    `drafter.apply({"params": p}, ..., method="draft")`. Parameters are its only collection; the
    context K/V it makes are kept and gathered by the caller.
    Letters: M rows, R slots, B block, S cache positions, K kv heads, D head size."""

    config: Any
    dtype: Any

    def extend(
        self,
        taps: jax.Array,  # [M, n_taps * H]
        positions: jax.Array,  # [M] i32
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Keys and values [M, K, D], one of each a layer, of committed tokens."""
        ...

    def draft(
        self,
        embed: jax.Array,  # [V, H], the target's
        head: jax.Array,  # [V, H], the target's
        anchor: jax.Array,  # [R] i32
        length: jax.Array,  # [R] i32: the anchor's position
        keys: tuple[jax.Array, ...],  # a layer: [R, K, S, D], valid below `length`
        values: tuple[jax.Array, ...],  # a layer: [R, K, S, D]
        rows: int | None = None,
    ) -> jax.Array:
        """Ids i32 [R, rows] proposed for positions length + 1 .. length + rows (default B - 1)."""
        ...


DRAFTERS: dict[str, type] = {"dflash": DFlash, "mmflash": DFlash}  # one architecture, two trainings


def drafter_class(name: str) -> type:
    """The drafter class called `name`. Raises ValueError that lists the known names."""
    if name not in DRAFTERS:
        raise ValueError(f"unknown drafter {name!r}, expected one of {sorted(DRAFTERS)}")
    return DRAFTERS[name]
