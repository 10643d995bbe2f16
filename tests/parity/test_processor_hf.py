"""Positions and videos against HF's torch code, live."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmflash_jax import processor
from mmflash_jax.config import PRESETS
from mmflash_jax.images import Video

torch = pytest.importorskip("torch")

CONFIG = PRESETS["qwen3.5-9b"]
HALF = (0.5, 0.5, 0.5)
VIDEO = processor.Pixels(16, 2, 2, 4096, 25165824, HALF, HALF, 1 / 255, 3)


def hf_positions(ids: np.ndarray, images: list, videos: list):
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = Qwen3_5Model.get_vision_position_ids.__get__(model)
    kinds = (ids == CONFIG.image_token_id) + 2 * (ids == CONFIG.video_token_id)
    positions, delta = Qwen3_5Model.get_rope_index(
        model, torch.tensor(ids)[None], torch.tensor(kinds)[None],
        torch.tensor(images) if images else None, torch.tensor(videos) if videos else None)
    return positions[:, 0].numpy(), int(delta)


SIDES = st.integers(1, 6).map(lambda n: 2 * n)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), SIDES, SIDES, st.integers(0, 5)), max_size=4),
       st.integers(0, 4))
def test_r6_positions_equal_hf(slots, last):
    """Any order of images (t = 1) and videos, with texts of any length between."""
    ids, images, videos = [1], [], []
    for t, h, w, text in slots:
        ids += [2] * text
        pad = CONFIG.image_token_id if t == 1 else CONFIG.video_token_id
        (images if t == 1 else videos).append((t, h, w))
        for _ in range(t):
            ids += [3, CONFIG.vision_start_token_id, *[pad] * (h * w // 4),
                    CONFIG.vision_end_token_id]
    array = np.array(ids + [4] * last)
    positions, delta = processor.positions_3d(array, [s[:3] for s in slots], CONFIG)
    expected, expected_delta = hf_positions(array, images, videos)
    assert np.array_equal(positions, expected) and delta == expected_delta


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 5000), st.sampled_from([1.0, 2.0, 12.5, 24.0, 29.97, 60.0]),
       st.integers(16, 2200), st.integers(16, 2200), st.booleans())
def test_video_plan_equals_hf(frames, fps, width, height, capped):
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata
    pixels = dataclasses.replace(VIDEO, frame_tokens=768 if capped else None)
    video = Video("v", frames, fps, (width, height), lambda _: iter(()))
    plan = processor.plan_video(video, pixels)
    data = VideoMetadata(total_num_frames=frames, fps=fps)
    own = SimpleNamespace(fps=2, min_frames=4, max_frames=768, patch_size=16, merge_size=2,
                          temporal_patch_size=2, cap_pixels_per_frame=capped, max_video_tokens=768,
                          size={"shortest_edge": 4096, "longest_edge": 25165824})
    indices = Qwen3VLVideoProcessor.sample_frames(own, data)
    count = len(indices)
    even = [*indices, *indices[-1:]][:count + count % 2]
    assert plan.indices == tuple(even)
    patches = Qwen3VLVideoProcessor.get_num_of_video_patches(own, count, height, width)
    assert plan.grid[1] * plan.grid[2] * (count // 2) == patches
    times = Qwen3VLProcessor._calculate_timestamps(None, indices.tolist(), fps, 2)
    assert [f"{s:.1f}" for s in plan.seconds] == [f"{s:.1f}" for s in times]
    assert len(plan.seconds) == plan.grid[0] == len(even) // 2


@pytest.mark.parametrize("count", [2, 5, 8])
def test_video_patches_are_in_hf_order(count):
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    rng = np.random.default_rng(count)
    frames = rng.integers(0, 256, (count, 64, 96, 3), dtype=np.uint8)
    video = Video("v", count, 2.0, (96, 64), lambda wanted: (Image.fromarray(frames[i])
                                                             for i in wanted))
    got = processor.picture_of_video(processor.plan_video(video, VIDEO), VIDEO)
    values = ((torch.tensor(frames).double() / 255).float() - 0.5) / 0.5
    expected, *grid = Qwen3VLVideoProcessor.patchify(
        None, values.permute(0, 3, 1, 2)[None], 16, 2, 2)
    assert got.grid == tuple(grid)
    np.testing.assert_allclose(got.patches, expected[0].numpy(), rtol=0, atol=1e-6)
