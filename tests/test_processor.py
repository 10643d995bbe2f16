"""Pictures and videos: decoding, resizing, patches and positions, against HF's PIL classes.
The file is long because every source of pixels is taken through all four steps.
"""

import base64
import dataclasses
import io
import itertools
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmflash_jax import images, processor
from mmflash_jax.config import PRESETS, TargetConfig
from mmflash_jax.images import InputError, load_image, load_video

CONFIG = PRESETS["qwen3.5-9b"]
HALF = (0.5, 0.5, 0.5)
IMAGE = processor.Pixels(16, 2, 2, 65536, 16777216, HALF, HALF, 1 / 255, 3)
VIDEO = dataclasses.replace(IMAGE, min_pixels=4096, max_pixels=25165824)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def arrow() -> Image.Image:
    """An arrow that points right and is not symmetric in any way."""
    image = np.full((48, 80, 3), 255, np.uint8)
    image[20:28, 8:60] = (200, 30, 30)
    for i in range(16):
        image[8 + i:40 - i, 56 + i] = (30, 30, 200)
    image[0:4, 0:6] = (0, 160, 0)
    return Image.fromarray(image)


def encoded(image: Image.Image, form: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def data_url(body: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(body).decode()}"


def same(a: Image.Image, b: Image.Image) -> bool:
    return a.mode == b.mode == "RGB" and np.array_equal(np.asarray(a), np.asarray(b))


# What a camera stores for each orientation so that the upright picture results.
STORED = {1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1],
          4: lambda a: a[::-1], 5: lambda a: a.transpose(1, 0, 2),
          6: lambda a: np.rot90(a, 1), 7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
          8: lambda a: np.rot90(a, -1)}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("form", ["PNG", "WEBP", "JPEG"])
def test_r35_exif_orientation(orientation, form, tmp_path):
    upright = np.asarray(arrow())
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](upright)))
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}
    body = encoded(stored, form, exif=exif, **options.get(form, {}))
    path = tmp_path / f"photo.{form.lower()}"
    path.write_bytes(body)
    for source in (path, str(path), body, data_url(body, f"image/{form.lower()}"),
                   Image.open(path)):
        got = np.asarray(load_image(source)).astype(int)
        assert got.shape == upright.shape
        assert np.abs(got - upright).max() <= (12 if form == "JPEG" else 0)


def test_r35_transparency_is_composited_on_white():
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (40, 50, 4), dtype=np.uint8)
    alpha = colours[..., 3:].astype(float) / 255
    expected = np.rint(colours[..., :3] * alpha + 255 * (1 - alpha))
    for form in ("PNG", "WEBP"):
        body = encoded(Image.fromarray(colours), form, **({"lossless": True, "exact": True}
                                                         if form == "WEBP" else {}))
        assert np.abs(np.asarray(load_image(body)) - expected).max() <= 1
    gray = load_image(encoded(Image.fromarray(colours[..., 2:], "LA"), "PNG"))
    assert np.abs(np.asarray(gray) - np.rint(
        colours[..., 2:3] * alpha + 255 * (1 - alpha))).max() <= 1


def test_r35_hidden_colours_of_transparent_areas_do_not_show():
    opaque = arrow()
    hidden = np.dstack([np.asarray(opaque), np.full((48, 80), 255, np.uint8)])
    background = (hidden[..., :3] == 255).all(-1)
    hidden[background] = (255, 0, 255, 0)
    image = Image.fromarray(hidden)
    assert same(load_image(encoded(image, "PNG")), opaque)
    palette = opaque.quantize(16)
    white = palette.getpixel((79, 47))
    body = encoded(palette, "PNG", transparency=white)
    assert same(load_image(body), palette.convert("RGB"))
    keyed = encoded(opaque, "PNG", transparency=(200, 30, 30))
    shown = np.asarray(load_image(keyed))
    assert not (shown == (200, 30, 30)).all(-1).any() and (shown == (30, 30, 200)).all(-1).any()


def test_r35_gray_pictures():
    gray = np.random.default_rng(1).integers(0, 256, (30, 44), dtype=np.uint8)
    expected = Image.fromarray(gray).convert("RGB")
    assert same(load_image(encoded(Image.fromarray(gray), "PNG")), expected)
    for wide in (gray.astype(np.uint16) * 257, gray.astype(np.uint16) << 8):
        assert same(load_image(encoded(Image.fromarray(wide), "PNG")), expected)
        assert same(load_image(encoded(Image.fromarray(wide), "TIFF")), expected)
        assert same(load_image(Image.fromarray(wide.astype(np.int32))), expected)
    bits = Image.fromarray(gray > 99).convert("1")
    assert same(load_image(encoded(bits, "PNG")), bits.convert("RGB"))
    with pytest.raises(InputError, match="16 bits"):
        load_image(Image.fromarray(np.full((4, 4), 70000, np.int32)))
    with pytest.raises(InputError, match="floating-point"):
        load_image(Image.fromarray(np.zeros((4, 4), np.float32)))


def test_r35_cmyk_jpeg():
    body = encoded(arrow().convert("CMYK"), "JPEG", quality=100, subsampling=0)
    got = np.asarray(load_image(body)).astype(int)
    assert np.abs(got - np.asarray(arrow())).max() <= 12


def test_path_bytes_and_url_give_one_picture(tmp_path):
    body = encoded(picture(70, 50), "JPEG")
    (tmp_path / "a.jpg").write_bytes(body)
    forms = [load_image(s) for s in (tmp_path / "a.jpg", body, data_url(body, "image/png"))]
    assert same(forms[0], forms[1]) and same(forms[0], forms[2])


def test_phone_photo_with_a_second_picture_inside():
    body = encoded(picture(64, 48), "MPO", save_all=True, append_images=[picture(32, 24)])
    assert load_image(body).size == (64, 48)


def test_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (20, 20), c) for c in ("red", "blue")]
    body = encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])
    assert same(load_image(body), frames[0])


PNG = encoded(picture(60, 40), "PNG")
BASE64 = base64.b64encode(PNG).decode()


@pytest.mark.parametrize("source", [
    b"", b"<!doctype html><html></html>", PNG[:len(PNG) // 2], PNG[:20], PNG[:8],
    encoded(picture(160, 140), "JPEG")[:2000], encoded(picture(160, 140), "WEBP")[:300],
    PNG[:60] + bytes(40) + PNG[100:],
    "data:image/png,abc", "data:image/png;base64", "data:image/png;base64,",
    "data:image/png;base64," + BASE64.replace("+", "%2B"),
    "data:image/png;base64," + BASE64.replace("+", "-").replace("/", "_"),
    "data:image/png;base64," + BASE64[:-1] + "é", "data:image/png;base64," + BASE64 + "\n\n",
    "data:image/png;base64," + BASE64[:-3], f"data:text/plain;base64,{BASE64}",
    "http://host/a.png", "https://host/a.png", "file:///a.png", "no/such/file.png", "x" * 9000,
    "nul\0byte", "new\nline.png"])
def test_r37_bad_pictures_are_refused_in_one_line(source):
    for read in (load_image, load_video):
        with pytest.raises(InputError) as error:
            read(source)
        message = str(error.value)
        assert "\n" not in message and len(message) < 500
        if isinstance(source, str) and len(source) < 100 and not source.startswith("data:"):
            assert repr(source)[1:-1] in message


def test_a_folder_is_no_picture(tmp_path):
    with pytest.raises(InputError, match="a folder, expected a file"):
        load_image(tmp_path)


def test_r37_html_named_png_names_the_file(tmp_path):
    path = tmp_path / "page.png"
    path.write_text("<html>not found</html>")
    with pytest.raises(InputError, match=r"page\.png: not a JPEG, PNG, WebP.*22 bytes"):
        load_image(path)


def test_wrong_media_type_of_a_valid_picture_is_accepted():
    assert load_image(data_url(PNG, "image/webp")).size == (60, 40)


def test_decompression_bomb_is_refused_from_its_header(monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 60 * 40 - 1)
    with pytest.raises(InputError, match="60 x 40 pixels, at most 2399"):
        load_image(PNG)
    with pytest.raises(InputError, match="at most 2399"):
        images.image_size(PNG)


# Patches ----------------------------------------------------------------------------------------


def hf_processor(pixels: processor.Pixels):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": pixels.min_pixels, "longest_edge": pixels.max_pixels},
        patch_size=pixels.patch_size, merge_size=pixels.merge_size,
        temporal_patch_size=pixels.temporal_patch_size, image_mean=list(pixels.mean),
        image_std=list(pixels.std))


ODD = dataclasses.replace(IMAGE, patch_size=14, min_pixels=3136, max_pixels=40000,
                          mean=(0.48, 0.45, 0.40), std=(0.26, 0.27, 0.28))


@pytest.mark.parametrize(("width", "height", "pixels"), [
    (500, 300, IMAGE), (256, 256, IMAGE), (33, 31, IMAGE), (16, 2000, IMAGE), (640, 480, ODD),
    (1, 1, ODD), (301, 207, dataclasses.replace(IMAGE, max_pixels=65536))])
def test_patches_equal_hf_bit_for_bit(width, height, pixels):
    source = picture(width, height, seed=width)
    got = processor.picture_of_image(source, pixels)
    hf = hf_processor(pixels)(images=[source])
    assert got.grid == tuple(hf["image_grid_thw"][0])
    assert got.grid == processor.image_grid(source.size, pixels)
    assert got.patches.dtype == np.float32
    assert np.array_equal(got.patches, hf["pixel_values"])


def test_r35_photo_with_every_defect_gives_the_upright_patches():
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = Image.fromarray(np.rot90(np.asarray(arrow()), 1)).convert("RGBA")
    body = encoded(stored, "PNG", exif=exif)
    got = processor.picture_of_image(body, IMAGE).patches
    assert np.array_equal(got, hf_processor(IMAGE)(images=[arrow()])["pixel_values"])


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 400), st.integers(0, 15))
def test_r47_sizes_equal_hf(height, width, low, octaves):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
    low, high = low * 1024, low * 1024 * 2**octaves
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InputError, match="200 times"):
            processor.smart_resize(height, width, 32, low, high)
    else:
        expected = smart_resize(height, width, 32, low, high)
        assert processor.smart_resize(height, width, 32, low, high) == expected
        turned = processor.smart_resize(width, height, 32, low, high)
        assert turned[::-1] == expected  # the count of tokens may be taken before turning


@pytest.mark.parametrize("size", [(4000, 3000), (8064, 6048)])
def test_r47_tokens_of_large_photos_equal_hf(size):
    width, height = size
    for pixels in (IMAGE, dataclasses.replace(IMAGE, max_pixels=1_000_000)):
        grid = processor.image_grid(size, pixels)
        assert grid[1] * grid[2] == hf_processor(pixels).get_number_of_image_patches(height, width)
        assert 64 <= grid[1] * grid[2] // 4 <= 16384


@pytest.mark.slow
def test_r47_photo_of_48_megapixels_is_read(tmp_path):
    path = tmp_path / "photo.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(8064, 6048).save(path, exif=exif)
    got = processor.picture_of_image(path, IMAGE)
    assert got.grid == (1, 294, 220)
    assert got.patches.shape == (294 * 220, 1536)


def test_limits():
    low = processor.with_limits(IMAGE, max_pixels=4096)
    assert (low.min_pixels, low.max_pixels) == (4096, 4096)
    high = processor.with_limits(low, min_pixels=8192)
    assert (high.min_pixels, high.max_pixels) == (8192, 8192)
    assert processor.with_limits(IMAGE) == IMAGE
    for limits, message in (((2048, 1024), "above"), ((None, 1023), "at least 1024"),
                            ((-5, None), "at least"), ((None, 3e6), "at least")):
        with pytest.raises(InputError, match=message):
            processor.with_limits(IMAGE, *limits)


# Settings ---------------------------------------------------------------------------------------

FIELDS = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
          "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
          "size": {"shortest_edge": 65536, "longest_edge": 16777216},
          "image_processor_type": "Qwen2VLImageProcessorFast"}


def write_json(path, fields):
    path.write_text(json.dumps(fields))


def test_settings_of_a_published_folder(tmp_path):
    write_json(tmp_path / "preprocessor_config.json", FIELDS)
    without = processor.read_settings(tmp_path, CONFIG)
    assert without == processor.Settings(IMAGE, VIDEO)
    size = {"shortest_edge": 4096, "longest_edge": 73728}
    write_json(tmp_path / "video_preprocessor_config.json", {**FIELDS, "size": size, "fps": 1})
    video = processor.read_settings(tmp_path, CONFIG).video
    assert (video.max_pixels, video.fps) == (73728, 1.0)
    both = {"image_processor": {**FIELDS, "max_pixels": 999424}, "video_processor": FIELDS}
    write_json(tmp_path / "processor_config.json", both)
    assert processor.read_settings(tmp_path, CONFIG).image.max_pixels == 999424
    assert processor.read_settings(tmp_path, CONFIG).video.max_pixels == 16777216


def test_settings_with_limits_named_as_pixels(tmp_path):
    own = {**FIELDS, "size": {"min_pixels": 2048, "max_pixels": 4096}}
    write_json(tmp_path / "preprocessor_config.json", own)
    image = processor.read_settings(tmp_path, CONFIG).image
    assert (image.min_pixels, image.max_pixels) == (2048, 4096)


@pytest.mark.parametrize(("change", "message"), [
    ({"patch_size": 14}, "patch_size is 14, the vision tower's is 16"),
    ({"patch_size": None}, "patch_size is None"), ({"merge_size": 1}, "merge_size is 1"),
    ({"size": {"shortest_edge": 1}}, "max_pixels is None"), ({"size": 448}, "size is 448"),
    ({"do_resize": False}, "do_resize is False"), ({"image_mean": 0.5}, "image_mean is 0.5"),
    ({"num_frames": 8}, "num_frames is 8")])
def test_settings_that_cannot_be_honoured_are_refused(change, message, tmp_path):
    write_json(tmp_path / "preprocessor_config.json", {**FIELDS, **change})
    with pytest.raises(InputError, match=message):
        processor.read_settings(tmp_path, CONFIG)


@pytest.mark.parametrize(("name", "value", "expected"), [
    *[(name, value, "three") for name in ("image_mean", "image_std")
      for value in (["a", 0.5, 0.5], [0.5, None, 0.5], [0.5, True, 0.5], [0.5] * 2, "abc",
                    [0.5, 0.5, float("nan")])],
    ("image_std", [0.5, 0, 0.5], "three positive"), ("image_std", [-0.5] * 3, "three positive"),
    *[(name, value, "a positive") for name in ("rescale_factor", "fps")
      for value in ("2", [2], 0, -1, True, float("inf"), 10**400)],
    *[(name, value, "a positive whole") for name in ("min_frames", "max_frames")
      for value in ("4", 4.0, 0, -4, True)],
    ("resample", "bicubic", "one of"), ("resample", 99, "one of"), ("resample", -1, "one of"),
    ("resample", True, "one of"), ("resample", 3.0, "one of"), ("resample", [3], "one of"),
    ("cap_pixels_per_frame", "no", "true or false")])
def test_settings_of_the_wrong_kind_name_field_and_value(name, value, expected, tmp_path):
    write_json(tmp_path / "preprocessor_config.json", {**FIELDS, name: value})
    with pytest.raises(InputError) as error:
        processor.read_settings(tmp_path, CONFIG)
    message = str(error.value)
    assert f"preprocessor_config.json: {name} is {value!r}, expected {expected}" in message
    assert "\n" not in message


def test_fewer_frames_at_most_than_at_least_are_refused(tmp_path):
    write_json(tmp_path / "preprocessor_config.json", {**FIELDS, "min_frames": 9, "max_frames": 8})
    with pytest.raises(InputError, match="min_frames is 9, above max_frames 8"):
        processor.read_settings(tmp_path, CONFIG)


def test_filter_number_zero_is_nearest_and_absence_is_bicubic(tmp_path):
    for change, filter_ in (({"resample": 0}, Image.Resampling.NEAREST), ({"resample": 1}, 1),
                            ({}, Image.Resampling.BICUBIC), ({"resample": None}, 3)):
        write_json(tmp_path / "preprocessor_config.json", {**FIELDS, **change})
        pixels = processor.read_settings(tmp_path, CONFIG).image
        assert pixels.resample == filter_
    pixels = dataclasses.replace(pixels, resample=0)
    black = Image.new("RGB", (300, 300))
    black.paste((255, 255, 255), (150, 0, 300, 300))
    patches = processor.picture_of_image(black, pixels).patches
    assert set(np.unique(patches)) == {-1.0, 1.0}  # no number in between


def test_settings_missing(tmp_path):
    with pytest.raises(InputError, match="preprocessor_config.json: missing"):
        processor.read_settings(tmp_path, CONFIG)


# Videos -----------------------------------------------------------------------------------------


def gray_frames(count: int, size=(64, 64)) -> list[Image.Image]:
    return [Image.new("RGB", size, (20 * i, 20 * i, 20 * i)) for i in range(count)]


def levels(result: processor.Picture) -> np.ndarray:
    """The gray value of each source frame, read back from the patches."""
    t, h, w = result.grid
    rows = result.patches.reshape(t, h * w, 3, 2, -1)
    assert (rows == rows[:, :1, :1, :, :1]).all()
    return np.rint((rows[:, 0, 0, :, 0] + 1) * 127.5).astype(int).ravel()


def test_folder_of_frames_in_natural_order(tmp_path):
    for i, frame in enumerate(gray_frames(11)):
        frame.save(tmp_path / f"frame{i}.png")
    (tmp_path / ".hidden").write_text("no frame")
    plan = processor.plan_video(load_video(tmp_path), VIDEO)
    assert plan.seconds == (0.25, 1.25, 2.25, 3.25, 4.25, 5.0)
    result = processor.picture_of_video(plan, VIDEO)
    assert result.grid == plan.grid == (6, 4, 4)
    assert levels(result).tolist() == [20 * i for i in range(11)] + [200]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_animation_as_video(form):
    frames = gray_frames(10)
    options = {"lossless": True} if form == "WEBP" else {}
    body = encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=100,
                   **options)
    video = load_video(body)
    assert (video.frames, video.fps, video.size) == (10, 10.0, (64, 64))
    plan = processor.plan_video(video, VIDEO)  # one second: the minimum of four frames
    assert plan.indices == (0, 3, 6, 9) and plan.seconds == (0.15, 0.75)
    assert levels(processor.picture_of_video(plan, VIDEO)).tolist() == [0, 60, 120, 180]


def test_a_still_picture_is_a_video_of_one_frame():
    plan = processor.plan_video(load_video(gray_frames(4)[3]), VIDEO)
    assert plan.indices == (0, 0) and plan.grid == (1, 4, 4)
    assert levels(processor.picture_of_video(plan, VIDEO)).tolist() == [60, 60]


def write_mp4(path, frames) -> bytes:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4000000
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        container.mux(stream.encode())
    return path.read_bytes()


def test_video_file(tmp_path):
    path = tmp_path / "clip.mp4"
    body = write_mp4(path, [np.full((64, 64, 3), 10 * i, np.uint8) for i in range(24)])
    for source in (path, body, data_url(body, "video/mp4")):
        video = load_video(source)
        assert (video.frames, video.fps, video.size) == (24, 8.0, (64, 64))
        plan = processor.plan_video(video, VIDEO)
        assert plan.indices == (0, 5, 9, 14, 18, 23)
        got = processor.picture_of_video(plan, VIDEO).patches.reshape(3, -1, 3, 2, 256)
        seen = (got.mean((1, 2, 4)).ravel() + 1) * 127.5
        assert np.abs(seen - [0, 50, 90, 140, 180, 230]).max() < 4
    path.write_bytes(body[:300])
    with pytest.raises(InputError, match=r"clip\.mp4: "):
        load_video(path)


def test_r35_video_of_a_turned_phone_is_upright(tmp_path):
    frame = np.zeros((64, 96, 3), np.uint8)
    frame[:, 48:] = 255
    body = bytearray(write_mp4(tmp_path / "clip.mp4", [frame] * 4))
    matrix = body.index(b"tkhd") + 44  # ISO 14496-12: version 0 of the track header
    turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 64 << 16, 0, 1 << 30)
    body[matrix:matrix + 36] = turned  # shown a quarter turn clockwise
    video = load_video(bytes(body))
    assert video.size == (64, 96)
    shown = np.asarray(next(video.read([0])).convert("L"))
    assert shown[:40].max() < 30 and shown[56:].min() > 225


def test_video_file_without_decoder_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"\0\0\0\x18ftypmp42")
    with pytest.raises(InputError, match=r"clip\.mp4: .*mmflash_jax\[video\]"):
        load_video(path)


def test_frames_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(InputError, match="folder without frames"):
        load_video(tmp_path)
    for i, frame in enumerate([*gray_frames(2), *gray_frames(3, (64, 32))]):
        frame.save(tmp_path / f"{i}.png")
    plan = processor.plan_video(load_video(tmp_path), VIDEO)
    with pytest.raises(InputError, match="frame 2 has 64 x 32 pixels, the first one 64 x 64"):
        processor.picture_of_video(plan, VIDEO)
    (tmp_path / "3.png").write_text("nothing")
    (tmp_path / "2.png").unlink()
    plan = processor.plan_video(load_video(tmp_path), VIDEO)
    with pytest.raises(InputError, match=r"3\.png: not a"):
        processor.picture_of_video(plan, VIDEO)


# Positions --------------------------------------------------------------------------------------

PAD, CLIP, START, END = 248056, 248057, 248053, 248054


def walked(ids, grids):
    """Positions by the rule's own words, a token at a time."""
    cells = [[(i, j) for i in range(h // 2) for j in range(w // 2)]
             for t, h, w in grids for _ in range(t)]
    sides = [max(h, w) // 2 for t, h, w in grids for _ in range(t)]
    out, now, k, run = [], 0, 0, 0
    for token in ids:
        if token in (PAD, CLIP):
            i, j = cells[run][k]
            out.append((now, now + i, now + j))
            k += 1
            if k == len(cells[run]):
                now, k, run = now + sides[run], 0, run + 1
        else:
            out.append((now, now, now))
            now += 1
    return np.array(out).T, now - len(ids)


@pytest.mark.parametrize("grids", list(itertools.permutations(
    [(1, 4, 6), (1, 8, 2), (3, 2, 4)])) + [[]])
def test_r6_positions_of_pictures_and_videos(grids):
    ids = [5, 6, 7]
    for t, h, w in grids:
        for frame in range(t):
            ids += [9] * frame + [START] + [CLIP if t > 1 else PAD] * (h * w // 4) + [END]
    ids += [8, 8]
    positions, delta = processor.positions_3d(np.array(ids), grids, CONFIG)
    expected, expected_delta = walked(ids, grids)
    assert positions.dtype == np.int32 and np.array_equal(positions, expected)
    assert delta == expected_delta


def test_r21_positions_after_an_image_of_1024_tokens():
    ids = np.array([1, START, *[PAD] * 1024, END, 2, 3])
    positions, delta = processor.positions_3d(ids, [(1, 64, 64)], CONFIG)
    assert positions[:, -1].tolist() == [2 + 32 + 2] * 3
    assert delta == 37 - len(ids)  # decoding goes on at 37, not at the count of tokens
    assert (len(ids) + delta) == positions.max() + 1


@pytest.mark.parametrize(("pads", "grids"), [(5, [(1, 4, 4)]), (4, []), (0, [(1, 4, 4)]),
                                             (4, [(1, 4, 4), (1, 2, 2)])])
def test_r47_pads_and_pictures_that_differ_are_refused(pads, grids):
    with pytest.raises(InputError, match=f"{pads} picture tokens"):
        processor.positions_3d(np.array([1, *[PAD] * pads, 2]), grids, CONFIG)


def test_r47_interrupted_pads_are_refused():
    with pytest.raises(InputError, match="interrupted"):
        processor.positions_3d(np.array([PAD, PAD, 1, PAD, PAD]), [(1, 4, 4)], CONFIG)


def test_text_of_a_target_without_vision():
    config: TargetConfig = dataclasses.replace(CONFIG, vision=None, image_token_id=None,
                                               video_token_id=None)
    positions, delta = processor.positions_3d(np.arange(5), [], config)
    assert positions.tolist() == [list(range(5))] * 3 and delta == 0
