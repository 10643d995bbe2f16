"""Pictures and videos to patches, grids and 3-D positions, as the HF PIL processor makes them.

In: sources that `images.py` reads, and the model folder's preprocessor files.
Out: `Picture` (patches, grid), and `positions_3d` for token ids whose pads are expanded.
One function serves pictures and videos, since a picture is a video whose only frame is repeated.
It knows nothing of text, tokenizers or devices.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmflash_jax.config import TargetConfig, read_json
from mmflash_jax.images import (
    InputError,
    Source,
    Video,
    load_image,
    load_video,
    source_name,
)

__all__ = [
    "Grid", "InputError", "Picture", "Pixels", "Prompt", "Settings", "image_grid", "load_image",
    "load_video", "picture_of_image", "picture_of_video", "plan_video", "positions_3d",
    "read_settings"]

Grid = tuple[int, int, int]  # (t, h, w) in patches
MAX_ASPECT = 200  # HF refuses pictures that are longer


@dataclasses.dataclass(frozen=True)
class Picture:
    """A preprocessed picture or video."""

    patches: np.ndarray  # f32 [t*h*w, channels * temporal * patch * patch], merge-block order
    grid: Grid


@dataclasses.dataclass(frozen=True)
class Prompt:
    """All that a prefill needs."""

    ids: np.ndarray  # i32 [T], pads expanded to one for each merged token
    positions: np.ndarray  # i32 [3, T]
    rope_delta: int  # position of token n >= T is n + rope_delta
    pictures: tuple[Picture, ...]  # pictures and videos in order of appearance
    opens_reasoning: bool = False  # the prompt ends inside a <think> block


@dataclasses.dataclass(frozen=True)
class Pixels:
    """How pixels become patches: sizes, limits in pixels, normalisation, sampling of videos."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int  # of height x width; of frames x height x width for a video
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    resample: int  # Pillow's number of the filter
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    frame_tokens: int | None = None  # cap of one frame's tokens (`cap_pixels_per_frame`)

    @property
    def factor(self) -> int:
        """Pixels along one side of a merged token."""
        return self.patch_size * self.merge_size


@dataclasses.dataclass(frozen=True)
class Settings:
    image: Pixels
    video: Pixels


def read_settings(folder: str | Path, config: TargetConfig) -> Settings:
    """Settings from `processor_config.json`, `preprocessor_config.json` and
    `video_preprocessor_config.json`; the first that has a part wins, as in transformers 5.

    Without settings for videos they are the pictures', with the family's published size limits.
    Raises InputError on settings that are missing, not supported, or at odds with `config`.
    """
    folder = Path(folder)
    both = _optional(folder / "processor_config.json")
    parts = []
    for part, file in (("image_processor", "preprocessor_config.json"),
                       ("video_processor", "video_preprocessor_config.json")):
        if isinstance(both.get(part), dict):
            parts.append((both[part], f"{folder / 'processor_config.json'}: {part}"))
        else:
            parts.append((_optional(folder / file), str(folder / file)))
    (image, image_at), (video, video_at) = parts
    if not image:
        raise InputError(f"{image_at}: missing, no pictures can be read")
    if not video:
        sizes = {"shortest_edge": 4096, "longest_edge": 25165824}
        limits = ("min_pixels", "max_pixels")
        video = {**{k: v for k, v in image.items() if k not in limits}, "size": sizes}
        video_at = image_at
    return Settings(_pixels(image, image_at, config), _pixels(video, video_at, config))


def _optional(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}


def _pixels(fields: dict, where: str, config: TargetConfig) -> Pixels:
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames"):
        if fields.get(name) not in (None, True):
            raise InputError(f"{where}: {name} is {fields[name]!r}, only true is supported")
    if fields.get("num_frames") is not None:
        raise InputError(f"{where}: num_frames is {fields['num_frames']}, only sampling by fps is "
                         "supported")
    size = fields.get("size") or {}
    if not isinstance(size, dict):
        raise InputError(f"{where}: size is {size!r}, expected shortest_edge and longest_edge")
    pixels = Pixels(
        patch_size=_whole(fields, "patch_size", where),
        temporal_patch_size=_whole(fields, "temporal_patch_size", where),
        merge_size=_whole(fields, "merge_size", where),
        min_pixels=_limit(fields, size, "min_pixels", "shortest_edge", where),
        max_pixels=_limit(fields, size, "max_pixels", "longest_edge", where),
        mean=_three(fields, "image_mean", where),
        std=_three(fields, "image_std", where, positive=True),
        rescale=_positive(fields, "rescale_factor", 1 / 255, where),
        resample=_resample(fields, where), fps=_positive(fields, "fps", 2.0, where),
        min_frames=_whole(fields, "min_frames", where, 4),
        max_frames=_whole(fields, "max_frames", where, 768), frame_tokens=_frame_tokens(
            fields, where))
    if pixels.min_frames > pixels.max_frames:
        raise InputError(f"{where}: min_frames is {pixels.min_frames}, above max_frames "
                         f"{pixels.max_frames}")
    if vision := config.vision:
        for name, ours, theirs in (
                ("patch_size", pixels.patch_size, vision.patch_size),
                ("temporal_patch_size", pixels.temporal_patch_size, vision.temporal_patch_size),
                ("merge_size", pixels.merge_size, vision.spatial_merge_size)):
            if ours != theirs:
                raise InputError(f"{where}: {name} is {ours}, the vision tower's is {theirs}")
    return pixels


def _whole(fields: dict, name: str, where: str, default: int | None = None) -> int:
    value = default if fields.get(name) is None else fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InputError(f"{where}: {name} is {value!r}, expected a positive whole number")
    return value


def _is_number(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)
            and abs(value) <= sys.float_info.max)  # neither inf, nor NaN, nor an int beyond both


def _positive(fields: dict, name: str, default: float, where: str) -> float:
    value = default if fields.get(name) is None else fields[name]
    if not _is_number(value) or value <= 0:
        raise InputError(f"{where}: {name} is {value!r}, expected a positive number")
    return float(value)


def _resample(fields: dict, where: str) -> int:
    """Pillow's number of a filter; 0 is one of them (nearest)."""
    value = fields.get("resample")
    value = int(Image.Resampling.BICUBIC) if value is None else value
    filters = [int(f) for f in Image.Resampling]
    if not isinstance(value, int) or isinstance(value, bool) or value not in filters:
        raise InputError(f"{where}: resample is {value!r}, expected one of {sorted(filters)}")
    return value


def _frame_tokens(fields: dict, where: str) -> int | None:
    capped = fields.get("cap_pixels_per_frame")
    if not isinstance(capped, bool | None):
        raise InputError(f"{where}: cap_pixels_per_frame is {capped!r}, expected true or false")
    return _whole(fields, "max_video_tokens", where, 768) if capped else None


def _limit(fields: dict, size: dict, name: str, edge: str, where: str) -> int:
    found = {**{name: size.get(edge, size.get(name))},
             **({name: fields[name]} if fields.get(name) is not None else {})}
    return _whole(found, name, f"{where}: size")


def _three(fields: dict, name: str, where: str, positive: bool = False) -> tuple[float, ...]:
    value = fields.get(name)
    if (not isinstance(value, list) or len(value) != 3
            or not all(_is_number(v) and (v > 0 or not positive) for v in value)):
        raise InputError(f"{where}: {name} is {value!r}, expected three "
                         f"{'positive ' * positive}numbers")
    return tuple(float(v) for v in value)


def with_limits(pixels: Pixels, min_pixels: int | None = None,
                max_pixels: int | None = None) -> Pixels:
    """`pixels` with other limits; one limit given alone takes the other along if they cross.
    Raises InputError if both are given and cross, or if one is too small for a token."""
    for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)):
        if value is not None and (not isinstance(value, int) or value < pixels.factor**2):
            raise InputError(f"{name} is {value!r}, expected at least {pixels.factor**2} (one "
                             f"token of {pixels.factor} x {pixels.factor} pixels)")
    if min_pixels is not None and max_pixels is not None and min_pixels > max_pixels:
        raise InputError(f"min_pixels is {min_pixels}, above max_pixels {max_pixels}")
    low = min(pixels.min_pixels, max_pixels or math.inf) if min_pixels is None else min_pixels
    high = max(pixels.max_pixels, min_pixels or 0) if max_pixels is None else max_pixels
    return dataclasses.replace(pixels, min_pixels=int(low), max_pixels=high)


def smart_resize(height: int, width: int, factor: int, low: int, high: int,
                 frames: int = 1, grouped: int = 1) -> tuple[int, int]:
    """The (height, width) closest to the given one, both multiples of `factor`, for which
    `grouped` x height x width lies between `low` and `high`.

    `frames` is the number of frames before they are paired, `grouped` after. Halves round to
    even. Raises InputError above an aspect ratio of 200. Source: HF `smart_resize` of
    `qwen2_vl` (pictures) and `qwen3_vl` (videos), which agree at one frame.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InputError(f"{width} x {height} pixels, one side is more than {MAX_ASPECT} times "
                         "the other")
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    if grouped * new_height * new_width > high:
        shrink = math.sqrt(frames * height * width / high)
        return (max(factor, math.floor(height / shrink / factor) * factor),
                max(factor, math.floor(width / shrink / factor) * factor))
    if grouped * new_height * new_width < low:
        grow = math.sqrt(low / (frames * height * width))
        return (math.ceil(height * grow / factor) * factor,
                math.ceil(width * grow / factor) * factor)
    return new_height, new_width


def image_grid(size: tuple[int, int], pixels: Pixels) -> Grid:
    """The grid of a picture of (width, height) `size`. Raises InputError."""
    width, height = size
    height, width = smart_resize(height, width, pixels.factor, pixels.min_pixels,
                                 pixels.max_pixels)
    return 1, height // pixels.patch_size, width // pixels.patch_size


@dataclasses.dataclass(frozen=True)
class VideoPlan:
    """Which frames of a video are read, at what size, and the time stamp of each pair."""

    video: Video
    indices: tuple[int, ...]  # rising, may repeat
    grid: Grid
    seconds: tuple[float, ...]  # [t] mean time of a temporal patch's first and last frame


def plan_video(video: Video, pixels: Pixels) -> VideoPlan:
    """Sample `video` and choose its size; reads no frame. Raises InputError.

    A single frame counts as two equal ones (HF refuses it). Source: HF
    `Qwen3VLVideoProcessor` and `Qwen3VLProcessor`, transformers 5.17.
    """
    count = int(video.frames / video.fps * pixels.fps)
    count = min(max(count, pixels.min_frames), pixels.max_frames, video.frames)
    indices = np.linspace(0, video.frames - 1, count).round().astype(int).tolist()
    group = pixels.temporal_patch_size
    if count < group:
        indices += indices[-1:] * (group - count)
    frames, (width, height) = len(indices), video.size
    if min(height, width) < pixels.factor:
        scale = max(pixels.factor / height, pixels.factor / width)
        height, width = int(height * scale), int(width * scale)
    high = pixels.max_pixels
    if pixels.frame_tokens is not None:
        cap = min(pixels.frame_tokens * pixels.factor**2, high // frames)
        high = max(cap, int(pixels.min_pixels * 1.05)) * frames
    try:
        height, width = smart_resize(height, width, pixels.factor, pixels.min_pixels, high,
                                     frames, round(frames / group) * group)
    except InputError as error:
        raise InputError(f"{video.name}: {error}") from None
    indices += indices[-1:] * (-frames % group)
    times = [index / video.fps for index in indices]
    seconds = [(times[i] + times[i + group - 1]) / 2 for i in range(0, len(times), group)]
    grid = len(seconds), height // pixels.patch_size, width // pixels.patch_size
    return VideoPlan(video, tuple(indices), grid, tuple(seconds))


def picture_of_image(source: Source, pixels: Pixels) -> Picture:
    """Read, resize and cut a picture. Raises InputError naming `source`."""
    image = load_image(source)
    try:
        grid = image_grid(image.size, pixels)
    except InputError as error:
        raise InputError(f"{source_name(source)}: {error}") from None
    frame = _resized(image, grid, pixels)
    frames = np.broadcast_to(frame, (pixels.temporal_patch_size, *frame.shape))
    return Picture(_patchify(frames, pixels), grid)


def picture_of_video(plan: VideoPlan, pixels: Pixels) -> Picture:
    """Read, resize and cut the planned frames, one at a time. Raises InputError."""
    _, rows, columns = plan.grid
    shape = (len(plan.indices), rows * pixels.patch_size, columns * pixels.patch_size, 3)
    frames = np.empty(shape, np.uint8)
    unique = sorted(set(plan.indices))
    at = 0
    for index, image in zip(unique, plan.video.read(unique), strict=True):
        if image.size != plan.video.size:
            raise InputError(f"{plan.video.name}: frame {index} has {image.size[0]} x "
                             f"{image.size[1]} pixels, the first one {plan.video.size[0]} x "
                             f"{plan.video.size[1]}")
        last = at + plan.indices.count(index)
        frames[at:last] = _resized(image, plan.grid, pixels)
        at = last
    return Picture(_patchify(frames, pixels), plan.grid)


def _resized(image: Image.Image, grid: Grid, pixels: Pixels) -> np.ndarray:
    """uint8 [height, width, 3]; the filter works on uint8 and rounds, as in HF's PIL class."""
    size = grid[2] * pixels.patch_size, grid[1] * pixels.patch_size
    return np.asarray(image.resize(size, Image.Resampling(pixels.resample)))


def _patchify(frames: np.ndarray, pixels: Pixels) -> np.ndarray:
    """f32 patch rows from uint8 frames [t * temporal, height, width, 3]."""
    group, patch, merge = pixels.temporal_patch_size, pixels.patch_size, pixels.merge_size
    count, height, width, channels = frames.shape
    blocks = frames.reshape(count // group, group, height // pixels.factor, merge, patch,
                            width // pixels.factor, merge, patch, channels)
    # -> (t, block row, block column, row, column, channel, frame, y, x)
    blocks = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    # A byte has 256 values: normalise those, in HF's order of roundings, and look the rest up.
    values = (np.arange(256, dtype=np.float64) * pixels.rescale).astype(np.float32)[:, None]
    table = (values - np.asarray(pixels.mean, np.float32)) / np.asarray(pixels.std, np.float32)
    rows = np.empty(blocks.shape, np.float32)
    for channel in range(channels):
        rows[:, :, :, :, :, channel] = table[:, channel][blocks[:, :, :, :, :, channel]]
    return rows.reshape(-1, channels * group * patch * patch)


def positions_3d(ids: np.ndarray, grids: Sequence[Grid],
                 config: TargetConfig) -> tuple[np.ndarray, int]:
    """Interleaved M-RoPE positions (i32 [3, T]) of `ids` (i32 [T]), and the rope delta.

    `grids` are in order of appearance; each of a video's t temporal patches is a run of pads of
    its own. Raises InputError if pads and grids do not match (R47). Source: HF
    `Qwen3_5Model.get_rope_index`.
    """
    pads = (ids == config.image_token_id) | (ids == config.video_token_id)
    where = np.flatnonzero(pads)  # [pads]
    merge = config.vision.spatial_merge_size if config.vision else 1
    runs = [(h // merge, w // merge) for t, h, w in grids for _ in range(t)]
    if len(where) != sum(h * w for h, w in runs):
        raise InputError(f"the prompt has {len(where)} picture tokens, its pictures have "
                         f"{sum(h * w for h, w in runs)}")
    pieces: list[np.ndarray] = []
    token, position, seen = 0, 0, 0
    for h, w in runs:
        start = int(where[seen])
        if where[seen + h * w - 1] - start != h * w - 1:
            raise InputError(f"picture tokens {start}.. are interrupted, expected a run of {h * w}")
        pieces.append(_text(position, start - token))
        position += start - token
        cells = np.indices((1, h, w)).reshape(3, -1)  # frame, row, column
        pieces.append(position + cells)
        position += max(h, w)
        token, seen = start + h * w, seen + h * w
    pieces.append(_text(position, len(ids) - token))
    positions = np.concatenate(pieces, axis=1).astype(np.int32)
    return positions, int(positions.max(initial=-1)) + 1 - len(ids)


def _text(position: int, count: int) -> np.ndarray:
    return np.broadcast_to(position + np.arange(count), (3, count))
