"""`mask_embedding.pt` of a drafter folder: the trained embedding of the mask token.

A torch file (zip with a pickle), read and written without torch. The pickle is not executed: only
the few names that a saved tensor needs are known, any other is refused. Layout of the dict as in
SGLang: `embedding` [H], `mask_token_id`, optional `per_position` (refused).
"""

import collections
import io
import math
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ports import CheckpointError

FILE = "mask_embedding.pt"
STORAGES = {
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16), "HalfStorage": np.dtype(np.float16),
    "FloatStorage": np.dtype(np.float32), "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
}
STORAGE_NAMES = {dtype: name for name, dtype in STORAGES.items()}


def read_mask_embedding(folder: Path, hidden_size: int, mask_token_id: int) -> np.ndarray | None:
    """The embedding [H] in its stored dtype, or None if the folder has none.

    Raises CheckpointError if the file is broken or does not fit the config.
    """
    path = folder / FILE
    if not path.exists():
        return None
    found = _load(path)
    if not isinstance(found, dict) or "embedding" not in found:
        raise CheckpointError(f"{path}: expected a dict with `embedding` and `mask_token_id`")
    if found.get("per_position") is not None:
        raise CheckpointError(f"{path}: has `per_position` embeddings, which are not supported")
    unknown = set(found) - {"embedding", "mask_token_id", "per_position"}
    if unknown:
        raise CheckpointError(f"{path}: has {sorted(map(str, unknown))}, which are not known")
    token = found.get("mask_token_id")
    token = token.item() if isinstance(token, np.ndarray) and token.size == 1 else token
    if token != mask_token_id:
        raise CheckpointError(f"{path}: mask_token_id is {token}, in the config {mask_token_id}")
    embedding = found["embedding"]
    if not isinstance(embedding, np.ndarray) or embedding.shape != (hidden_size,):
        shape = getattr(embedding, "shape", type(embedding).__name__)
        raise CheckpointError(f"{path}: embedding has shape {shape}, expected ({hidden_size},)")
    if embedding.dtype.kind == "i":
        raise CheckpointError(f"{path}: embedding is {embedding.dtype}, expected BF16, F16 or F32")
    return embedding


def write_mask_embedding(folder: Path, embedding: np.ndarray, mask_token_id: int) -> None:
    """Write the file so that `torch.load` gives {embedding, mask_token_id}."""
    data = np.ascontiguousarray(embedding)
    with zipfile.ZipFile(folder / FILE, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("mask_embedding/data.pkl", _pickled(data, mask_token_id))
        archive.writestr("mask_embedding/byteorder", "little")
        archive.writestr("mask_embedding/data/0", data.tobytes())
        archive.writestr("mask_embedding/version", "3\n")


def _pickled(data: np.ndarray, token: int) -> bytes:
    """{embedding: tensor, mask_token_id: token} in pickle's protocol 2, as torch writes it."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    storage = (b"(" + text("storage") + b"ctorch\n" + STORAGE_NAMES[data.dtype].encode() + b"\n"
               + text("0") + text("cpu") + number(data.size) + b"tQ")
    tensor = (b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(0)
              + number(data.size) + b"\x85" + number(1) + b"\x85" + b"\x89"
              + b"ccollections\nOrderedDict\n)R" + b"tR")
    return (b"\x80\x02}(" + text("embedding") + tensor + text("mask_token_id") + number(token)
            + b"u.")


class _Reader(pickle.Unpickler):
    """Unpickles tensors as NumPy arrays; finds no class or function but its own."""

    def __init__(self, raw: bytes, archive: zipfile.ZipFile, root: str):
        super().__init__(io.BytesIO(raw))
        self.archive, self.root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        known = {("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
                 ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
                 ("collections", "OrderedDict"): collections.OrderedDict}
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in this file")
        return known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, np.dtype) or not str(key).isalnum():
            raise pickle.UnpicklingError(f"{pid!r} is no tensor storage")
        raw = self.archive.read(f"{self.root}data/{key}")
        if len(raw) != count * dtype.itemsize:
            raise pickle.UnpicklingError(f"storage {key} has {len(raw)} bytes, expected "
                                         f"{count * dtype.itemsize}")
        return np.frombuffer(raw, dtype)


def _rebuild_tensor(storage: np.ndarray, offset: int, size: tuple, stride: tuple,
                    *_: Any) -> np.ndarray:
    expected = tuple(math.prod(size[i + 1:]) for i in range(len(size)))
    if tuple(stride) != expected and 1 not in size:
        raise pickle.UnpicklingError(f"tensor of strides {stride}, expected {expected}")
    return storage[offset:offset + math.prod(size)].reshape(size)


def _load(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [n for n in archive.namelist() if n.count("/") == 1
                       and n.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise CheckpointError(f"{path}: is no torch file (no data.pkl in it)")
            root = pickles[0].removesuffix("data.pkl")
            if f"{root}byteorder" in archive.namelist():
                order = archive.read(f"{root}byteorder").decode()
                if order != "little":
                    raise CheckpointError(f"{path}: byte order is {order}, expected little")
            return _Reader(archive.read(pickles[0]), archive, root).load()
    except CheckpointError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise CheckpointError(f"{path}: cannot be read as a torch file of one zip archive "
                              f"({type(error).__name__}: {error})") from None
