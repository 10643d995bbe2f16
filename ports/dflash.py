"""DFlash and MMFlash drafters: name table, loading from a folder, saving as SGLang and vLLM load.

In: a folder of HF safetensors or of orbax and its `DrafterConfig`. Out: the parameter tree on the
device, and back: `model.safetensors` of 11 tensors a layer and 3, with a `DFlashDraftModel` config.
The drafter has no embedding and no head; those are the target's. Names: z-lab `dflash`, SGLang.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmflash_jax.config import DrafterConfig, TargetConfig, drafter_config, read_json
from ports import CheckpointError, orbax_dir
from ports.config_files import drafter_json, write_config
from ports.mask_embedding import read_mask_embedding, write_mask_embedding
from ports.name_table import (
    Leaf,
    Place,
    Progress,
    Source,
    Table,
    dtype_of,
    match,
    part_sizes,
    read_ahead,
    stack,
    to_device,
    unfuse,
)
from ports.new_folder import copy_beside, new_folder
from ports.safetensors_dir import open_dir, plan_shards, write_shards

MASK = ("mask_embedding",)
OLD_NAMES = {"encoder.fc.weight": "fc.weight",
             "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def drafter_table(config: DrafterConfig) -> Table:
    """Every parameter that lies in the drafter's safetensors."""
    c, h, d = config, config.hidden_size, config.head_dim
    width, kv = c.num_attention_heads * d, c.num_key_value_heads * d
    leaves = [_one(("fc",), "fc.weight", h, len(c.target_layer_ids) * h),
              _one(("hidden_norm",), "hidden_norm.weight", h, init="scale"),
              _one(("norm",), "norm.weight", h, init="scale")]
    for i in range(c.num_hidden_layers):
        path, name = (f"layers_{i}",), f"layers.{i}"
        leaves += [
            _one((*path, "input_norm"), f"{name}.input_layernorm.weight", h, init="scale"),
            _one((*path, "post_norm"), f"{name}.post_attention_layernorm.weight", h,
                 init="scale"),
            stack((*path, "qkv"), [(f"{name}.self_attn.q_proj.weight", (width, h)),
                                   (f"{name}.self_attn.k_proj.weight", (kv, h)),
                                   (f"{name}.self_attn.v_proj.weight", (kv, h))]),
            _one((*path, "q_norm"), f"{name}.self_attn.q_norm.weight", d, init="scale"),
            _one((*path, "k_norm"), f"{name}.self_attn.k_norm.weight", d, init="scale"),
            _one((*path, "out"), f"{name}.self_attn.o_proj.weight", h, width),
            stack((*path, "mlp", "gate_up"),
                  [(f"{name}.mlp.gate_proj.weight", (c.intermediate_size, h)),
                   (f"{name}.mlp.up_proj.weight", (c.intermediate_size, h))]),
            _one((*path, "mlp", "down"), f"{name}.mlp.down_proj.weight", h, c.intermediate_size)]
    return tuple(leaves)


def _one(path: tuple[str, ...], name: str, *shape: int, **how) -> Leaf:
    return Leaf(path, shape, ((name, shape),), **how)


def mask_leaf(config: DrafterConfig) -> Leaf:
    """The trained mask embedding, which lies in a file of its own and may be absent."""
    return Leaf(MASK, (config.hidden_size,), ())


def full_name(name: str) -> str:
    """The published name of a tensor that other savers prefixed or renamed."""
    name = name.removeprefix("model.")
    return OLD_NAMES.get(name, name)


def open_drafter(folder: str | os.PathLike,
                 config: DrafterConfig) -> tuple[Source, np.ndarray | None]:
    """Check the HF files of a drafter against `config`. Raises CheckpointError.

    Returns the source and the mask embedding [H] or None.
    """
    source = Source(open_dir(folder), drafter_table(config), full_name)
    return source, read_mask_embedding(Path(folder), config.hidden_size, config.mask_token_id)


def load_drafter(folder: str | os.PathLike, config: DrafterConfig, dtype: Any = "bfloat16", *,
                 progress: Progress | None = None, place: Place | None = None) -> dict:
    """The parameters of the drafter in `folder` (HF safetensors or orbax), on the device.

    dtype: "bfloat16", "float32" or None (each as stored). `mask_embedding` [H] is among them only
    if the folder has one. `progress` and `place` as in `qwen35.load_target`. Everything that can
    be checked is checked before anything is allocated on a device. Raises CheckpointError.
    """
    run_dtype = dtype_of(dtype)
    if orbax_dir.is_orbax(folder):
        table = (*drafter_table(config), mask_leaf(config))
        return orbax_dir.load_params(folder, table, "drafter", run_dtype, optional=MASK,
                                     progress=progress, place=place)
    source, mask = open_drafter(folder, config)
    total = sum(source.nbytes(leaf, run_dtype) for leaf in source.table)

    def arrays() -> Iterator[tuple[Leaf, np.ndarray]]:
        yield from read_ahead(source.table, lambda leaf: source.nbytes(leaf, run_dtype),
                              lambda leaf: source.read(leaf, run_dtype))
        if mask is not None:
            yield mask_leaf(config), mask.astype(run_dtype or mask.dtype, copy=False)

    return to_device(arrays(), total + (0 if mask is None else mask.nbytes), progress, place)


def save_drafter(params: dict, config: DrafterConfig, folder: str | os.PathLike,
                 target_config: TargetConfig | None = None, *,
                 files_from: str | os.PathLike | None = None, overwrite: bool = False) -> None:
    """Write the drafter as SGLang, vLLM and `dflash` load it; whole or not at all.

    The config reads back equal to `config`; `target_config` gives its eos id. `files_from`: the
    folder of the original (HF or orbax), whose further config fields and model card are kept.
    Raises CheckpointError.
    """
    leaves = drafter_leaves(params, config, str(folder))
    with new_folder(folder, overwrite) as into:
        write_drafter(leaves, iter(leaves), config, target_config, into, files_from)


def drafter_leaves(params: dict, config: DrafterConfig, where: str) -> list[tuple[Leaf, Any]]:
    """(leaf, array) of `params`, checked; the mask embedding last, if there is one."""
    return match(params, (*drafter_table(config), mask_leaf(config)), MASK, where)


def write_drafter(sizes: list[tuple[Leaf, Any]], leaves: Iterator[tuple[Leaf, Any]],
                  config: DrafterConfig, target: TargetConfig | None, into: Path,
                  files_from: str | os.PathLike | None = None) -> None:
    """Write one `model.safetensors`, the config, and the mask embedding if `leaves` ends with it.

    `sizes` has what `leaves` will bring (shapes and dtypes suffice).
    """
    base = {}
    if files_from is not None:
        path = Path(files_from) / "config.json"
        base = read_json(path)
        if drafter_config(base, str(path)) != config:
            raise CheckpointError(f"{path}: is not the configuration of these parameters")
        copy_beside(Path(files_from), into, (".md",))
    fields = drafter_json(config, str(sizes[0][1].dtype), target, base)
    weights = [pair for pair in sizes if pair[0].path != MASK]
    write_shards(unfuse(leaves), plan_shards(part_sizes(weights), 1 << 62), into)
    for _, value in leaves:  # what is left after the tensors of the one shard
        write_mask_embedding(into, np.asarray(value), config.mask_token_id)
    write_config(fields, into)
