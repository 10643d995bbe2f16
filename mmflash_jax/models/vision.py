"""The vision tower: patches of pictures in, one feature row for each 2x2 cells of patches out.

In: frames (an image is one frame, each temporal patch of a video is one) of at most N patches in
merge-block order, padded to N. Out: features [F, N / merge^2, H] for the embedding rows of the
image or video pads. On the host side: the geometry of a frame, and padding to a short list of
sizes so that few programs are compiled. It does not know files, prompts, tokens or slots.
Letters: F frames, N patches of a frame, C vision hidden size, A vision heads, H text hidden size.
Source: HF `Qwen3_5VisionModel` (transformers 5).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmflash_jax.config import VisionConfig
from mmflash_jax.layers import apply_rope, layer_norm, linear, precision

NORM_EPS = 1e-6  # fixed in HF's module, not in config.json
LOGITS_BYTES = 2**29  # most bytes of attention logits (float32) that exist at one time
SMALLEST_BUCKET = 16  # feature rows; a smaller frame is padded to it
BATCH_PATCHES = 16384  # frames of one video are batched up to this many patches


class Affine(nn.Module):
    """x @ weight.T + bias, accumulated in float32 and rounded once."""

    inputs: int
    outputs: int
    dtype: Any

    def setup(self):
        init = nn.initializers.normal(self.inputs**-0.5)
        self.weight = self.param("weight", init, (self.outputs, self.inputs), self.dtype)
        self.bias = self.param("bias", nn.initializers.zeros, (self.outputs,), self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., inputs] -> [..., outputs]
        y = linear(x, self.weight, jnp.float32) + self.bias.astype(jnp.float32)
        return y.astype(self.dtype)


class LayerNorm(nn.Module):
    """Layer norm with bias, in float32."""

    size: int
    dtype: Any

    def setup(self):
        self.weight = self.param("weight", nn.initializers.ones, (self.size,), self.dtype)
        self.bias = self.param("bias", nn.initializers.zeros, (self.size,), self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., size]
        return layer_norm(x, self.weight, self.bias, NORM_EPS)


class Block(nn.Module):
    """One pre-norm block: attention within each frame, then a tanh-gelu MLP."""

    config: VisionConfig
    dtype: Any

    def setup(self):
        size, inner = self.config.hidden_size, self.config.intermediate_size
        self.norm1 = LayerNorm(size, self.dtype)
        self.norm2 = LayerNorm(size, self.dtype)
        self.qkv = Affine(size, 3 * size, self.dtype)
        self.proj = Affine(size, size, self.dtype)
        self.fc1 = Affine(size, inner, self.dtype)
        self.fc2 = Affine(inner, size, self.dtype)

    def __call__(
        self,
        x: jax.Array,  # [F, N, C]
        cos: jax.Array,  # [F, N, C / A] f32
        sin: jax.Array,  # [F, N, C / A] f32
        count: jax.Array,  # [F] i32
    ) -> jax.Array:
        frames, patches, size = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(frames, patches, 3, self.config.num_heads, -1)
        q, k = (apply_rope(qkv[:, :, i].astype(jnp.float32), cos, sin).astype(self.dtype)
                for i in (0, 1))
        mixed = frame_attention(q, k, qkv[:, :, 2], count)
        x = x + self.proj(mixed.reshape(frames, patches, size))
        inner = self.fc1(self.norm2(x)).astype(jnp.float32)
        return x + self.fc2(jax.nn.gelu(inner, approximate=True).astype(self.dtype))


class Merger(nn.Module):
    """Norm each patch, join the patches of a cell, two products with an exact (erf) gelu."""

    config: VisionConfig
    dtype: Any

    def setup(self):
        size = self.config.hidden_size
        joined = size * self.config.spatial_merge_size**2
        self.norm = LayerNorm(size, self.dtype)
        self.fc1 = Affine(joined, joined, self.dtype)
        self.fc2 = Affine(joined, self.config.out_hidden_size, self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:  # [F, N, C] -> [F, N / merge^2, H]
        frames, patches, _ = x.shape
        rows = patches // self.config.spatial_merge_size**2
        inner = self.fc1(self.norm(x).reshape(frames, rows, -1)).astype(jnp.float32)
        return self.fc2(jax.nn.gelu(inner, approximate=False).astype(self.dtype))


class Vision(nn.Module):
    """The whole tower. Parameters: patch, pos_embed, blocks_{i}, merger."""

    config: VisionConfig
    dtype: Any = jnp.bfloat16

    def setup(self):
        c = self.config
        self.patch = Affine(c.patch_dim, c.hidden_size, self.dtype)
        self.pos_embed = self.param("pos_embed", nn.initializers.normal(0.02),
                                    (c.num_position_embeddings, c.hidden_size), self.dtype)
        self.blocks = [Block(c, self.dtype) for _ in range(c.depth)]
        self.merger = Merger(c, self.dtype)

    def __call__(
        self,
        patches: jax.Array,  # [F, N, patch_dim]
        corner: jax.Array,  # [F, N, 4] i32: rows of the position table
        weight: jax.Array,  # [F, N, 4] f32: their bilinear weights
        cells: jax.Array,  # [F, N, 2] i32: row and column of each patch
        count: jax.Array,  # [F] i32: real patches of each frame
    ) -> jax.Array:
        """Features [F, N / merge^2, H] in `dtype`. Rows that belong to padding are finite and
        mean nothing; they change no other row. The other arguments come from `vision_batches`."""
        position = sum(self.pos_embed[corner[..., i]].astype(jnp.float32) * weight[..., i, None]
                       for i in range(4))
        x = self.patch(patches.astype(self.dtype)) + position.astype(self.dtype)
        cos, sin = self._rotary(cells)
        for block in self.blocks:
            x = block(x, cos, sin, count)
        return self.merger(x)

    def _rotary(self, cells: jax.Array) -> tuple[jax.Array, jax.Array]:  # [F, N, 2]
        """cos, sin f32 [F, N, head size]: a quarter of the angles from the row, a quarter from
        the column, and the same again."""
        half = self.config.head_dim // 2
        power = np.arange(0, half, 2, dtype=np.float64) / half
        inverse = (self.config.rope_theta**-power).astype(np.float32)
        angle = cells[..., None].astype(jnp.float32) * inverse
        angle = angle.reshape(*cells.shape[:2], half)
        angle = jnp.concatenate([angle, angle], -1)
        return jnp.cos(angle), jnp.sin(angle)


def frame_attention(
    q: jax.Array,  # [F, N, A, D]
    k: jax.Array,  # [F, N, A, D]
    v: jax.Array,  # [F, N, A, D]
    count: jax.Array,  # [F] i32
) -> jax.Array:
    """Bidirectional softmax attention [F, N, A, D] of each frame to its own first `count` keys.

    Queries go in tiles, one after the other, so that never more than LOGITS_BYTES of logits
    exist: 65,536 patches would need 275 GB at once. A query's softmax is always over the whole
    row of keys, so the tile size does not change the arithmetic."""
    frames, patches, heads, size = q.shape
    real = jnp.arange(patches) < count[:, None]
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # [F, A, N, D]: plain batched products

    def attend(q):  # [F, A, tile, D]
        logits = jnp.einsum("faqd,fakd->faqk", q, k, precision=precision(q.dtype),
                            preferred_element_type=jnp.float32) * size**-0.5
        # A finite floor: a frame of padding alone has no real key and must not give NaN.
        logits = jnp.where(real[:, None, None], logits, jnp.finfo(jnp.float32).min)
        weight = jax.nn.softmax(logits).astype(q.dtype)
        return jnp.einsum("faqk,fakd->faqd", weight, v, precision=precision(q.dtype),
                          preferred_element_type=jnp.float32).astype(q.dtype)

    tile = patches
    while tile % 2 == 0 and frames * heads * tile * patches * 4 > LOGITS_BYTES:
        tile //= 2
    if tile == patches:
        return attend(q).swapaxes(1, 2)
    tiles = jnp.moveaxis(q.reshape(frames, heads, patches // tile, tile, size), 2, 0)
    mixed = jnp.moveaxis(lax.map(attend, tiles), 0, 2)
    return mixed.reshape(frames, heads, patches, size).swapaxes(1, 2)


def frame_geometry(
    height: int, width: int, config: VisionConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Geometry of a frame of height x width patches, in merge-block order: the order in which
    the patches of a cell, then the cells of a row of cells, follow each other.

    Returns corner [N, 4] i32 (rows of the learned position table), weight [N, 4] f32 (bilinear,
    align_corners: the first and last patch stand on the edges of the table) and cells [N, 2] i32
    (row, column). Raises ValueError if a side is not a positive multiple of the merge size."""
    merge = config.spatial_merge_size
    if height <= 0 or width <= 0 or height % merge or width % merge:
        raise ValueError(f"a frame has {height} x {width} patches, expected positive multiples "
                         f"of spatial_merge_size {merge}")
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    cells = np.stack([rows, columns], -1).reshape(height // merge, merge, width // merge, merge, 2)
    cells = cells.transpose(0, 2, 1, 3, 4).reshape(-1, 2).astype(np.int32)

    side = math.isqrt(config.num_position_embeddings)
    # float32 in HF's order of operations: the floor of a source row near an integer depends on it.
    sizes = np.maximum(np.array([height, width]) - 1, 1).astype(np.float32)
    source = cells.astype(np.float32) * np.float32(side - 1) / sizes
    low = np.floor(source)
    far = source - low
    taps = np.minimum(np.stack([low, low + 1], -1).astype(np.int32), side - 1)  # [N, axis, 2]
    share = np.stack([1 - far, far], -1)
    corner = taps[:, 0, :, None] * side + taps[:, 1, None, :]
    weight = share[:, 0, :, None] * share[:, 1, None, :]
    return corner.reshape(-1, 4), weight.reshape(-1, 4).astype(np.float32), cells


class VisionBatch(NamedTuple):
    """Some frames of one picture, padded: what `Vision` takes, and where the result belongs."""

    picture: int  # index of the picture
    frames: int  # real frames, the first ones of F
    rows: int  # real feature rows of each of them
    inputs: tuple[np.ndarray, ...]  # patches, corner, weight, cells, count of Vision.__call__


def bucket(rows: int) -> int:
    """The padded number of feature rows for `rows`: the next of 16, 24, 32, 48, 64, 96, ...
    (powers of two and 1.5 times them). 21 sizes reach 16,384 rows, the largest image of the
    published processor configuration."""
    size = SMALLEST_BUCKET
    while size < rows:
        if size + size // 2 >= rows:
            return size + size // 2
        size *= 2
    return size


def vision_batches(pictures: Sequence[Any], config: VisionConfig) -> Iterator[VisionBatch]:
    """Padded batches for `pictures` (objects with `patches` f32 [t*h*w, patch_dim] in merge-block
    order and `grid` (t, h, w), as `processor.Picture`), in order.

    N is `bucket(h*w / merge^2) * merge^2`, F a power of two: 1 for an image, at most
    BATCH_PATCHES / N for a video. A batch never holds two pictures, so that a picture's features
    do not depend on what it came with. Raises ValueError, before any batch, for a picture whose
    patches and grid do not fit each other or the configuration."""
    unit = config.spatial_merge_size**2
    for index, picture in enumerate(pictures):
        _check_picture(index, picture, config)
    for index, picture in enumerate(pictures):
        t, h, w = picture.grid
        geometry = frame_geometry(h, w, config)
        real = h * w
        padded = bucket(real // unit) * unit
        most = max(1, BATCH_PATCHES // padded)
        most = 1 << (most.bit_length() - 1)
        frames = picture.patches.reshape(t, real, -1)
        for first in range(0, t, most):
            here = frames[first:first + most]
            bundle = 1 << (len(here) - 1).bit_length()
            inputs = [_pad(here, (bundle, padded))]
            inputs += [np.repeat(_pad(g[None], (1, padded)), bundle, axis=0) for g in geometry]
            inputs += [np.where(np.arange(bundle) < len(here), real, 0).astype(np.int32)]
            yield VisionBatch(index, len(here), real // unit, tuple(inputs))


def _check_picture(index: int, picture: Any, config: VisionConfig) -> None:
    t, h, w = picture.grid
    merge = config.spatial_merge_size
    if min(t, h, w) < 1 or h % merge or w % merge:
        raise ValueError(f"picture {index}: grid (t, h, w) is {(t, h, w)}, expected positive "
                         f"numbers, h and w multiples of {merge}")
    want = (t * h * w, config.patch_dim)
    if picture.patches.shape != want:
        raise ValueError(f"picture {index}: patches have shape {picture.patches.shape}, but the "
                         f"grid {(t, h, w)} and patch size {config.patch_dim} ask for {want}")


def _pad(x: np.ndarray, sizes: tuple[int, int]) -> np.ndarray:
    """Zeros after the first two axes of x, up to `sizes`."""
    grown = [(0, size - old) for size, old in zip(sizes, x.shape[:2], strict=True)]
    return np.pad(x, grown + [(0, 0)] * (x.ndim - 2))


def encode(
    apply_fn: Callable[..., jax.Array], pictures: Sequence[Any], config: VisionConfig
) -> list[jax.Array]:
    """Features of each picture, [t*h*w / merge^2, H], padding sliced off, on the device.

    `apply_fn(patches, corner, weight, cells, count)` is the caller's compiled `Vision.__call__`
    with the parameters bound. Raises ValueError as `vision_batches` does."""
    parts: list[list[jax.Array]] = [[] for _ in pictures]
    for batch in vision_batches(pictures, config):
        features = apply_fn(*batch.inputs)
        kept = features[:batch.frames, :batch.rows]
        parts[batch.picture].append(kept.reshape(-1, features.shape[-1]))
    return [part[0] if len(part) == 1 else jnp.concatenate(part) for part in parts]
