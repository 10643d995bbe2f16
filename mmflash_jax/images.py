"""Pictures and videos as upright, opaque RGB Pillow images.

In: a path, encoded bytes, a `data:` URL or a Pillow image; for a video also a folder of frames.
Out: RGB images with EXIF orientation applied and transparency composited on white (R35).
Refuses, with one line naming the source: anything broken, truncated or empty, lenient base64,
and every address with a scheme other than `data:`. It knows nothing of patches or of models.
"""

import base64
import binascii
import dataclasses
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # JPEG includes phones' MPO
MAX_PIXELS = 2**27  # 134 megapixels: guards against decompression bombs
FOLDER_FPS = 2.0  # a folder of frames carries no rate; 2 is the rate at which videos are sampled

Source = str | Path | bytes | Image.Image

# What undoes each EXIF orientation (EXIF 2.3, tag 0x0112; 1 is upright).
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90}


class InputError(ValueError):
    """Input that cannot be used; the message is one line that names it and says why."""


def source_name(source: Source) -> str:
    """A short name of `source` for messages, always on one line."""
    if isinstance(source, Image.Image):
        return f"picture of {source.width} x {source.height} pixels"
    if isinstance(source, bytes):
        return f"picture of {len(source)} bytes"
    text = str(source)
    if text[:5].lower() == "data:":
        return f"data: URL of {len(text)} characters"
    return repr(text)[1:-1] if len(text) <= 200 else f"{text[:60]!r}..."


def _encoded(source: str | Path | bytes, kind: str) -> tuple[Path | io.BytesIO, int]:
    """Where to decode `source` from, and its size in bytes. `kind`: "image" or "video"."""
    name = source_name(source)
    if isinstance(source, str) and source[:5].lower() == "data:":
        source = _data_url(source, kind)
    elif isinstance(source, str) and (scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", source)):
        raise InputError(f"{name}: {scheme[1]} addresses are not fetched; give a file or a data: "
                         "URL")
    if isinstance(source, bytes):
        if not source:
            raise InputError(f"{name}: empty (0 bytes)")
        return io.BytesIO(source), len(source)
    path = Path(source)
    try:
        if path.is_dir():
            raise InputError(f"{name}: a folder, expected a file")
        size = path.stat().st_size
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{name}: {reason.lower()}") from None
    if not size:
        raise InputError(f"{name}: empty (0 bytes)")
    return path, size


def _data_url(url: str, kind: str) -> bytes:
    """The bytes of a base64 `data:` URL (RFC 2397, RFC 4648 alphabet, padding needed; R37)."""
    name = source_name(url)
    head, comma, body = url[5:].partition(",")
    mime, *parameters = head.split(";")
    if not comma or not parameters or parameters[-1].strip().lower() != "base64":
        raise InputError(f"{name}: not of the form data:{kind}/...;base64,...")
    if not mime.lower().startswith((f"{kind}/", "image/")):
        raise InputError(f"{name}: media type {mime[:40]!r}, expected {kind}/...")
    try:
        return base64.b64decode(body.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise InputError(f"{name}: not valid base64 (RFC 4648, padded, not percent-encoded)"
                         ) from None


def _open(source: Source) -> Image.Image:
    """An image with its header read, pixels not. Raises InputError."""
    name = source_name(source)
    if isinstance(source, Image.Image):
        image = source
    else:
        where, size = _encoded(source, "image")
        try:
            image = Image.open(where, formats=FORMATS)
        except Image.UnidentifiedImageError:
            raise InputError(f"{name}: not a JPEG, PNG, WebP, GIF, BMP or TIFF picture ({size} "
                             "bytes)") from None
        except Exception as error:  # decoders raise nearly anything on broken headers
            raise InputError(f"{name}: broken picture ({_line(error)})") from None
    if not image.width or not image.height:
        raise InputError(f"{name}: {image.width} x {image.height} pixels, expected at least one")
    if image.width * image.height > MAX_PIXELS:
        raise InputError(f"{name}: {image.width} x {image.height} pixels, at most {MAX_PIXELS} "
                         "are accepted")
    return image


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def image_size(source: Source) -> tuple[int, int]:
    """(width, height) as stored, from the header alone; not turned by EXIF. Raises InputError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's notes on odd headers; bombs are checked in _open
        image = _open(source)
    size = image.size
    if image is not source:
        image.close()
    return size


def load_image(source: Source) -> Image.Image:
    """The picture as an upright, opaque RGB image.

    EXIF orientation is applied, transparency composited on white, 16-bit gray cut to its high
    byte (as Pillow does for 16-bit colour); of an animation, the first frame. Raises InputError.
    """
    name = source_name(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(source)
        try:
            image.load()
            return _upright(_opaque(image), _orientation(image))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        except Exception as error:  # decoders raise nearly anything on broken data
            raise InputError(f"{name}: broken picture ({_line(error)})") from None
        finally:
            if image is not source:
                image.close()


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(0x0112, 1)
    except Exception:  # unreadable EXIF says nothing about the pixels
        return 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    turn = _TURNS.get(orientation)
    return image if turn is None else image.transpose(turn)


def _opaque(image: Image.Image) -> Image.Image:
    """RGB of any mode, on white. The result never shares pixels with `image`."""
    if image.mode.startswith("I"):
        return _high_byte(image)
    if image.mode == "F":
        raise InputError("floating-point pixels have no agreed range, expected 8 or 16 bits")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        colours = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(colours, mask=colours.getchannel("A"))
        return white
    return image.copy() if image.mode == "RGB" else image.convert("RGB")


def _high_byte(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)  # [height, width]
    if values.min() < 0 or values.max() > 0xFFFF:
        raise InputError(f"gray values from {values.min()} to {values.max()}, expected 16 bits")
    gray = (values >> 8).astype(np.uint8)
    if isinstance(image.info.get("transparency"), int):
        gray[values == image.info["transparency"]] = 255
    return Image.fromarray(gray).convert("RGB")


@dataclasses.dataclass(frozen=True)
class Video:
    """An opened video: what its header says, and how to read chosen frames in rising order."""

    name: str
    frames: int
    fps: float
    size: tuple[int, int]  # upright (width, height)
    read: Callable[[Sequence[int]], Iterator[Image.Image]]


def load_video(source: Source, folder_fps: float = FOLDER_FPS) -> Video:
    """Open a folder of frames, an animated GIF, WebP or PNG, or a video file.

    A folder's pictures are taken in natural order (frame2 before frame10) at `folder_fps`; an
    animation's rate is its mean one. Other files are decoded by PyAV, which the extra `video`
    installs. Frames are read later, one at a time. Raises InputError.
    """
    name = source_name(source)
    if isinstance(source, str | Path) and _is_folder(source):
        return _frame_folder(Path(source), folder_fps)
    if isinstance(source, Image.Image):
        return _animation(name, source)
    where, _ = _encoded(source, "video")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _animation(name, Image.open(where, formats=FORMATS))
    except InputError:
        raise
    except Image.UnidentifiedImageError:
        return _video_file(name, where)
    except Exception as error:
        raise InputError(f"{name}: broken picture ({_line(error)})") from None


def _is_folder(source: str | Path) -> bool:
    try:
        return Path(source).is_dir()
    except (OSError, ValueError):  # too long or holding a zero byte: no file either
        return False


def _natural(path: Path) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part)
            for part in re.split(r"(\d+)", path.name) if part]


def _frame_folder(folder: Path, fps: float) -> Video:
    name = source_name(folder)
    paths = sorted((p for p in folder.iterdir() if not p.name.startswith(".")), key=_natural)
    if not paths:
        raise InputError(f"{name}: a folder without frames")
    if not fps > 0:
        raise InputError(f"{name}: {fps} frames a second, expected more than 0")

    def read(indices: Sequence[int]) -> Iterator[Image.Image]:
        return (load_image(paths[i]) for i in indices)

    return Video(name, len(paths), float(fps), load_image(paths[0]).size, read)


def _animation(name: str, image: Image.Image) -> Video:
    if image.width * image.height > MAX_PIXELS:
        raise InputError(f"{name}: {image.width} x {image.height} pixels, at most {MAX_PIXELS} "
                         "are accepted")
    count, milliseconds = 0, 0.0
    for frame in ImageSequence.Iterator(image):
        frame.load()  # WebP knows a frame's duration once it is decoded
        milliseconds += frame.info.get("duration") or 100  # browsers show 0 as a tenth of a second
        count += 1

    def read(indices: Sequence[int]) -> Iterator[Image.Image]:
        for index in indices:
            image.seek(index)
            image.load()
            yield _opaque(image)

    return Video(name, count, 1000 * count / milliseconds, image.size, read)


def _video_file(name: str, where: Path | io.BytesIO) -> Video:
    try:
        import av
    except ImportError:
        raise InputError(f"{name}: reading video files needs PyAV (pip install "
                         "'mmflash_jax[video]'); a folder of frames or a GIF works without"
                         ) from None

    def stream_of(container: Any) -> Any:
        if not container.streams.video:
            raise InputError(f"{name}: has no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        return stream

    def opened() -> Any:
        if isinstance(where, io.BytesIO):
            where.seek(0)
        return av.open(where if isinstance(where, io.BytesIO) else str(where))

    def frames(indices: Sequence[int]) -> Iterator[Image.Image]:
        wanted = list(indices)
        with opened() as container:
            for index, frame in enumerate(container.decode(stream_of(container))):
                while wanted and wanted[0] == index:
                    wanted.pop(0)
                    image = frame.to_image()
                    turn = round(getattr(frame, "rotation", 0)) % 360  # counter-clockwise
                    yield image.rotate(turn, expand=True) if turn else image
                if not wanted:
                    return
        raise InputError(f"{name}: truncated, frame {wanted[0]} is missing")

    def read(indices: Sequence[int]) -> Iterator[Image.Image]:
        try:
            yield from frames(indices)
        except av.FFmpegError as error:
            raise InputError(f"{name}: broken video ({_line(error)})") from None

    try:
        with opened() as container:
            stream = stream_of(container)
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            stored = stream.frames
            packets = [p.is_discard for p in container.demux(stream) if p.size]
    except av.FFmpegError as error:
        raise InputError(f"{name}: neither a picture nor a video ({_line(error)})") from None
    if not packets or len(packets) < stored or rate <= 0:
        raise InputError(f"{name}: broken video ({len(packets)} of {stored} frames, {rate:g} "
                         "frames a second)")
    return Video(name, packets.count(False), rate, next(read([0])).size, read)
