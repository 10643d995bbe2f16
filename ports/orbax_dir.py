"""Parameters in orbax's format: the runtime form, bit for bit, without unfusing.

A folder holds `params/<group>` (one orbax checkpoint for each first word of the parameters' paths,
so that no more than one group is ever in host memory), what lay beside the weights (config,
tokenizer, template) and `manifest.json`, written last: kind, parameters, and the size of each file,
so that a cut or missing file is found before anything is loaded. Nothing of the sharding is stored;
restoring puts each parameter where the caller says. Knows no model.
"""

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import numpy as np

from ports import CheckpointError
from ports.config_files import write_config
from ports.name_table import Leaf, Place, Progress, Table, flat, read_ahead, to_device, tree
from ports.new_folder import copy_beside, new_folder
from ports.safetensors_dir import DTYPES, SAFETENSORS_NAMES, UNFINISHED, raise_all

MANIFEST = "manifest.json"
FORMAT = "mmflash_jax orbax folder, version 1"
Group = tuple[str, dict]


def is_orbax(folder: str | os.PathLike) -> bool:
    """Whether `folder` holds parameters in orbax's format (whole or not)."""
    return (Path(folder) / MANIFEST).is_file() or (Path(folder) / "params").is_dir()


def save_params(params: dict, kind: str, fields: dict, folder: str | os.PathLike, *,
                files_from: str | os.PathLike | None = None, overwrite: bool = False) -> None:
    """Write the tree `params` of a "target" or "drafter" whose config is `fields`.

    Appears whole or not at all; `files_from`: a model folder whose configs, tokenizer and template
    are copied. Raises CheckpointError.
    """
    groups = ((name, {name: params[name]}) for name in params)
    write_params(groups, kind, fields, folder, files_from=files_from, overwrite=overwrite)


def write_params(groups: Iterable[Group], kind: str, fields: dict, folder: str | os.PathLike, *,
                 files_from: str | os.PathLike | None, overwrite: bool) -> None:
    """`save_params` for groups (name, {name: subtree}) that come one at a time."""
    import orbax.checkpoint as ocp

    with new_folder(folder, overwrite) as into:
        parameters = {}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as writer:
            for name, group in groups:
                for path, value in flat(group):
                    parameters["/".join(path)] = [SAFETENSORS_NAMES[np.dtype(value.dtype)],
                                                  list(value.shape)]
                writer.save(into / "params" / name, args=ocp.args.PyTreeSave(group))
        if files_from is not None:
            copy_beside(Path(files_from), into)
        write_config(fields, into)
        files = {p.relative_to(into).as_posix(): p.stat().st_size
                 for p in sorted((into / "params").rglob("*")) if p.is_file()}
        (into / MANIFEST).write_text(json.dumps({
            "format": FORMAT, "kind": kind, "parameters": parameters, "files": files}, indent=1))


def read_manifest(folder: str | os.PathLike, kind: str | None = None) -> dict:
    """The manifest of `folder`, whose files are all there and have their sizes.

    Raises CheckpointError, all faults at once.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if UNFINISHED in folder.name:
        raise CheckpointError(f"{folder}: is what an interrupted conversion left, not a checkpoint")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        stated, found = manifest["format"], manifest["kind"]
        files, parameters = manifest["files"].items(), manifest["parameters"].items()
        known = {name: (DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in parameters}
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: {MANIFEST} is missing, so the folder is not whole") \
            from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a readable manifest ({error!r})") from None
    if stated != FORMAT:
        raise CheckpointError(f"{path}: format is {stated!r}, expected {FORMAT!r}")
    if kind not in (None, found):
        raise CheckpointError(f"{path}: holds a {found}, expected a {kind}")
    problems = []
    for name, size in files:
        file = folder / name
        if not file.is_file():
            problems.append(f"{name}: no such file in the folder")
        elif file.stat().st_size != size:
            problems.append(f"{name}: has {file.stat().st_size} bytes, expected {size}")
    raise_all(folder, problems)
    return {"kind": found, "parameters": known}


def stored_leaves(folder: str | os.PathLike, table: Table, kind: str, skip: Iterable[str] = (),
                  optional: Iterable[str] = ()) -> list[tuple[Leaf, jax.ShapeDtypeStruct]]:
    """(leaf, stored shape and dtype) of `table` in `folder`, without the groups in `skip`.

    Groups in `skip` or `optional` may be missing. Raises CheckpointError if the stored parameters
    are not the table's.
    """
    stored = read_manifest(folder, kind)["parameters"]
    groups = {name.split("/")[0] for name in stored}
    expected = {"/".join(leaf.path): leaf for leaf in table if leaf.path[0] in groups
                or leaf.path[0] not in (*skip, *optional)}
    problems = [f"parameter {name} is missing" for name in expected if name not in stored]
    problems += [f"parameter {name} is surplus, the config has no such parameter"
                 for name in stored if name not in expected]
    problems += [f"parameter {name} has shape {list(stored[name][1])}, expected {list(leaf.shape)}"
                 for name, leaf in expected.items()
                 if name in stored and stored[name][1] != leaf.shape]
    raise_all(Path(folder), problems)
    return [(leaf, jax.ShapeDtypeStruct(leaf.shape, stored[name][0]))
            for name, leaf in expected.items() if leaf.path[0] not in skip]


def read_leaves(folder: str | os.PathLike, leaves: list[tuple[Leaf, jax.ShapeDtypeStruct]],
                dtype: np.dtype | None = None) -> Iterator[tuple[Leaf, np.ndarray]]:
    """(leaf, host array) in order, cast to `dtype` unless None; one or two groups are in memory."""
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    groups = [(name, list(members))
              for name, members in itertools.groupby(leaves, lambda pair: pair[0].path[0])]

    def nbytes(group) -> int:
        return sum(math.prod(leaf.shape) * s.dtype.itemsize for leaf, s in group[1])

    def read(group) -> list[tuple[Leaf, np.ndarray]]:
        name, members = group
        shapes = tree((leaf.path, stored) for leaf, stored in members)
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        path = Path(folder).absolute() / "params" / name
        try:
            found = dict(flat(reader.restore(
                path, args=ocp.args.PyTreeRestore(shapes, restore_args=args))))
        except Exception as error:  # tensorstore raises ValueError, orbax many kinds
            first = (str(error).strip() or "no reason given").splitlines()[0]
            raise CheckpointError(f"{path}: cannot be restored ({type(error).__name__}: {first})") \
                from None
        return [(leaf, _cast(found[leaf.path], leaf, dtype)) for leaf, _ in members]

    with ocp.Checkpointer(handler) as reader:
        # tensorstore reads with threads of its own
        for _, arrays in read_ahead(groups, nbytes, read, readers=1):
            yield from arrays


def _cast(value: np.ndarray, leaf: Leaf, dtype: np.dtype | None) -> np.ndarray:
    return value if dtype is None or leaf.keep else value.astype(dtype, copy=False)


def load_params(folder: str | os.PathLike, table: Table, kind: str, dtype: np.dtype | None, *,
                skip: Iterable[str] = (), optional: Iterable[str] = (),
                progress: Progress | None = None, place: Place | None = None) -> dict:
    """The tree of `table` from `folder`, on the device or as `place(path, shape)` says.

    Everything that can be checked is checked before anything is allocated. Raises CheckpointError.
    """
    leaves = stored_leaves(folder, table, kind, skip, optional)
    total = sum(math.prod(leaf.shape) * (s.dtype if dtype is None or leaf.keep else dtype).itemsize
                for leaf, s in leaves)
    return to_device(read_leaves(folder, leaves, dtype), total, progress, place)
