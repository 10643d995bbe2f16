"""The vision tower against a float64 forward written from its description, and what padding,
bucketing, tiling and neighbours must not change."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.config import PRESETS, VisionConfig
from mmflash_jax.models import vision as vision_module
from mmflash_jax.models.vision import (
    Vision,
    bucket,
    encode,
    frame_attention,
    frame_geometry,
    vision_batches,
)

TINY = VisionConfig(depth=2, hidden_size=32, num_heads=4, intermediate_size=40, patch_size=2,
                    temporal_patch_size=2, spatial_merge_size=2, in_channels=3,
                    num_position_embeddings=25, out_hidden_size=20)


def make_picture(grid, seed=0, config=TINY):
    rng = np.random.default_rng(seed)
    patches = rng.normal(size=(math.prod(grid), config.patch_dim)).astype(np.float32)
    return types.SimpleNamespace(patches=patches, grid=grid)


def random_params(config=TINY, dtype=jnp.float32, seed=1):
    """Every weight, bias and norm random, so that a missing one shows."""
    inputs = next(iter(vision_batches([make_picture((1, 2, 2), config=config)], config))).inputs
    shapes = jax.eval_shape(Vision(config, dtype).init, jax.random.key(0), *inputs)["params"]
    rng = np.random.default_rng(seed)

    def fill(shape):
        if len(shape.shape) == 1:
            values = 1 + 0.5 * rng.normal(size=shape.shape)
        else:
            values = 1.5 * rng.normal(size=shape.shape) / shape.shape[-1]**0.5
        return jnp.asarray(values, shape.dtype)

    return jax.tree.map(fill, shapes)


PARAMS = random_params()


@jax.jit
def apply(*inputs):
    return Vision(TINY, jnp.float32).apply({"params": PARAMS}, *inputs)


def features(*pictures):
    return [np.asarray(f) for f in encode(apply, pictures, TINY)]


def reference(picture, params, config):
    """Float64, patch by patch where that is the plainest."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    erf = np.vectorize(math.erf)
    t, h, w = picture.grid
    merge, heads, size = config.spatial_merge_size, config.num_heads, config.head_dim
    side = math.isqrt(config.num_position_embeddings)
    table = params["pos_embed"].reshape(side, side, -1)

    def affine(x, p):
        return x @ p["weight"].T + p["bias"]

    def norm(x, p):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["weight"] + p["bias"]

    def place(i, count):
        at = i * (side - 1) / (count - 1) if count > 1 else 0.0
        low = min(int(at), side - 1)
        return low, min(low + 1, side - 1), at - low

    cells = [(bi * merge + i, bj * merge + j) for bi in range(h // merge)
             for bj in range(w // merge) for i in range(merge) for j in range(merge)]
    learned, angles = [], []
    for row, column in cells:
        r0, r1, r = place(row, h)
        c0, c1, c = place(column, w)
        learned.append((1 - r) * ((1 - c) * table[r0, c0] + c * table[r0, c1])
                       + r * ((1 - c) * table[r1, c0] + c * table[r1, c1]))
        frequency = [10000 ** (-2 * i / (size // 2)) for i in range(size // 4)]
        angles.append([row * f for f in frequency] + [column * f for f in frequency])
    angles = np.tile(np.array(angles), 2)  # [h * w, size]

    def rotate(x):  # [h * w, size]
        other = np.concatenate([-x[:, size // 2:], x[:, :size // 2]], 1)
        return x * np.cos(angles) + other * np.sin(angles)

    out = []
    for frame in picture.patches.astype(np.float64).reshape(t, h * w, -1):
        x = affine(frame, params["patch"]) + np.array(learned)
        for i in range(config.depth):
            p = params[f"blocks_{i}"]
            qkv = affine(norm(x, p["norm1"]), p["qkv"]).reshape(h * w, 3, heads, size)
            mixed = []
            for head in range(heads):
                q, k = rotate(qkv[:, 0, head]), rotate(qkv[:, 1, head])
                e = np.exp(q @ k.T / np.sqrt(size))
                mixed.append(e / e.sum(1, keepdims=True) @ qkv[:, 2, head])
            x = x + affine(np.concatenate(mixed, 1), p["proj"])
            u = affine(norm(x, p["norm2"]), p["fc1"])
            u = 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
            x = x + affine(u, p["fc2"])
        p = params["merger"]
        u = affine(norm(x, p["norm"]).reshape(h * w // merge**2, -1), p["fc1"])
        out.append(affine(0.5 * u * (1 + erf(u / np.sqrt(2))), p["fc2"]))
    return np.concatenate(out)


def close(mine, theirs, relative=1e-5):
    assert mine.shape == theirs.shape
    assert np.abs(mine - theirs).max() <= relative * np.abs(theirs).max()


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 4, 6), (1, 12, 8), (1, 2, 14), (3, 4, 4)])
def test_matches_float64_forward(grid):
    picture = make_picture(grid)
    close(features(picture)[0], reference(picture, PARAMS, TINY))


def test_gelu_of_blocks_and_merger_differ(monkeypatch):
    """The tolerance above tells the two gelus apart."""
    picture = make_picture((1, 4, 4))
    right = reference(picture, PARAMS, TINY)
    exact = jax.nn.gelu
    for approximate in (True, False):
        monkeypatch.setattr(jax.nn, "gelu", lambda x, approximate=0, a=approximate: exact(x, a))
        wrong = encode(lambda *x: Vision(TINY, jnp.float32).apply({"params": PARAMS}, *x),
                       [picture], TINY)[0]
        assert np.abs(wrong - right).max() > 3e-5 * np.abs(right).max()


def test_padding_changes_nothing():
    """Garbage in padded patches, cells and weights reaches no real row, to the bit."""
    batch = next(iter(vision_batches([make_picture((1, 6, 6))], TINY)))
    patches, corner, weight, cells, count = batch.inputs
    assert patches.shape[1] > 36 and count.tolist() == [36]
    clean = np.asarray(apply(*batch.inputs))[:, :batch.rows]
    dirty = [x.copy() for x in (patches, corner, weight, cells)]
    for x, value in zip(dirty, (1e4, 24, 7.0, 9), strict=True):
        x[:, 36:] = value
    assert np.array_equal(np.asarray(apply(*dirty, count))[:, :batch.rows], clean)


def test_bucket_does_not_change_features(monkeypatch):
    pictures = [make_picture((1, 6, 6)), make_picture((5, 4, 4), 1)]
    small = features(*pictures)
    monkeypatch.setattr(vision_module, "SMALLEST_BUCKET", 64)
    assert next(iter(vision_batches(pictures, TINY))).inputs[0].shape[1] == 256
    for mine, theirs in zip(features(*pictures), small, strict=True):
        close(mine, theirs, 1e-6)


def test_padded_frames_are_finite_and_harmless():
    batch = next(iter(vision_batches([make_picture((3, 4, 4))], TINY)))
    assert batch.inputs[0].shape[0] == 4 and batch.inputs[4].tolist() == [16, 16, 16, 0]
    out = np.asarray(apply(*batch.inputs))
    assert np.isfinite(out).all()


def test_frames_never_attend_to_each_other():
    video = make_picture((3, 4, 4))
    before = features(video)[0].reshape(3, 4, -1)
    video.patches = video.patches.copy()
    video.patches[16:32] += 1.0
    after = features(video)[0].reshape(3, 4, -1)
    assert np.array_equal(before[[0, 2]], after[[0, 2]])
    assert not np.allclose(before[1], after[1])


def test_pictures_do_not_depend_on_their_neighbours():
    """An image, a video and another image: each as if it had come alone, to the bit."""
    pictures = [make_picture((1, 4, 6)), make_picture((3, 4, 4), 1), make_picture((1, 8, 8), 2)]
    together = features(*pictures)
    assert [f.shape for f in together] == [(6, 20), (12, 20), (16, 20)]
    for picture, mine in zip(pictures, together, strict=True):
        assert np.array_equal(features(picture)[0], mine)


def test_long_video_is_split_and_joined_in_order(monkeypatch):
    video = make_picture((7, 4, 4))
    whole = features(video)[0]
    monkeypatch.setattr(vision_module, "BATCH_PATCHES", 128)
    batches = list(vision_batches([video], TINY))
    assert [(b.inputs[0].shape[0], b.frames) for b in batches] == [(2, 2)] * 3 + [(1, 1)]
    close(features(video)[0], whole, 1e-6)


def test_tiled_attention_equals_plain(monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 96, 3, 8)), jnp.float32) for _ in range(3))
    count = jnp.array([96, 50])
    plain = frame_attention(q, k, v, count)
    monkeypatch.setattr(vision_module, "LOGITS_BYTES", 2 * 3 * 96 * 4 * 12)
    assert "scan" in str(jax.make_jaxpr(frame_attention)(q, k, v, count))
    np.testing.assert_allclose(frame_attention(q, k, v, count), plain, atol=2e-6)


def test_largest_image_needs_no_square_of_logits():
    """65,536 patches: 275 GB of logits if they all existed at once."""
    x = jax.ShapeDtypeStruct((1, 65536, 16, 72), jnp.bfloat16)
    count = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = jax.jit(frame_attention).lower(x, x, x, count).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 2**30


@pytest.mark.parametrize("height,width", [(2, 2), (4, 10), (98, 130)])
def test_geometry(height, width):
    config = PRESETS["qwen3.5-9b"].vision
    corner, weight, cells = frame_geometry(height, width, config)
    assert (corner.dtype, weight.dtype, cells.dtype) == (np.int32, np.float32, np.int32)
    assert corner.shape == weight.shape == (height * width, 4)
    assert corner.min() >= 0 and corner.max() <= 48 * 48 - 1
    np.testing.assert_allclose(weight.sum(1), 1, atol=1e-6)
    assert cells[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert len({tuple(c) for c in cells.tolist()}) == height * width
    # A linear table is met exactly: the edges of the picture stand on the edges of the table.
    rows, columns = np.divmod(np.arange(48 * 48), 48)
    for axis, table, size in ((0, rows, height), (1, columns, width)):
        expected = cells[:, axis] * 47 / (size - 1)
        np.testing.assert_allclose((table[corner] * weight).sum(1), expected, atol=2e-5)


def test_buckets_are_few():
    sizes = [bucket(n) for n in range(1, 16385)]
    assert len(set(sizes)) == 21 and sizes[-1] == 16384
    assert all(n <= size <= max(16, 1.5 * n) for n, size in enumerate(sizes, 1))


@pytest.mark.parametrize("grid,rows,width,words", [
    ((1, 3, 4), 12, 24, "multiples of 2"),
    ((0, 4, 4), 0, 24, "positive"),
    ((1, 4, 4), 12, 24, r"\(12, 24\).*\(16, 24\)"),
    ((1, 4, 4), 16, 48, r"\(16, 48\).*\(16, 24\)"),
])
def test_wrong_pictures_are_refused(grid, rows, width, words):
    picture = types.SimpleNamespace(patches=np.zeros((rows, width), np.float32), grid=grid)
    with pytest.raises(ValueError, match=f"picture 1: .*{words}"):
        list(vision_batches([make_picture((1, 2, 2)), picture], TINY))


def test_bfloat16_stays_close():
    params = random_params(dtype=jnp.bfloat16)
    picture = make_picture((1, 6, 8))
    out = encode(lambda *x: Vision(TINY).apply({"params": params}, *x), [picture], TINY)[0]
    assert out.dtype == jnp.bfloat16
    close(np.asarray(out, np.float64), reference(picture, params, TINY), 0.06)


def test_parameter_tree_of_the_published_tower():
    config = dataclasses.replace(PRESETS["qwen3.5-9b"].vision, depth=2)
    inputs = next(iter(vision_batches([make_picture((1, 2, 2), config=config)], config))).inputs
    tree = jax.eval_shape(Vision(config).init, jax.random.key(0), *inputs)["params"]
    shapes = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
              for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    pairs = {"patch": (1152, 1536)}
    for i in range(2):
        pairs |= {f"blocks_{i}/qkv": (3456, 1152), f"blocks_{i}/proj": (1152, 1152),
                  f"blocks_{i}/fc1": (4304, 1152), f"blocks_{i}/fc2": (1152, 4304),
                  f"blocks_{i}/norm1": (1152,), f"blocks_{i}/norm2": (1152,)}
    pairs |= {"merger/norm": (1152,), "merger/fc1": (4608, 4608), "merger/fc2": (4096, 4608)}
    expected = {"pos_embed": (2304, 1152)}
    for name, shape in pairs.items():
        expected |= {f"{name}/weight": shape, f"{name}/bias": shape[:1]}
    assert shapes == expected
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype(jnp.bfloat16)}
