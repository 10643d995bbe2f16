"""Small layers shared by target and drafter: norms, products, rotary embeddings, SwiGLU, conv.

In and out: arrays only. Nothing here knows caches, slots or checkpoints.
Letters: H hidden, N heads, D head size, T tokens, C channels.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

HIGHEST = lax.Precision.HIGHEST


def precision(dtype) -> lax.Precision | None:
    """float32 runs want true float32 products, also where the card would use tf32."""
    return HIGHEST if dtype == jnp.float32 else None


def linear(x: jax.Array, weight: jax.Array, out_dtype=None) -> jax.Array:
    """x [..., in] @ weight [out, in].T, accumulated in float32, given in x's dtype unless asked."""
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())),
                        precision=precision(x.dtype),
                        preferred_element_type=jnp.float32 if out_dtype == jnp.float32 else x.dtype)
    return y if out_dtype is None else y.astype(out_dtype)


def tree_sum(x: jax.Array, axis: int) -> jax.Array:
    """Sum over `axis` as a binary tree in index order: zeros appended change no bit."""
    x = jnp.moveaxis(x, axis, 0)
    while x.shape[0] > 1:
        if x.shape[0] % 2:
            x = jnp.concatenate([x, jnp.zeros_like(x[:1])])
        x = x[0::2] + x[1::2]
    return x[0]


def row_sum(x: jax.Array) -> jax.Array:
    """Sum of x [..., H] over H -> [..., 1], in one order whatever the number of rows: XLA's CPU
    loops choose theirs from the shape, so there it is a tree of elementwise sums."""
    return lax.platform_dependent(x, cpu=lambda x: tree_sum(x, -1)[..., None],
                                  default=lambda x: jnp.sum(x, -1, keepdims=True))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, plus_one: bool) -> jax.Array:
    """x [..., H] over its root mean square, times `1 + weight` (the target's text norms) or
    `weight` (drafter, GDN output): two conventions in one checkpoint (R11). The sum is formed in
    float32, cast back once. Source: HF `Qwen3_5RMSNorm`, `Qwen3RMSNorm`."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(row_sum(y * y) / y.shape[-1] + eps)
    scale = weight.astype(jnp.float32)
    return (y * (1.0 + scale if plus_one else scale)).astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """x [..., H] minus mean over deviation, times weight plus bias, in float32."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return (y * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def swiglu(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """down(silu(gate x) * up x); gate_up [2I, H], down [H, I]."""
    both = linear(x, gate_up)
    gate, up = jnp.split(both, 2, -1)
    hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return linear(hidden.astype(x.dtype), down)


def rope_frequencies(rope) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 [dim / 2] of a `config.RopeConfig` and the factor on cos and
    sin (1 without yarn). Source: HF `_compute_yarn_parameters`, arXiv 2309.00071."""
    half = rope.dim // 2
    inverse = 1.0 / rope.theta ** (np.arange(half, dtype=np.float64) * 2 / rope.dim)
    if not rope.yarn:
        return inverse.astype(np.float32), 1.0
    yarn = dict(rope.yarn)
    factor, original = yarn["factor"], yarn["original_max_position_embeddings"]

    def dimension(turns):
        return rope.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(yarn.get("beta_fast", 32)), dimension(yarn.get("beta_slow", 1))
    if yarn.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0, 1)
    inverse = inverse / factor * ramp + inverse * (1 - ramp)
    return inverse.astype(np.float32), _yarn_scale(yarn, factor)


def _yarn_scale(yarn: dict, factor: float) -> float:
    if yarn.get("attention_factor") is not None:
        return float(yarn["attention_factor"])

    def grown(m):
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    if yarn.get("mscale") and yarn.get("mscale_all_dim"):
        return grown(yarn["mscale"]) / grown(yarn["mscale_all_dim"])
    return grown(1.0)


def rope_table(positions: jax.Array, rope) -> tuple[jax.Array, jax.Array]:
    """cos, sin float32 [..., dim] of 1-D positions [...]; the half's angles stand twice."""
    inverse, scale = rope_frequencies(rope)
    angle = positions[..., None].astype(jnp.float32) * inverse
    angle = jnp.concatenate([angle, angle], -1)
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def mrope_table(positions: jax.Array, rope, section) -> tuple[jax.Array, jax.Array]:
    """cos, sin float32 [..., dim] of 3-D positions [3, ...] (time, height, width), interleaved:
    frequency i belongs to height if i % 3 == 1, to width if i % 3 == 2, up to three times the
    section's length, else to time. Source: HF `apply_interleaved_mrope`."""
    inverse, scale = rope_frequencies(rope)
    axis = np.zeros(len(inverse), np.int32)
    for which in (1, 2):
        axis[which:3 * section[which]:3] = which
    angle = jnp.moveaxis(positions, 0, -1).astype(jnp.float32)[..., axis] * inverse
    angle = jnp.concatenate([angle, angle], -1)
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the first `dim` of x [..., N, D] by cos, sin [..., dim], halves paired ("neox").
    cos and sin are cast to x's dtype first, as HF does; float32 in, float32 arithmetic."""
    dim = cos.shape[-1]
    cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    turned, rest = x[..., :dim], x[..., dim:]
    half = jnp.concatenate([-turned[..., dim // 2:], turned[..., :dim // 2]], -1)
    return jnp.concatenate([turned * cos + half * sin, rest], -1)


def causal_conv(window: jax.Array, weight: jax.Array) -> jax.Array:
    """Depthwise causal convolution with silu: window [..., T + taps - 1, C], its first taps - 1
    rows being the past; weight [C, taps]. Gives float32 [..., T, C]."""
    taps = weight.shape[-1]
    length = window.shape[-2] - taps + 1
    w = weight.astype(jnp.float32)
    rows = [lax.slice_in_dim(window, j, j + length, axis=window.ndim - 2) for j in range(taps)]
    return jax.nn.silu(sum(row.astype(jnp.float32) * w[:, j] for j, row in enumerate(rows)))
