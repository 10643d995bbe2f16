"""`config.json` made from a `TargetConfig` or `DrafterConfig`: the inverse of `config.py`.

For checkpoints that have no original to copy it from (random weights, trained drafters). What is
written is parsed again and must be equal; a configuration that the JSON cannot say is refused.
"""

import json
from pathlib import Path

from mmflash_jax.config import (
    DrafterConfig,
    RopeConfig,
    TargetConfig,
    drafter_config,
    target_config,
)
from ports import CheckpointError


def write_config(fields: dict, folder: Path) -> None:
    """Write `fields` as the `config.json` of `folder`."""
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def target_json(config: TargetConfig, dtype: str = "bfloat16") -> dict:
    """The JSON of a `qwen3_5` config. Raises CheckpointError if it cannot say `config`."""
    eos = list(config.eos_token_ids)
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads",
            "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "vocab_size",
            "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings",
            "mtp_num_hidden_layers")
    text = {
        "model_type": "qwen3_5_text", **{name: getattr(config, name) for name in same},
        "layer_types": list(config.layer_types), "attention_bias": False,
        "attn_output_gate": True, "hidden_act": "silu", "mamba_ssm_dtype": "float32",
        "mtp_use_dedicated_embeddings": False, "dtype": dtype,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "rope_parameters": {
            **_rope(config.rope), "mrope_section": list(config.mrope_section),
            "mrope_interleaved": True,
            "partial_rotary_factor": config.rope.dim / config.head_dim}}
    ids = {name: getattr(config, name) for name in (
        "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")}
    if config.vision is None:
        fields = {"architectures": ["Qwen3_5ForCausalLM"], **text, **ids}
    else:
        names = ("depth", "hidden_size", "num_heads", "intermediate_size", "patch_size",
                 "temporal_patch_size", "spatial_merge_size", "in_channels",
                 "num_position_embeddings", "out_hidden_size")
        fields = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
                  "dtype": dtype, "tie_word_embeddings": config.tie_word_embeddings, **ids,
                  "text_config": text,
                  "vision_config": {"model_type": "qwen3_5", "deepstack_visual_indexes": [],
                                    "hidden_act": "gelu_pytorch_tanh",
                                    **{name: getattr(config.vision, name) for name in names}}}
    _same(target_config(fields), config)
    return fields


def drafter_json(config: DrafterConfig, dtype: str = "bfloat16",
                 target: TargetConfig | None = None, base: dict | None = None) -> dict:
    """The JSON of a DFlash drafter as SGLang, vLLM and `dflash` read it.

    `block_size` and `num_target_layers` stand at the top and in `dflash_config`, since not every
    reader looks in both places. No `auto_map`: it would ask for remote code. `target` gives the
    eos id; further fields of `base`, an equal config, are kept.
    Raises CheckpointError if the JSON cannot say `config`.
    """
    base = base or {}
    windows = {w for w in config.windows if w is not None}
    if len(windows) > 1:
        raise CheckpointError(f"the drafter's layers have windows {sorted(windows)}, a config can "
                              "state one")
    by_kind = tuple(w is not None for w in config.windows)
    if config.causal != by_kind and len(set(config.causal)) > 1:
        raise CheckpointError(f"the drafter's layers are causal {list(config.causal)}, a config "
                              "can state one value for all, or causal where sliding")
    causal = {} if config.causal == by_kind else {"is_causal": config.causal[0]}
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps",
            "max_position_embeddings", "block_size", "num_target_layers")
    rope = _rope(config.rope)
    partial = config.rope.dim / config.head_dim
    eos = target.eos_token_ids[0] if target and target.eos_token_ids else None
    fields = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": dtype,
        **{name: getattr(config, name) for name in same}, **causal,
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "initializer_range": 0.02, "use_cache": True, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": eos, "pad_token_id": eos,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if rope["rope_type"] == "default" else {
            k: v for k, v in rope.items() if k != "rope_theta"},
        **({} if partial == 1 else {"partial_rotary_factor": partial}),
        "layer_types": ["full_attention" if w is None else "sliding_attention"
                        for w in config.windows],
        "sliding_window": max(windows, default=None), "use_sliding_window": bool(windows),
        "max_window_layers": config.num_hidden_layers,
        "dflash_config": {
            "block_size": config.block_size, "mask_token_id": config.mask_token_id,
            "num_target_layers": config.num_target_layers,
            "target_layer_ids": list(config.target_layer_ids)}}
    fields = {**base, **{k: v for k, v in fields.items() if v is not None or k not in base},
              "dflash_config": {**(base.get("dflash_config") or {}), **fields["dflash_config"]}}
    fields.pop("auto_map", None)
    _same(drafter_config(fields), config)
    return fields


def _rope(rope: RopeConfig) -> dict:
    return {"rope_type": "yarn" if rope.yarn else "default", "rope_theta": rope.theta,
            **dict(rope.yarn)}


def _same(read: TargetConfig | DrafterConfig, meant: TargetConfig | DrafterConfig) -> None:
    if read != meant:
        wrong = next(name for name in vars(meant) if getattr(read, name) != getattr(meant, name))
        raise CheckpointError(f"config.json cannot state {wrong} {getattr(meant, wrong)!r}, it "
                              f"would read as {getattr(read, wrong)!r}")
