"""Qwen3.5-family targets: their name table, loading from a folder, saving in HF's layout.

In: a folder of HF safetensors or of orbax (told apart by its files) and its `TargetConfig`.
Out: the parameter tree on the device, fused (`qkv`, `qkvzba`, `gate_up`) once and for all; and
back to HF files, bit for bit. Source of the names: HF `modeling_qwen3_5`; of `mtp.*`: vLLM and
SGLang `qwen3_5_mtp`.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmflash_jax.config import TargetConfig, read_json, target_config
from ports import CheckpointError, orbax_dir
from ports.config_files import target_json, write_config
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
from ports.safetensors_dir import CHUNK, open_dir, plan_shards, write_shards

HEAD = "lm_head.weight"
TEXT = "model.language_model."  # Qwen3_5ForCausalLM, the text-only class, has `model.`
TEXT_ONLY = "model."
OPTIONAL = ("vision", "mtp")  # groups that a load may leave out
ABSENT = ("mtp",)  # what a checkpoint may lack: HF drops the head and keeps its config
SHARD_BYTES = 4_000_000_000


def _one(path: tuple[str, ...], name: str, *shape: int, **how) -> Leaf:
    return Leaf(path, shape, ((name, shape),), **how)


def _mlp(path: tuple[str, ...], name: str, hidden: int, inner: int) -> list[Leaf]:
    return [stack((*path, "gate_up"), [(f"{name}.gate_proj.weight", (inner, hidden)),
                                       (f"{name}.up_proj.weight", (inner, hidden))]),
            _one((*path, "down"), f"{name}.down_proj.weight", hidden, inner)]


def _layer(path: tuple[str, ...], name: str, kind: str, c: TargetConfig) -> list[Leaf]:
    h = c.hidden_size
    mixer = _attention if kind == "full_attention" else _gdn
    return [_one((*path, "input_norm"), f"{name}.input_layernorm.weight", h, init="offset"),
            _one((*path, "post_norm"), f"{name}.post_attention_layernorm.weight", h,
                 init="offset"),
            *mixer((*path, "mixer"), name, c),
            *_mlp((*path, "mlp"), f"{name}.mlp", h, c.intermediate_size)]


def _attention(path: tuple[str, ...], layer: str, c: TargetConfig) -> list[Leaf]:
    """Rows of `q_proj`: for each head its queries, then its gate."""
    name, h, d = f"{layer}.self_attn", c.hidden_size, c.head_dim
    width, kv = c.num_attention_heads * d, c.num_key_value_heads * d
    return [stack((*path, "qkv"), [(f"{name}.q_proj.weight", (2 * width, h)),
                                   (f"{name}.k_proj.weight", (kv, h)),
                                   (f"{name}.v_proj.weight", (kv, h))]),
            _one((*path, "q_norm"), f"{name}.q_norm.weight", d, init="offset"),
            _one((*path, "k_norm"), f"{name}.k_norm.weight", d, init="offset"),
            _one((*path, "out"), f"{name}.o_proj.weight", h, width)]


def _gdn(path: tuple[str, ...], layer: str, c: TargetConfig) -> list[Leaf]:
    name, h = f"{layer}.linear_attn", c.hidden_size
    heads, taps = c.linear_num_value_heads, c.linear_conv_kernel_dim
    return [stack((*path, "qkvzba"), [(f"{name}.in_proj_qkv.weight", (c.conv_dim, h)),
                                      (f"{name}.in_proj_z.weight", (c.value_dim, h)),
                                      (f"{name}.in_proj_b.weight", (heads, h)),
                                      (f"{name}.in_proj_a.weight", (heads, h))]),
            Leaf((*path, "conv"), (c.conv_dim, taps),
                 ((f"{name}.conv1d.weight", (c.conv_dim, 1, taps)),)),
            _one((*path, "A_log"), f"{name}.A_log", heads, init="a_log", keep=True),
            _one((*path, "dt_bias"), f"{name}.dt_bias", heads, init="one", keep=True),
            _one((*path, "norm"), f"{name}.norm.weight", c.linear_value_head_dim,
                 init="scale", keep=True),
            _one((*path, "out"), f"{name}.out_proj.weight", h, c.value_dim)]


def _biased(path: tuple[str, ...], name: str, *shape: int, init: str = "matrix") -> list[Leaf]:
    return [_one((*path, "weight"), f"{name}.weight", *shape, init=init),
            _one((*path, "bias"), f"{name}.bias", shape[0], init="small")]


def _vision(c: TargetConfig) -> list[Leaf]:
    v = c.vision
    if v is None:
        return []
    name, w = "model.visual", v.hidden_size
    group = w * v.spatial_merge_size**2
    pixels = (v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
    leaves = [Leaf(("vision", "patch", "weight"), (w, v.patch_dim),
                   ((f"{name}.patch_embed.proj.weight", (w, *pixels)),)),
              _one(("vision", "patch", "bias"), f"{name}.patch_embed.proj.bias", w, init="small"),
              _one(("vision", "pos_embed"), f"{name}.pos_embed.weight",
                   v.num_position_embeddings, w, init="small")]
    for i in range(v.depth):
        at, block = ("vision", f"blocks_{i}"), f"{name}.blocks.{i}"
        leaves += _biased((*at, "norm1"), f"{block}.norm1", w, init="scale")
        leaves += _biased((*at, "norm2"), f"{block}.norm2", w, init="scale")
        leaves += _biased((*at, "qkv"), f"{block}.attn.qkv", 3 * w, w)
        leaves += _biased((*at, "proj"), f"{block}.attn.proj", w, w)
        leaves += _biased((*at, "fc1"), f"{block}.mlp.linear_fc1", v.intermediate_size, w)
        leaves += _biased((*at, "fc2"), f"{block}.mlp.linear_fc2", w, v.intermediate_size)
    merger = ("vision", "merger")
    leaves += _biased((*merger, "norm"), f"{name}.merger.norm", w, init="scale")
    leaves += _biased((*merger, "fc1"), f"{name}.merger.linear_fc1", group, group)
    leaves += _biased((*merger, "fc2"), f"{name}.merger.linear_fc2", v.out_hidden_size, group)
    return leaves


def _mtp(c: TargetConfig) -> list[Leaf]:
    if not c.mtp_num_hidden_layers:
        return []
    h = c.hidden_size
    leaves = [_one(("mtp", "fc"), "mtp.fc.weight", h, 2 * h),
              _one(("mtp", "norm"), "mtp.norm.weight", h, init="offset"),
              _one(("mtp", "pre_norm_embedding"), "mtp.pre_fc_norm_embedding.weight", h,
                   init="offset"),
              _one(("mtp", "pre_norm_hidden"), "mtp.pre_fc_norm_hidden.weight", h, init="offset")]
    for i in range(c.mtp_num_hidden_layers):
        leaves += _layer(("mtp", f"layers_{i}"), f"mtp.layers.{i}", "full_attention", c)
    return leaves


def target_table(config: TargetConfig) -> Table:
    """Every parameter of the target, vision tower and MTP head included."""
    vocabulary = (config.vocab_size, config.hidden_size)
    leaves = [_one(("embed",), f"{TEXT}embed_tokens.weight", *vocabulary)]
    for i, kind in enumerate(config.layer_types):
        leaves += _layer((f"layers_{i}",), f"{TEXT}layers.{i}", kind, config)
    leaves.append(_one(("norm",), f"{TEXT}norm.weight", config.hidden_size, init="offset"))
    if not config.tie_word_embeddings:
        leaves.append(_one(("head",), HEAD, *vocabulary))
    return (*leaves, *_vision(config), *_mtp(config))


def full_name(name: str) -> str:
    """The published name of a tensor that the text-only class may have saved."""
    text_only = name.startswith(tuple(TEXT_ONLY + w for w in ("layers.", "embed_tokens.", "norm.")))
    return TEXT + name.removeprefix(TEXT_ONLY) if text_only else name


def text_only_name(name: str) -> str:
    """The inverse of `full_name`."""
    return TEXT_ONLY + name.removeprefix(TEXT) if name.startswith(TEXT) else name


def open_target(folder: str | os.PathLike, config: TargetConfig,
                absent: Iterable[str] = ABSENT) -> Source:
    """Check the HF files of a target against `config`; read nothing but a tied head (R19).

    `absent`: groups ("vision", "mtp") that may be missing as a whole.
    Raises CheckpointError, all faults at once.
    """
    tied = (HEAD,) if config.tie_word_embeddings else ()
    source = Source(open_dir(folder), target_table(config), full_name, absent, ignored=tied)
    if tied and HEAD in source.stored:
        _check_tied(source, config)
    return source


def _check_tied(source: Source, config: TargetConfig) -> None:
    """A tied checkpoint may hold its head as well, but only the embedding again."""
    name = source.stored[f"{TEXT}embed_tokens.weight"]
    embed, head = source.files.tensor(name), source.files.tensor(HEAD)
    where = f"{source.entry(HEAD).file}: {HEAD}"
    if embed.shape != head.shape or embed.dtype != head.dtype:
        raise CheckpointError(f"{where} is {head.dtype} {list(head.shape)}, but the config ties it "
                              f"to {name}, which is {embed.dtype} {list(embed.shape)}")
    rows = max(1, CHUNK // (config.hidden_size * embed.dtype.itemsize))
    for start in range(0, config.vocab_size, rows):
        mine, theirs = (a[start:start + rows].view(np.uint8) for a in (embed, head))
        if not np.array_equal(mine, theirs):
            raise CheckpointError(f"{where} differs from {name}, but tie_word_embeddings is true "
                                  "in the config, expected equal tensors or no head")


def load_target(folder: str | os.PathLike, config: TargetConfig, dtype: Any = "bfloat16", *,
                vision: bool = True, mtp: bool = False, progress: Progress | None = None,
                place: Place | None = None) -> dict:
    """The parameters of the target in `folder` (HF safetensors or orbax), on the device.

    dtype: "bfloat16", "float32" or None (each as stored); `A_log`, `dt_bias` and the GDN norm
    always keep the stored dtype. `vision`, `mtp`: load those groups (vision only if the config has
    one). `progress(bytes_done, bytes_total)` is called as they arrive; `place(path, shape)` gives
    the device or sharding of each parameter. Everything that can be checked is checked before
    anything is allocated on a device. Raises CheckpointError.
    """
    run_dtype = dtype_of(dtype)
    needed = ("vision",) * vision + ("mtp",) * mtp
    if mtp and not config.mtp_num_hidden_layers:
        raise CheckpointError(f"{folder}: the MTP head was asked for, but the config has none "
                              "(mtp_num_hidden_layers is 0)")
    skipped = [group for group in OPTIONAL if group not in needed]
    if orbax_dir.is_orbax(folder):
        return orbax_dir.load_params(folder, target_table(config), "target", run_dtype,
                                     skip=skipped, progress=progress, place=place)
    source = open_target(folder, config, skipped)
    leaves = [leaf for leaf in source.table if leaf.path[0] not in skipped]
    total = sum(source.nbytes(leaf, run_dtype) for leaf in leaves)
    arrays = read_ahead(leaves, lambda leaf: source.nbytes(leaf, run_dtype),
                        lambda leaf: source.read(leaf, run_dtype))
    return to_device(arrays, total, progress, place)


def save_target(params: dict, config: TargetConfig, folder: str | os.PathLike, *,
                files_from: str | os.PathLike | None = None, overwrite: bool = False,
                max_shard_bytes: int = SHARD_BYTES) -> None:
    """Write `params` as an HF folder that appears whole or not at all.

    With `files_from` the config, tokenizer and template of that model folder are copied (its
    config must be equal to `config`); without, only a `config.json` is written. The MTP head may
    be absent from `params`, nothing else. Raises CheckpointError.
    """
    leaves = match(params, target_table(config), ABSENT, str(folder))
    fields = config_fields(config, files_from, leaves[0][1].dtype)
    with new_folder(folder, overwrite) as into:
        write_target(leaves, iter(leaves), fields, into, max_shard_bytes)
        if files_from is not None:
            copy_beside(Path(files_from), into)
        else:
            write_config(fields, into)


def config_fields(config: TargetConfig, files_from: str | os.PathLike | None,
                  dtype: np.dtype) -> dict:
    """The JSON of the config to write: that of `files_from`, which must be equal, or a made one."""
    if files_from is None:
        return target_json(config, str(dtype))
    path = Path(files_from) / "config.json"
    fields = read_json(path)
    if target_config(fields, str(path)) != config:
        raise CheckpointError(f"{path}: is not the configuration of these parameters")
    return fields


def write_target(sizes: list[tuple[Leaf, Any]], leaves: Iterator[tuple[Leaf, Any]], fields: dict,
                 into: Path, max_shard_bytes: int = SHARD_BYTES) -> None:
    """Write the weight files: `sizes` has what `leaves` will bring (shapes and dtypes suffice)."""
    text_only = "Qwen3_5ForCausalLM" in (fields.get("architectures") or [])
    rename = text_only_name if text_only else str
    shards = plan_shards(part_sizes(sizes, rename), max_shard_bytes)
    write_shards(unfuse(leaves, rename), shards, into)
