"""`python -m ports.convert`: a target or drafter from HF safetensors to orbax, or back.

In: a model folder (or hub id) and the folder to write. Out: the same parameters in the other
format, bit for bit, with vision tower and MTP head, and the config, tokenizer, template and
processor files beside them. One group of parameters is in memory at a time; devices are not used.
Which kind of model it is, the folder's `config.json` says.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from mmflash_jax.config import (
    DRAFTER_CLASSES,
    ConfigError,
    DrafterConfig,
    TargetConfig,
    drafter_config,
    read_json,
    target_config,
)
from ports import CheckpointError, orbax_dir
from ports.dflash import MASK, drafter_table, mask_leaf, open_drafter, write_drafter
from ports.name_table import Leaf, read_ahead, tree
from ports.new_folder import copy_beside, new_folder
from ports.qwen35 import ABSENT, open_target, target_table, write_target
from ports.safetensors_dir import resolve

EXAMPLES = """
examples:
  python -m ports.convert to-orbax Qwen/Qwen3.5-9B out/qwen3.5-9b-orbax     a hub id, downloaded
  python -m ports.convert to-orbax models/Qwen3.5-9B-MMFlash out/drafter    a folder
  python -m ports.convert to-hf out/trained-drafter out/drafter-hf          for SGLang and vLLM

Both directions keep every bit, `mtp.*` and the vision tower included. The output appears under its
name only when it is complete; what an interrupted run leaves has `.incomplete` in its name and can
be deleted. Folders of both formats can be given to python -m mmflash_jax.generate.
"""


def read_model_config(folder: Path) -> tuple[str, dict, TargetConfig | DrafterConfig]:
    """("target" or "drafter", JSON, config) of a model folder. Raises ConfigError."""
    path = folder / "config.json"
    fields = read_json(path)
    if set(fields.get("architectures") or []) & set(DRAFTER_CLASSES):
        return "drafter", fields, drafter_config(fields, str(path))
    return "target", fields, target_config(fields, str(path))


def to_orbax(source: str | Path, out: str | Path, *, overwrite: bool = False,
             bar: bool = False) -> None:
    """Write the HF folder `source` as an orbax folder. Raises CheckpointError, ConfigError."""
    folder = resolve(source)
    _apart(folder, Path(out))
    if orbax_dir.is_orbax(folder):
        raise CheckpointError(f"{folder}: is an orbax folder already, expected HF safetensors")
    kind, fields, config = read_model_config(folder)
    if isinstance(config, DrafterConfig):
        files, mask = open_drafter(folder, config)
        extra = [] if mask is None else [(mask_leaf(config), mask)]
    else:
        files, extra = open_target(folder, config), []
    total = sum(files.nbytes(leaf, None) for leaf in files.table)
    arrays = read_ahead(files.table, lambda leaf: files.nbytes(leaf, None),
                        lambda leaf: files.read(leaf, None))
    with _progress(total, "to orbax", bar) as meter:
        pairs = itertools.chain(_metered(arrays, meter), extra)
        groups = ((name, tree((leaf.path, value) for leaf, value in members))
                  for name, members in itertools.groupby(pairs, lambda pair: pair[0].path[0]))
        orbax_dir.write_params(groups, kind, fields, out, files_from=folder, overwrite=overwrite)


def to_hf(source: str | Path, out: str | Path, *, overwrite: bool = False,
          max_shard_bytes: int = 4_000_000_000, bar: bool = False) -> None:
    """Write the orbax folder `source` as HF safetensors. Raises CheckpointError, ConfigError."""
    folder = Path(source).expanduser()
    _apart(folder, Path(out))
    if not orbax_dir.is_orbax(folder):
        raise CheckpointError(f"{folder}: is no orbax folder ({orbax_dir.MANIFEST} is missing)")
    kind, fields, config = read_model_config(folder)
    if isinstance(config, DrafterConfig):
        table, optional = (*drafter_table(config), mask_leaf(config)), MASK
    else:
        table, optional = target_table(config), ABSENT
    sizes = orbax_dir.stored_leaves(folder, table, kind, optional=optional)
    total = sum(leaf_bytes.size * leaf_bytes.dtype.itemsize for _, leaf_bytes in sizes)
    with _progress(total, "to HF", bar) as meter, new_folder(out, overwrite) as into:
        leaves = _metered(orbax_dir.read_leaves(folder, sizes), meter)
        if isinstance(config, DrafterConfig):
            write_drafter(sizes, leaves, config, None, into, files_from=folder)
        else:
            write_target(sizes, leaves, fields, into, max_shard_bytes)
            copy_beside(folder, into)


def _apart(source: Path, out: Path) -> None:
    source, out = source.resolve(), out.expanduser().resolve()
    if source == out or source in out.parents or out in source.parents:
        raise CheckpointError(f"{out}: lies in the source {source} or holds it, expected another "
                              "folder")


def _progress(total: int, title: str, bar: bool) -> tqdm:
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, file=sys.stderr,
                disable=None if bar else True)  # None: off when stderr is no terminal


def _metered(arrays: Iterator[tuple[Leaf, Any]], meter: tqdm) -> Iterator[tuple[Leaf, Any]]:
    for leaf, value in arrays:
        yield leaf, value
        meter.update(value.nbytes)


def main(arguments: list[str] | None = None) -> int:
    """The command line. 0: written; 2: bad input, with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m ports.convert", description=__doc__.split("\n\n")[0].split(": ", 1)[1],
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True, metavar="{to-orbax,to-hf}")
    for way, text in (("to-orbax", "HF safetensors (folder or hub id) -> orbax folder"),
                      ("to-hf", "orbax folder -> HF safetensors")):
        command = ways.add_parser(way, help=text, description=text)
        command.add_argument("source", help="model folder" + " or hub id" * (way == "to-orbax"))
        command.add_argument("out", help="folder to write; must be new or empty")
        command.add_argument("--overwrite", action="store_true",
                             help="replace a checkpoint that is there already")
        if way == "to-hf":
            command.add_argument("--max-shard-gb", type=float, default=4.0, metavar="N",
                                 help="size of a target's files in GB (1e9 bytes, default 4)")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # orbax asks for devices; none is needed
    try:
        if options.way == "to-orbax":
            to_orbax(options.source, options.out, overwrite=options.overwrite, bar=True)
        else:
            if not options.max_shard_gb > 0:
                raise CheckpointError(f"--max-shard-gb is {options.max_shard_gb}, expected more "
                                      "than 0")
            to_hf(options.source, options.out, overwrite=options.overwrite,
                  max_shard_bytes=int(options.max_shard_gb * 1e9), bar=True)
    except (CheckpointError, ConfigError, OSError) as error:
        print("error: " + " ".join(str(error).split("\n")), file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
