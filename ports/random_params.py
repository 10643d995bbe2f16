"""Random parameters of a geometry, made on the device from the same name tables.

In: a config and a key. Out: a tree like the one `load_target` or `load_drafter` gives, scaled so
that activations stay of order one: matrices normal with standard deviation 1/sqrt(columns), norm
weights near the identity, the GDN's `A_log` and `dt_bias` as HF initialises them. For timing and
for tests; no text comes out of it.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from mmflash_jax.config import DrafterConfig, TargetConfig
from ports.dflash import drafter_table
from ports.name_table import Place, Table, dtype_of, tree
from ports.qwen35 import OPTIONAL, target_table

SMALL = 0.02  # standard deviation of biases and of norm weights around their centre


def random_target(config: TargetConfig, key: jax.Array, dtype: Any = "bfloat16", *,
                  vision: bool = True, mtp: bool = False, place: Place | None = None) -> dict:
    """Random target parameters; `A_log` and the GDN norm in float32, as the 9B stores them.

    `place(path, shape)` gives the device or sharding of each parameter.
    """
    wanted = ("vision",) * vision + ("mtp",) * mtp
    table = tuple(leaf for leaf in target_table(config)
                  if leaf.path[0] not in OPTIONAL or leaf.path[0] in wanted)
    return _random(table, key, dtype, place)


def random_drafter(config: DrafterConfig, key: jax.Array, dtype: Any = "bfloat16", *,
                   place: Place | None = None) -> dict:
    """Random drafter parameters, without a mask embedding."""
    return _random(drafter_table(config), key, dtype, place)


def _random(table: Table, key: jax.Array, dtype: Any, place: Place | None) -> dict:
    run_dtype = dtype_of(dtype)
    found = []
    for number, leaf in enumerate(table):
        kept = leaf.keep and leaf.init != "one"
        where = place(leaf.path, leaf.shape) if place else None
        draw = _draw(leaf.init, leaf.shape, "float32" if kept else str(run_dtype), where)
        found.append((leaf.path, draw(jax.random.fold_in(key, number))))
    return tree(found)


@functools.lru_cache(maxsize=256)
def _draw(init: str, shape: tuple[int, ...], dtype: str, where: Any):
    """A compiled function key -> array; layers share it, and no float32 copy is left behind."""

    def draw(key: jax.Array) -> jax.Array:
        if init == "one":
            return jnp.ones(shape, dtype)
        if init == "a_log":  # HF: log of uniform(0, 16), kept away from log 0
            return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0)).astype(dtype)
        normal = jax.random.normal(key, shape)
        if init == "matrix":
            return (normal / math.sqrt(math.prod(shape[1:]))).astype(dtype)
        return (SMALL * normal + (init == "scale")).astype(dtype)

    sharding = (jax.sharding.SingleDeviceSharding(where) if isinstance(where, jax.Device)
                else where)
    return jax.jit(draw, out_shardings=sharding)

