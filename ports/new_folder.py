"""A folder that appears as a whole or not at all.

In: where it shall be. Out: a temporary sibling to write to, renamed when the block ends well and
removed when it does not. After `kill -9` the sibling stays, under a name (`.incomplete-`) that no
loader accepts. Knows no weights; it also carries over what lies beside them (tokenizer, template).
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from ports import CheckpointError
from ports.safetensors_dir import INDEX_ENDING, UNFINISHED

BESIDE = (".json", ".jinja", ".txt", ".tiktoken", ".model", ".md")
CHECKPOINT_FILES = ("config.json", "manifest.json", "model.safetensors")


@contextlib.contextmanager
def new_folder(out: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder that becomes `out` when the block ends without an exception.

    Raises CheckpointError if `out` is a file, or a folder with something in it: without
    `overwrite`, or with it if the folder is no checkpoint.
    """
    out = Path(os.path.realpath(Path(out).expanduser()))
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out}: is a file, expected a folder to write to")
    if UNFINISHED in out.name:
        raise CheckpointError(f"{out}: a name with {UNFINISHED} marks unfinished folders")
    held = {p.name for p in out.iterdir()} if out.exists() else set()
    if held and not overwrite:
        raise CheckpointError(f"{out}: exists and is not empty (overwriting has to be asked for)")
    if held and not held & set(CHECKPOINT_FILES):
        raise CheckpointError(f"{out}: holds no checkpoint ({sorted(held)[0]}, ...), so it is not "
                              "overwritten")
    made = [p for p in out.parents if not p.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    temporary = out.parent / f"{out.name}{UNFINISHED}-{mark}"
    try:
        temporary.mkdir()
        yield temporary
        if held:
            old = out.parent / f"{out.name}{UNFINISHED}-old-{mark}"
            out.rename(old)
            temporary.rename(out)
            shutil.rmtree(old)
        else:
            temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):
            for parent in made:
                parent.rmdir()
        raise


def copy_beside(source: Path, into: Path, names: tuple[str, ...] = BESIDE) -> None:
    """Copy what lies beside the weights of `source`: configs, tokenizer, chat template."""
    for path in sorted(source.iterdir()):
        weights = path.name.endswith(INDEX_ENDING) or path.name == "manifest.json"
        if path.is_file() and path.suffix in names and not weights:
            shutil.copyfile(path, into / path.name)
