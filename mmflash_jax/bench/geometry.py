"""What a benchmark runs on: random weights of a published geometry, and the memory limit.

In: a preset's name. Out: modules, parameters, a state whose slots stand at a given context, and
the time that reading the bytes of one pass takes at best. Knows no clock.
"""

import functools

import jax
import jax.numpy as jnp

from mmflash_jax.config import PRESETS, DrafterConfig, TargetConfig, drafter_preset
from mmflash_jax.drafters.dflash import DFlash
from mmflash_jax.models.target import Target, default_kernels
from mmflash_jax.round import Models
from mmflash_jax.state import State, init_state
from ports.random_params import random_drafter, random_target

READ_BYTES_PER_S = 4.46e12  # measured on one H200, read only


def random_pair(name: str, with_drafter: bool, seed: int = 0) -> tuple[Models, dict]:
    """Modules and bfloat16 parameters of preset `name`, made on the device."""
    config = PRESETS[name]
    drafter = drafter_preset(config) if with_drafter else None
    keys = jax.random.split(jax.random.key(seed))
    params = {"target": random_target(config, keys[0], jnp.bfloat16)}
    kernels = default_kernels(config, jnp.bfloat16)
    if drafter is None:
        return Models(Target(config, kernels=kernels)), params
    params["drafter"] = random_drafter(drafter, keys[1], jnp.bfloat16)
    target = Target(config, drafter.target_layer_ids, kernels=kernels)
    return Models(target, DFlash(drafter)), params


def filled_state(models: Models, *, slots: int, context: int, pages: int, page: int) -> State:
    """A state whose slots are all active at `context` committed tokens, every cache random."""
    drafter = models.drafter.config if models.drafter else None
    state = init_state(models.target.config, drafter, slots=slots, pages_per_slot=pages,
                       page=page, dtype=models.target.dtype)

    leaves, tree = jax.tree.flatten((state.attention, state.gdn, state.context))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    attention, gdn, context_kv = jax.tree.unflatten(
        tree, [_noise(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)])
    full = state.slots.replace(
        active=jnp.ones_like(state.slots.active),
        length=jnp.full_like(state.slots.length, context),
        border=jnp.full_like(state.slots.border, context // 16 * 16),
        remaining=jnp.full_like(state.slots.remaining, 2**30))
    return state.replace(attention=attention, gdn=gdn, context=context_kv, slots=full)


# Compiled once for each shape: one program for all leaves takes minutes to compile.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _noise(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    return 0.1 * jax.random.normal(key, shape, dtype)


def target_bytes(config: TargetConfig, slots: int, context: int) -> int:
    """Bytes one pass of the target must read (bf16): layers, head, K/V and GDN states."""
    c = config
    h, mlp = c.hidden_size, 3 * c.hidden_size * c.intermediate_size
    queries = c.num_attention_heads * c.head_dim
    keys = c.num_key_value_heads * c.head_dim
    attention = h * (2 * queries + 2 * keys) + queries * h
    gdn = h * (c.conv_dim + c.value_dim + 2 * c.linear_num_value_heads) + c.value_dim * h
    full, linear = len(c.attention_layers), len(c.gdn_layers)
    weights = full * (attention + mlp) + linear * (gdn + mlp) + c.vocab_size * h
    kv = slots * context * full * 2 * keys
    state = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    return 2 * (weights + kv) + 4 * slots * linear * state


def drafter_bytes(config: DrafterConfig, target: TargetConfig, slots: int, context: int) -> int:
    """Bytes one draft must read (bf16): its weights, the target's head, context K/V."""
    c = config
    kv = slots * context * c.num_hidden_layers * 2 * c.num_key_value_heads * c.head_dim
    return 2 * (c.parameter_count() + target.vocab_size * target.hidden_size + kv)


def limit_ms(models: Models, slots: int, context: int, width: int) -> float:
    """Milliseconds that a round's bytes take at the card's read ceiling."""
    total = target_bytes(models.target.config, slots, context)
    if width > 1:
        total += drafter_bytes(models.drafter.config, models.target.config, slots, context)
    return total / READ_BYTES_PER_S * 1e3
