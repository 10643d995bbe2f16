"""One table for both directions: a parameter of the runtime form <-> the HF tensors it is made of.

A `Leaf` is one parameter; its `parts` are HF tensors, laid one below the other (each first
reshaped to rows of the leaf's width). Loading, saving, checking and random weights all walk the
same table. Knows no model: the tables are in `qwen35.py` and `dflash.py`.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ports import CheckpointError
from ports.safetensors_dir import SAFETENSORS_NAMES, SafetensorsDir, Tensor, raise_all

READERS = 6  # threads
READ_AHEAD = 1 << 30  # bytes of host memory read and not yet handed over
PUT_AHEAD = 1 << 29  # bytes of host memory handed over and not yet on the device
WEIGHT_DTYPES = tuple(np.dtype(d) for d in (ml_dtypes.bfloat16, np.float16, np.float32))
PACKED_ENDINGS = ("_scale_inv", "weight_packed", "weight_scale", "weight_scale_2",
                  "weight_zero_point", "weight_shape", "weight_g_idx", "qweight", "qzeros",
                  ".scales", ".g_idx", ".absmax", ".quant_map", "input_scale")
BUFFER_ENDINGS = ("inv_freq", "cos_cached", "sin_cached")

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
Place = Callable[[tuple[str, ...], tuple[int, ...]], Any]  # (path, shape) -> device or sharding


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its path in the tree, its shape, the HF (name, shape) it is made of.

    `init` says how a random one is drawn (`random_params.py`). `keep`: it comes to the device in
    the dtype stored, whatever dtype the run has.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    init: str = "matrix"
    keep: bool = False

    def rows(self) -> Iterator[tuple[str, tuple[int, ...], slice]]:
        """(HF name, HF shape, its rows of the parameter) for each part."""
        width, start = math.prod(self.shape[1:]), 0
        for name, shape in self.parts:
            stop = start + math.prod(shape) // width
            yield name, shape, slice(start, stop)
            start = stop
        if start != self.shape[0]:
            raise ValueError(f"{'/'.join(self.path)}: parts have {start} rows of {self.shape[0]}")


Table = tuple[Leaf, ...]


def stack(path: tuple[str, ...], parts: Iterable[tuple[str, tuple[int, ...]]], **how) -> Leaf:
    """A leaf whose parts are fused by rows, all of one width."""
    parts = tuple(parts)
    return Leaf(path, (sum(s[0] for _, s in parts), *parts[0][1][1:]), parts, **how)


def tree(pairs: Iterable[tuple[tuple[str, ...], Any]]) -> dict:
    """Nested dicts from (path, value)."""
    root: dict = {}
    for path, value in pairs:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return root


def flat(params: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of every leaf of nested dicts."""
    for key, value in params.items():
        if isinstance(value, dict):
            yield from flat(value, (*path, key))
        else:
            yield (*path, key), value


def dtype_of(dtype: Any) -> np.dtype | None:
    """`dtype` ("bfloat16", jnp.float32, ...) as a NumPy dtype; None stays None (as stored)."""
    if dtype is None:
        return None
    known = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    if known not in WEIGHT_DTYPES:
        raise CheckpointError(f"weights cannot be loaded as {known}, expected bfloat16 or float32")
    return known


# --- from files -----------------------------------------------------------------------------------

class Source:
    """The tensors of a folder under the names of a table, checked against it.

    `rename` turns a stored name into the table's (prefixes differ between classes); `absent`
    names groups (first words of paths) that may be missing as a whole.
    """

    def __init__(self, files: SafetensorsDir, table: Table, rename: Callable[[str], str] = str,
                 absent: Iterable[str] = (), ignored: Iterable[str] = ()):
        self.files = files
        self.stored: dict[str, str] = {}  # table's name -> stored name
        problems: list[str] = []
        for name, entry in files.tensors.items():
            if self.stored.setdefault(rename(name), name) != name:
                problems.append(f"{entry.file.name}: {name} and {self.stored[rename(name)]} are "
                                "the same parameter")
        self.table = tuple(leaf for leaf in table if not self._left_out(leaf, table, absent))
        problems += _check(files, self.table, self.stored, frozenset(ignored))
        raise_all(files.folder, problems)

    def _left_out(self, leaf: Leaf, table: Table, absent: Iterable[str]) -> bool:
        group = leaf.path[0]
        return group in absent and not any(
            name in self.stored for other in table if other.path[0] == group
            for name, _ in other.parts)

    def entry(self, name: str) -> Tensor:
        return self.files.tensors[self.stored[name]]

    def dtype(self, leaf: Leaf, dtype: np.dtype | None) -> np.dtype:
        """The dtype in which `leaf` is loaded in a run of `dtype` (None: as stored)."""
        kinds = [self.entry(name).dtype for name, _ in leaf.parts]
        if dtype is not None and not leaf.keep:
            return dtype
        if len(set(kinds)) > 1:
            raise CheckpointError(
                f"{self.files.folder}: {leaf.parts[0][0]} is {SAFETENSORS_NAMES[kinds[0]]} and "
                f"{leaf.parts[-1][0]} is {SAFETENSORS_NAMES[kinds[-1]]}, expected one dtype, since "
                "they are fused")
        return kinds[0]

    def read(self, leaf: Leaf, dtype: np.dtype | None) -> np.ndarray:
        """`leaf` in host memory: one buffer, each part read to its rows."""
        out = np.empty(leaf.shape, self.dtype(leaf, dtype))
        for name, _, rows in leaf.rows():
            self.files.read_into(self.stored[name], out[rows])
        return out

    def nbytes(self, leaf: Leaf, dtype: np.dtype | None) -> int:
        return math.prod(leaf.shape) * self.dtype(leaf, dtype).itemsize


def _check(files: SafetensorsDir, table: Table, stored: dict[str, str],
           ignored: frozenset[str]) -> list[str]:
    """What is wrong with the stored tensors, for a model whose parameters are `table`."""
    wanted = {name: shape for leaf in table for name, shape in leaf.parts}
    problems = []
    surplus = [s for name, s in stored.items() if name not in wanted and name not in ignored
               and not s.endswith(BUFFER_ENDINGS)]
    packed = [s for s in surplus if s.endswith(PACKED_ENDINGS)]
    packed += [s for name, s in stored.items() if name in wanted and (
        files.tensors[s].dtype.itemsize == 1 or files.tensors[s].dtype.kind in "iu")]
    if packed:
        entry = files.tensors[packed[0]]
        return [f"{entry.file.name}: {packed[0]} ({SAFETENSORS_NAMES[entry.dtype]}) belongs to "
                f"quantised weights ({len(packed)} such tensors); only BF16, F16 and F32 weights "
                "are supported"]
    missing = [name for name in wanted if name not in stored]
    if missing:
        problems.append(f"{files.listing}: {missing[0]} is missing"
                        + (f" ({len(missing)} tensors are missing)" if missing[1:] else ""))
    if surplus:
        problems.append(f"{files.tensors[surplus[0]].file.name}: {surplus[0]} is surplus, the "
                        "config has no such parameter"
                        + (f" ({len(surplus)} tensors are surplus)" if surplus[1:] else ""))
    for name, shape in wanted.items():
        if name not in stored:
            continue
        entry = files.tensors[stored[name]]
        if entry.shape != shape:
            problems.append(f"{entry.file.name}: {stored[name]} has shape {list(entry.shape)}, "
                            f"expected {list(shape)}")
        if entry.dtype not in WEIGHT_DTYPES:
            problems.append(f"{entry.file.name}: {stored[name]} is "
                            f"{SAFETENSORS_NAMES[entry.dtype]}, expected BF16, F16 or F32")
    return problems


def read_ahead(jobs: Iterable[Any], nbytes: Callable[[Any], int], read: Callable[[Any], Any],
               readers: int = READERS) -> Iterator[tuple[Any, Any]]:
    """(job, read(job)) in order, read by threads at most READ_AHEAD bytes (or one job) ahead."""
    waiting: collections.deque[tuple[Any, Future]] = collections.deque()
    held = 0
    with ThreadPoolExecutor(readers) as pool:
        try:
            for job in jobs:
                while waiting and held + nbytes(job) > READ_AHEAD:
                    done, future = waiting.popleft()
                    held -= nbytes(done)
                    yield done, future.result()
                waiting.append((job, pool.submit(read, job)))
                held += nbytes(job)
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def to_device(arrays: Iterable[tuple[Leaf, np.ndarray]], total: int, progress: Progress | None,
              place: Place | None) -> dict:
    """The tree of `arrays`, put on the device as they come; the host keeps few of them.

    `place` gives the device or sharding of each; default: jax's default device.
    """
    found, pending, done = [], 0, 0
    going: collections.deque[jax.Array] = collections.deque()
    for leaf, host in arrays:
        value = jax.device_put(host, place(leaf.path, leaf.shape) if place else None)
        found.append((leaf.path, value))
        going.append(value)
        pending += host.nbytes
        done += host.nbytes
        while going and pending > PUT_AHEAD:
            oldest = going.popleft()
            oldest.block_until_ready()
            pending -= oldest.nbytes
        if progress:
            progress(done, total)
    for value in going:
        value.block_until_ready()
    return tree(found)


# --- to files -------------------------------------------------------------------------------------

def match(params: dict, table: Table, absent: Iterable[str], where: str) -> list[tuple[Leaf, Any]]:
    """(leaf, array) in table order. Raises CheckpointError if `params` are not the table's."""
    given = dict(flat(params))
    kept = [leaf for leaf in table if leaf.path[0] not in absent or leaf.path[0] in params]
    wrong = [f"parameter {'/'.join(leaf.path)} is missing" for leaf in kept
             if leaf.path not in given]
    known = {leaf.path: leaf.shape for leaf in kept}
    wrong += [f"parameter {'/'.join(path)} is surplus" for path in given if path not in known]
    wrong += [f"parameter {'/'.join(path)} has shape {list(value.shape)}, expected "
              f"{list(known[path])}" for path, value in given.items()
              if path in known and tuple(value.shape) != known[path]]
    raise_all(Path(where), wrong)
    return [(leaf, given[leaf.path]) for leaf in kept]


def part_sizes(leaves: Iterable[tuple[Leaf, Any]],
               rename: Callable[[str], str] = str) -> list[tuple[str, int]]:
    """(HF name, bytes) of what `unfuse` will give."""
    return [(rename(name), math.prod(shape) * value.dtype.itemsize)
            for leaf, value in leaves for name, shape in leaf.parts]


def unfuse(leaves: Iterable[tuple[Leaf, Any]],
           rename: Callable[[str], str] = str) -> Iterator[tuple[str, np.ndarray]]:
    """(HF name, HF array) of each part; one parameter at a time comes to the host."""
    for leaf, value in leaves:
        host = np.asarray(value)
        for name, shape, rows in leaf.rows():
            yield rename(name), host[rows].reshape(shape)
