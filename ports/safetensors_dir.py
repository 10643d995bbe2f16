"""A model folder of safetensors files, read lazily and checked before anything is loaded.

In: a folder with `model.safetensors`, or with an index `*.safetensors.index.json` whose
`weight_map` names the shards (any names). Out: which tensors there are, and their values bit for
bit; and the way back, shards and index of a size asked for. Knows neither models nor devices.

The `safetensors` library reports a broken file as "invalid header" without sizes, and maps a shard
as a whole, so that its pages count as resident; headers are therefore checked here, and values are
read tensor by tensor. Writing is the library's own.
"""

import dataclasses
import json
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ports import CheckpointError

SINGLE = "model.safetensors"
INDEX_ENDING = ".safetensors.index.json"
UNFINISHED = ".incomplete"  # in the names of half-downloaded files and half-written folders
MAX_HEADER = 100_000_000  # bytes; the library's own limit
CHUNK = 1 << 26  # bytes read at once

DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "C64": np.dtype(np.complex64),
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `count` numbers of `dtype` at byte `offset` of `file`."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


class SafetensorsDir:
    """The tensors of one checked folder; `tensors` maps a name to its `Tensor`."""

    def __init__(self, folder: Path, listing: str, tensors: dict[str, Tensor]):
        self.folder = folder
        self.listing = listing  # name of the index, or of the only file
        self.tensors = tensors

    def tensor(self, name: str) -> np.ndarray:
        """The tensor `name` as a read-only memory map, in its stored dtype."""
        entry = self.tensors[name]
        if not entry.nbytes:
            return np.empty(entry.shape, entry.dtype)
        start = entry.offset % mmap.ALLOCATIONGRANULARITY
        with open(entry.file, "rb") as file:
            pages = mmap.mmap(file.fileno(), start + entry.nbytes, access=mmap.ACCESS_READ,
                              offset=entry.offset - start)
        return np.frombuffer(pages, entry.dtype, entry.count, start).reshape(entry.shape)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Fill `out` (C-contiguous, as many elements) with tensor `name`, cast to its dtype.

        Reads instead of mapping: mapped pages would count as this process's memory.
        """
        entry = self.tensors[name]
        if out.size != entry.count or not out.flags.c_contiguous:
            raise ValueError(f"{name}: {entry.count} numbers do not fit {out.shape} in one piece")
        flat = out.reshape(-1)
        step = CHUNK // entry.dtype.itemsize
        with open(entry.file, "rb", buffering=0) as file:
            file.seek(entry.offset)
            for start in range(0, entry.count, step):
                piece = flat[start:start + step]
                same = piece.dtype == entry.dtype
                stored = piece if same else np.empty(piece.shape, entry.dtype)
                _fill(file, stored.view(np.uint8), entry.file)
                if not same:
                    piece[:] = stored.astype(piece.dtype)


def _fill(file: Any, raw: np.ndarray, path: Path) -> None:
    view = memoryview(raw)
    while len(view):
        got = file.readinto(view)
        if not got:
            raise CheckpointError(f"{path}: became shorter while it was read")
        view = view[got:]


def resolve(source: str | os.PathLike) -> Path:
    """The folder `source`, or the local snapshot of the hub id `source`. Raises CheckpointError."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{source}: is a file, expected a model folder or a hub id")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(source)):
        raise CheckpointError(f"{source}: no such folder")
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.tiktoken", "mask_embedding.pt"]
    try:
        return Path(snapshot_download(str(source), allow_patterns=wanted))
    except Exception as error:  # the hub raises many kinds, from many libraries
        first = (str(error).strip() or "no reason given").splitlines()[0]
        raise CheckpointError(f"{source}: no such folder, and no such model could be fetched from "
                              f"the hub ({type(error).__name__}: {first})") from None


def open_dir(folder: str | os.PathLike) -> SafetensorsDir:
    """Check every file of `folder`; read no tensor. Raises CheckpointError, all faults at once."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if UNFINISHED in folder.name:
        raise CheckpointError(f"{folder}: is what an interrupted conversion left, not a checkpoint")
    halves = sorted([*folder.glob(f"*{UNFINISHED}"),
                     *folder.glob(f".cache/huggingface/download/**/*{UNFINISHED}")])
    if halves:
        raise CheckpointError(f"{halves[0]}: an unfinished download lies in the folder; finish it "
                              "or delete it")
    index = _index(folder)
    if index is None:
        problems: list[str] = []
        tensors = _header(folder / SINGLE, problems)
        raise_all(folder, problems)
        return SafetensorsDir(folder, SINGLE, tensors)
    return SafetensorsDir(folder, index.name, _shards(folder, index))


def raise_all(folder: Path, problems: list[str], shown: int = 4) -> None:
    """Raise one CheckpointError of one line for all `problems`, if there are any."""
    if problems:
        rest = f"; and {len(problems) - shown} more problems" if len(problems) > shown else ""
        raise CheckpointError(f"{folder}: " + "; ".join(problems[:shown]) + rest)


def _index(folder: Path) -> Path | None:
    """The index of `folder`, or None if it holds one single file."""
    indexes = sorted(folder.glob(f"*{INDEX_ENDING}"))
    single = folder / SINGLE
    there = single.exists() or single.is_symlink()
    if len(indexes) > 1 or (indexes and there and SINGLE not in _weight_map(indexes[0]).values()):
        names = [p.name for p in indexes] + [SINGLE] * there
        raise CheckpointError(f"{folder}: holds {' and '.join(names)}, expected one of them")
    if indexes:
        return indexes[0]
    if not there:
        others = sorted(p.name for p in folder.iterdir()
                        if p.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf"))
        raise CheckpointError(f"{folder}: holds neither {SINGLE} nor *{INDEX_ENDING}"
                              + (f" (only {', '.join(others[:3])})" if others else ""))
    return None


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard name. `metadata` (with a `total_size` that may be a float) is unused."""
    try:
        value = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"{index}: {_not_json(index, error)}") from None
    weights = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{index}: `weight_map` is missing or empty")
    for name, shard in weights.items():
        parts = PurePosixPath(shard).parts if isinstance(shard, str) else ()
        # judged by name: the hub's cache links every file to one outside the folder
        if (not parts or ".." in parts or parts[0] == "/" or "\\" in shard
                or PureWindowsPath(shard).drive or "\0" in shard):
            raise CheckpointError(f"{index}: {name} is said to lie in {shard!r}, which is no file "
                                  "of this folder")
    return weights


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} is named twice")
        found[key] = value
    return found


def _not_json(path: Path, error: Exception) -> str:
    """Why `path`, which should hold JSON, does not."""
    if path.is_file() and path.stat().st_size == 0:
        return "is empty (0 bytes)"
    return _pointer(path) or f"not readable as JSON ({error})"


def _pointer(path: Path) -> str | None:
    """The complaint about a git-LFS pointer, or None."""
    size = path.stat().st_size if path.is_file() else 0
    if not 0 < size < 1024:
        return None
    text = path.read_bytes()
    if not text.startswith(b"version https://git-lfs"):
        return None
    real = re.search(rb"^size (\d+)$", text, re.MULTILINE)
    wants = f"{real[1].decode()} bytes" if real else "the file itself"
    return f"is a git-LFS pointer of {size} bytes, expected {wants}"


def _shards(folder: Path, index: Path) -> dict[str, Tensor]:
    weights = _weight_map(index)
    problems: list[str] = []
    found: dict[str, Tensor] = {}
    broken = set()
    for shard in sorted(set(weights.values())):
        before = len(problems)
        for name, entry in _header(folder / shard, problems).items():
            if name in found:
                problems.append(f"{name} lies twice, in {found[name].file.name} and in {shard}")
            elif name not in weights:
                problems.append(f"{shard}: holds {name}, which {index.name} does not name")
            elif weights[name] != shard:
                problems.append(f"{shard}: holds {name}, which {index.name} says lies in "
                                f"{weights[name]}")
            found.setdefault(name, entry)
        if len(problems) > before:
            broken.add(shard)
    problems += [f"{shard}: does not hold {name}, which {index.name} says lies there"
                 for name, shard in weights.items() if name not in found and shard not in broken]
    raise_all(folder, problems)
    return found


def _header(path: Path, problems: list[str]) -> dict[str, Tensor]:
    """The tensors of one file; faults are added to `problems` and give an empty answer."""
    try:
        header, start, size = _raw_header(path)
        return _entries(path, header, start, size)
    except CheckpointError as error:
        problems.append(f"{path.name}: {error}")
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")
    return {}


def _raw_header(path: Path) -> tuple[dict, int, int]:
    """Header, first byte of the data and size of the file."""
    if not path.is_file():
        raise CheckpointError("no such file in the folder")
    size = path.stat().st_size
    if size == 0:
        raise CheckpointError("is empty (0 bytes)")
    if complaint := _pointer(path):
        raise CheckpointError(complaint)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > MAX_HEADER or 8 + length > size:
            raise CheckpointError(f"states a header of {length} bytes, but the file has {size} "
                                  f"bytes (and {MAX_HEADER} is the most allowed)")
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"header is not readable as JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"header is a JSON {type(header).__name__}, expected an object")
    return header, 8 + length, size


def _entries(path: Path, header: dict, start: int, size: int) -> dict[str, Tensor]:
    """Header entries as `Tensor`s: their bytes must cover the data exactly, in any order."""
    header.pop("__metadata__", None)
    spans, tensors = [], {}
    for name, entry in header.items():
        try:
            kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(f"{name}: header entry {entry!r} lacks dtype, shape or "
                                  "data_offsets") from None
        if kind not in DTYPES:
            raise CheckpointError(f"{name}: dtype {kind!r} is not known")
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise CheckpointError(f"{name}: shape {list(shape)} or data_offsets {[begin, end]} "
                                  "is not made of whole numbers from 0")
        tensor = Tensor(path, DTYPES[kind], shape, start + begin)
        if tensor.nbytes != end - begin:
            raise CheckpointError(f"{name}: {kind} {list(shape)} takes {tensor.nbytes} bytes, "
                                  f"data_offsets give {end - begin}")
        spans.append((begin, end, name))
        tensors[name] = tensor
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            fault = "overlaps the tensor before it" if begin < reached else "leaves a gap before it"
            raise CheckpointError(f"{name}: begins at data byte {begin}, expected {reached} "
                                  f"({fault})")
        reached = end
    if start + reached != size:
        raise CheckpointError(f"has {size} bytes, expected {start + reached} from its header "
                              f"({'truncated' if size < start + reached else 'surplus bytes'})")
    return tensors


def plan_shards(sizes: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    """Split tensors (name, bytes), in order, into shards of at most `limit` bytes (or one)."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, nbytes in sizes:
        if shards[-1] and held + nbytes > limit:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes
    return shards


def write_shards(tensors: Iterator[tuple[str, np.ndarray]], shards: list[list[str]],
                 folder: Path) -> None:
    """Write `tensors`, which come in the order of `shards`; then the index, if there are several.

    Holds one shard at a time. The files carry the metadata that HF's loader asks for.
    """
    many = len(shards) > 1
    weight_map, total = {}, 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if many else SINGLE
        held = {}
        for expected in names:
            name, value = next(tensors)
            if name != expected:
                raise ValueError(f"{name} came where {expected} was planned")
            held[name] = np.ascontiguousarray(value).reshape(value.shape)
            weight_map[name] = file
            total += value.nbytes
        save_file(held, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # the library makes it private
        del held
    if many:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"model{INDEX_ENDING}").write_text(json.dumps(index, indent=2) + "\n")
