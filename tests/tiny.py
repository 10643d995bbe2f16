"""Tiny checkpoints in the published HF layout, for tests: written without torch.

In: a folder and sizes. Out: `write_target` fills it with config.json, sharded safetensors,
tokenizer, chat template and processor files; `write_drafter` with config.json and
model.safetensors. Nothing here knows the model code: names, shapes and layouts are those of the
published files, and the numbers come from a frozen generator, bit for bit the same everywhere.

Sizes are chosen so that no two axes agree by accident (transposed, tiled or swapped heads show),
and no norm weight, bias, `A_log` or `dt_bias` has its usual initial value.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.tiny_tokenizer import PAD_FROM, TOKENS, write_tokenizer

VOCAB = 320
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class _Numbers:
    """Uniform random arrays of a given standard deviation, exact on every machine."""

    def __init__(self, seed: int):
        self._state = np.random.RandomState(seed)  # its stream is frozen by numpy's policy

    def __call__(self, *shape: int, std: float, mean: float = 0.0) -> np.ndarray:
        unit = 2.0 * self._state.random_sample(shape) - 1.0
        return (mean + np.sqrt(3.0) * std * unit).astype(np.float32)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return self(rows, columns, std=gain / np.sqrt(columns))


def target_fields(*, tied: bool = False, vision: bool = True, mtp: bool = True, layers: int = 4,
                  interval: int = 4, hidden: int = 56, heads: int = 4, kv_heads: int = 2,
                  head_dim: int = 32, key_heads: int = 2, value_heads: int = 4, key_dim: int = 16,
                  value_dim: int = 24, intermediate: int = 88, max_positions: int = 4096,
                  yarn: dict | None = None, vision_depth: int = 2) -> dict:
    """The config.json of a tiny target, as a dict; `layers` in groups of `interval`, the last of
    each group full attention. `yarn` holds rope fields (factor, ...) to add."""
    kinds = ["linear_attention", "full_attention"]
    half = head_dim // 8  # frequencies: a quarter of the head is rotated
    section = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
            "mrope_section": section, "mrope_interleaved": True}
    text = {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "dtype": "bfloat16", "eos_token_id": TOKENS["<|endoftext|>"],
        "full_attention_interval": interval, "head_dim": head_dim, "hidden_act": "silu",
        "hidden_size": hidden, "initializer_range": 0.02, "intermediate_size": intermediate,
        "layer_types": [kinds[(i + 1) % interval == 0] for i in range(layers)],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": key_dim,
        "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads,
        "linear_value_head_dim": value_dim, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": max_positions, "mlp_only_layers": [],
        "model_type": "qwen3_5_text", "mtp_num_hidden_layers": int(mtp),
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": heads,
        "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied, "use_cache": True, "vocab_size": VOCAB,
        "rope_parameters": {**rope, **({"rope_type": "yarn", **yarn} if yarn else {})},
    }
    fields = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "image_token_id": TOKENS["<|image_pad|>"], "video_token_id": TOKENS["<|video_pad|>"],
        "vision_start_token_id": TOKENS["<|vision_start|>"],
        "vision_end_token_id": TOKENS["<|vision_end|>"],
        "text_config": text, "tie_word_embeddings": tied, "transformers_version": "5.17.0",
    }
    if vision:
        fields["vision_config"] = {
            "deepstack_visual_indexes": [], "depth": vision_depth,
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": 40, "in_channels": 3,
            "initializer_range": 0.02, "intermediate_size": 52, "model_type": "qwen3_5",
            "num_heads": 2, "num_position_embeddings": 36, "out_hidden_size": hidden,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    else:
        fields["architectures"] = ["Qwen3_5ForCausalLM"]
    return fields


def write_target(folder: Path, *, seed: int = 0, dtype: str = "float32", shards: int = 2,
                 f32_states: bool = True, letters: int = 0, **sizes) -> dict:
    """Write a whole tiny target folder; `sizes` go to `target_fields`. Returns the config.

    In bfloat16, `A_log` and the GDN norm stay float32 as in Qwen3.5-9B, unless `f32_states` is
    false (as in Qwen3.8-27B). Without vision the text-only class and its names are written.
    With `letters` the text is made of that many letters (a, b, ...) almost alone, so that the
    drafts of a random drafter are sometimes right; needs an untied head.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fields = target_fields(**sizes)
    tensors = target_tensors(fields, seed)
    if letters:
        others = np.setdiff1d(np.arange(VOCAB), ord("a") + np.arange(letters))
        tensors["lm_head.weight"][others] *= 0.05
    for name, value in tensors.items():
        keep = f32_states and name.endswith(("A_log", "linear_attn.norm.weight"))
        tensors[name] = value if keep else value.astype(DTYPES[dtype])
    _write_json(folder / "config.json", fields)
    _write_shards(folder, tensors, shards)
    write_tokenizer(folder)
    ends = [TOKENS["<|im_end|>"], TOKENS["<|endoftext|>"]]
    _write_json(folder / "generation_config.json", {
        "bos_token_id": TOKENS["<|endoftext|>"], "do_sample": True, "eos_token_id": ends,
        "pad_token_id": TOKENS["<|endoftext|>"], "temperature": 1.0, "top_k": 20, "top_p": 0.95})
    if fields.get("vision_config"):
        both = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
                "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
                "processor_class": "Qwen3VLProcessor"}
        _write_json(folder / "preprocessor_config.json", {
            **both, "size": {"shortest_edge": 64 * 64, "longest_edge": 160 * 160},
            "image_processor_type": "Qwen2VLImageProcessorFast"})
        _write_json(folder / "video_preprocessor_config.json", {
            **both, "size": {"shortest_edge": 64 * 64, "longest_edge": 8 * 96 * 96},
            "video_processor_type": "Qwen3VLVideoProcessor"})
    return fields


def target_tensors(fields: dict, seed: int) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint that `fields` describes, float32, by its stored name."""
    draw, text = _Numbers(seed), fields["text_config"]
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    size, vision = text["head_dim"], fields.get("vision_config")
    queries, keys = (size * text[f"num_{n}_heads"] for n in ("attention", "key_value"))
    key_dim = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    value_heads = text["linear_num_value_heads"]
    value_dim = value_heads * text["linear_value_head_dim"]
    channels = 2 * key_dim + value_dim

    def decoder_layer(at: str, kind: str) -> dict[str, np.ndarray]:
        out = {"input_layernorm.weight": draw(hidden, std=0.3),
               "post_attention_layernorm.weight": draw(hidden, std=0.3),
               "mlp.gate_proj.weight": draw.matrix(inner, hidden, 1.5),
               "mlp.up_proj.weight": draw.matrix(inner, hidden),
               "mlp.down_proj.weight": draw.matrix(hidden, inner)}
        if kind == "full_attention":
            out |= {"self_attn.q_proj.weight": draw.matrix(2 * queries, hidden),
                    "self_attn.k_proj.weight": draw.matrix(keys, hidden),
                    "self_attn.v_proj.weight": draw.matrix(keys, hidden),
                    "self_attn.o_proj.weight": draw.matrix(hidden, queries, 2.0),
                    "self_attn.q_norm.weight": draw(size, std=0.4, mean=0.5),
                    "self_attn.k_norm.weight": draw(size, std=0.4, mean=0.5)}
        else:
            out |= {"linear_attn.in_proj_qkv.weight": draw.matrix(channels, hidden),
                    "linear_attn.in_proj_z.weight": draw.matrix(value_dim, hidden),
                    "linear_attn.in_proj_b.weight": draw.matrix(value_heads, hidden),
                    "linear_attn.in_proj_a.weight": draw.matrix(value_heads, hidden),
                    "linear_attn.conv1d.weight": draw(channels, 1, 4, std=0.6),
                    "linear_attn.A_log": draw(value_heads, std=1.2, mean=-2.0),
                    "linear_attn.dt_bias": draw(value_heads, std=1.0),
                    "linear_attn.norm.weight": draw(text["linear_value_head_dim"], std=0.3,
                                                    mean=0.9),
                    "linear_attn.out_proj.weight": draw.matrix(hidden, value_dim, 2.0)}
        return {f"{at}.{name}": value for name, value in out.items()}

    root = "model.language_model" if vision else "model"
    embed = draw(VOCAB, hidden, std=0.5)
    _quieten(embed)
    tensors = {f"{root}.embed_tokens.weight": embed,
               f"{root}.norm.weight": draw(hidden, std=0.3)}
    if not fields["tie_word_embeddings"]:
        head = draw.matrix(VOCAB, hidden, 3.0)
        _quieten(head)
        tensors["lm_head.weight"] = head
    for i, kind in enumerate(text["layer_types"]):
        tensors |= decoder_layer(f"{root}.layers.{i}", kind)
    if vision:
        tensors |= _vision_tensors(draw, vision)
    if text["mtp_num_hidden_layers"]:
        tensors |= {"mtp.fc.weight": draw.matrix(hidden, 2 * hidden),
                    "mtp.norm.weight": draw(hidden, std=0.3),
                    "mtp.pre_fc_norm_embedding.weight": draw(hidden, std=0.3),
                    "mtp.pre_fc_norm_hidden.weight": draw(hidden, std=0.3)}
        tensors |= decoder_layer("mtp.layers.0", "full_attention")
    return tensors


def _quieten(rows: np.ndarray) -> None:
    """Make padding rows and vision marks improbable, so that greedy text never holds them."""
    silent = [i for name, i in TOKENS.items() if "vision" in name or name.endswith("_pad|>")]
    rows[[*silent, *range(PAD_FROM, len(rows))]] *= 0.02


def _vision_tensors(draw: _Numbers, vision: dict) -> dict[str, np.ndarray]:
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    merged, out = width * vision["spatial_merge_size"] ** 2, vision["out_hidden_size"]

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> dict[str, np.ndarray]:
        return {f"{name}.weight": draw.matrix(rows, columns, gain),
                f"{name}.bias": draw(rows, std=0.3)}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {f"{name}.weight": draw(width, std=0.3, mean=1.1),
                f"{name}.bias": draw(width, std=0.3)}

    patch = (3, vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    tensors = {
        "patch_embed.proj.weight": draw(width, *patch, std=2.0 / np.sqrt(np.prod(patch))),
        "patch_embed.proj.bias": draw(width, std=0.3),
        "pos_embed.weight": draw(vision["num_position_embeddings"], width, std=0.7)}
    for i in range(vision["depth"]):
        at = f"blocks.{i}"
        tensors |= {**norm(f"{at}.norm1"), **norm(f"{at}.norm2"),
                    **linear(f"{at}.attn.qkv", 3 * width, width, 1.5),
                    **linear(f"{at}.attn.proj", width, width),
                    **linear(f"{at}.mlp.linear_fc1", inner, width),
                    **linear(f"{at}.mlp.linear_fc2", width, inner)}
    tensors |= {**norm("merger.norm"), **linear("merger.linear_fc1", merged, merged, 1.5),
                **linear("merger.linear_fc2", out, merged, 1.5)}
    return {f"model.visual.{name}": value for name, value in tensors.items()}


def write_drafter(folder: Path, target: dict, *, seed: int = 1, dtype: str = "float32",
                  layers: int = 3, taps: tuple[int, ...] = (0, 2),
                  layer_types: tuple[str, ...] | None = None, window: int | None = None,
                  is_causal: bool | None = None, block_size: int = 16, heads: int = 6,
                  kv_heads: int = 2, head_dim: int = 20, intermediate: int = 76,
                  architecture: str = "DFlashDraftModel", yarn: dict | None = None) -> dict:
    """Write a tiny drafter for the target whose config is `target`. Returns its config.

    `layer_types` holds "full_attention" and "sliding_attention" (with `window`), by default all
    full; `is_causal` is left out of the file when None.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = target["text_config"]
    kinds = list(layer_types or ["full_attention"] * layers)
    fields = {
        "architectures": [architecture], "attention_bias": False, "attention_dropout": 0.0,
        "block_size": block_size, "bos_token_id": None, "dtype": "bfloat16",
        "eos_token_id": TOKENS["<|endoftext|>"], "head_dim": head_dim, "hidden_act": "silu",
        "dflash_config": {"block_size": block_size, "mask_token_id": TOKENS["<|audio_start|>"],
                          "num_target_layers": text["num_hidden_layers"],
                          "target_layer_ids": list(taps)},
        "hidden_size": text["hidden_size"], "initializer_range": 0.02,
        "intermediate_size": intermediate, "layer_types": kinds,
        "max_position_embeddings": text["max_position_embeddings"], "max_window_layers": layers,
        "model_type": "qwen3", "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads, "num_target_layers": text["num_hidden_layers"],
        "rms_norm_eps": 1e-6, "rope_theta": 10000000,
        "rope_scaling": {"rope_type": "yarn", **yarn} if yarn else None, "sliding_window": window,
        "tie_word_embeddings": True, "use_cache": True,
        "use_sliding_window": "sliding_attention" in kinds, "vocab_size": text["vocab_size"]}
    if is_causal is not None:
        fields["is_causal"] = is_causal
    _write_json(folder / "config.json", fields)
    tensors = drafter_tensors(fields, seed)
    save_file({n: t.astype(DTYPES[dtype]) for n, t in tensors.items()},
              folder / "model.safetensors", metadata={"format": "pt"})
    return fields


def drafter_tensors(fields: dict, seed: int) -> dict[str, np.ndarray]:
    """Every tensor of the drafter that `fields` describes, float32, by its stored name."""
    draw, hidden, inner = _Numbers(seed), fields["hidden_size"], fields["intermediate_size"]
    size = fields["head_dim"]
    queries, keys = (size * fields[f"num_{n}_heads"] for n in ("attention", "key_value"))
    taps = len(fields["dflash_config"]["target_layer_ids"])
    tensors = {"fc.weight": draw.matrix(hidden, taps * hidden),
               "hidden_norm.weight": draw(hidden, std=0.3, mean=1.1),
               "norm.weight": draw(hidden, std=0.3, mean=1.1)}
    for i in range(fields["num_hidden_layers"]):
        layer = {"input_layernorm.weight": draw(hidden, std=0.3, mean=1.1),
                 "post_attention_layernorm.weight": draw(hidden, std=0.3, mean=1.1),
                 "self_attn.q_proj.weight": draw.matrix(queries, hidden),
                 "self_attn.k_proj.weight": draw.matrix(keys, hidden),
                 "self_attn.v_proj.weight": draw.matrix(keys, hidden),
                 "self_attn.o_proj.weight": draw.matrix(hidden, queries, 2.0),
                 "self_attn.q_norm.weight": draw(size, std=0.4, mean=1.6),
                 "self_attn.k_norm.weight": draw(size, std=0.4, mean=1.6),
                 "mlp.gate_proj.weight": draw.matrix(inner, hidden, 1.5),
                 "mlp.up_proj.weight": draw.matrix(inner, hidden),
                 "mlp.down_proj.weight": draw.matrix(hidden, inner)}
        tensors |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return tensors


def _write_shards(folder: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    """Deal the tensors to the shards one by one, so that every layer is spread over all."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model.safetensors-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    places = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file,
                  metadata={"format": "pt"})
    total = float(sum(t.nbytes for t in tensors.values()))  # a float, as published for the 27B
    _write_json(folder / "model.safetensors.index.json",
                {"metadata": {"total_size": total}, "weight_map": places})


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
