"""What a checkpoint's `config.json` says, as frozen dataclasses; the presets; the pair contract.

In: the JSON of a target (`qwen3_5`) or a drafter (`DFlashDraftModel`, `MMFlashDraftModel`).
Out: `TargetConfig`, `VisionConfig`, `DrafterConfig`. Nothing here knows arrays or files' tensors.
Field names are those of HF; unknown keys are ignored, known but unsupported ones are refused.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, TypeGuard, cast

TARGET_CLASSES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
DRAFTER_CLASSES = ("DFlashDraftModel", "MMFlashDraftModel")
MIXERS = ("linear_attention", "full_attention")
DRAFTER_LAYERS = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding over `dim` of a head's dimensions; `yarn` holds HF's yarn fields."""

    theta: float
    dim: int
    yarn: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Vision tower of Qwen3.5 (HF `Qwen3_5VisionConfig`)."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    in_channels: int
    num_position_embeddings: int
    out_hidden_size: int
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Numbers in one patch row: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Text decoder and, unless `vision` is None, vision tower of a Qwen3.5-family target."""

    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope: RopeConfig
    mrope_section: tuple[int, int, int]
    mtp_num_hidden_layers: int
    eos_token_ids: tuple[int, ...]
    image_token_id: int | None
    video_token_id: int | None
    vision_start_token_id: int | None
    vision_end_token_id: int | None
    vision: VisionConfig | None

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.layer_types) if t == "full_attention")

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.layer_types) if t == "linear_attention")

    @property
    def key_dim(self) -> int:
        """Width of all GDN keys (and of all queries)."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all GDN values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the GDN convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Block-diffusion drafter of the DFlash architecture."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    windows: tuple[int | None, ...]  # one a layer; None: full attention
    causal: tuple[bool, ...]  # one a layer: causal inside the block

    @property
    def num_hidden_layers(self) -> int:
        return len(self.windows)

    def parameter_count(self) -> int:
        """Parameters of the checkpoint; embedding and head are the target's and not counted."""
        heads = self.num_attention_heads + self.num_key_value_heads
        attention = 2 * self.hidden_size * heads * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        layer = attention + mlp + 2 * self.hidden_size + 2 * self.head_dim
        fuse = len(self.target_layer_ids) * self.hidden_size**2
        return self.num_hidden_layers * layer + fuse + 2 * self.hidden_size


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field and both values."""


def read_json(path: Path, kind: type = dict) -> Any:
    """The JSON object (or list) in `path`. Raises ConfigError naming the file if it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(value, kind):
        expected = "object" if kind is dict else kind.__name__
        raise ConfigError(f"{path}: expected a JSON {expected}, found {type(value).__name__}")
    return value


def _parser(parse):
    """A field of the wrong JSON type ends as a ConfigError too, wherever it is first used."""
    @functools.wraps(parse)
    def checked(fields: dict, where: str = "config.json"):
        try:
            return parse(fields, where)
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
            raise ConfigError(f"{where}: a field has the wrong type: {error}") from error
    return checked


def _need(fields: dict, name: str, where: str, kind: type | tuple[type, ...] = int) -> Any:
    value: Any = fields.get(name)
    if value is None:
        raise ConfigError(f"{where}: `{name}` is missing")
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{where}: `{name}` is {value!r}, expected {_kind_name(kind)}")
    if kind is int and cast(int, value) <= 0:
        raise ConfigError(f"{where}: `{name}` is {value}, expected a positive number")
    return value


def _kind_name(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(fields: dict, name: str, where: str, above: float = 0) -> float:
    """A finite number greater than `above`."""
    value: Any = fields.get(name)
    if (not isinstance(value, int | float) or isinstance(value, bool)
            or not above < value < math.inf):
        raise ConfigError(f"{where}: `{name}` is {value!r}, expected a number above {above}")
    return value


def _rope_fields(fields: dict) -> dict:
    """`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    outer = {n: fields[n] for n in ("rope_theta", "partial_rotary_factor")
             if fields.get(n) is not None}
    inner = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    return {**outer, **{n: value for n, value in inner.items() if value is not None}}


def _rope(fields: dict, head_dim: int, default_partial: float, where: str) -> RopeConfig:
    """An explicit `rope_dim` supersedes `partial_rotary_factor`, as in SGLang."""
    rope = _rope_fields(fields)
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(_positive(rope, "rope_theta", where, above=int(kind == "yarn")))  # yarn: log > 0
    if "rope_dim" in rope:
        dim, source = rope["rope_dim"], "rope_dim"
    else:
        rope.setdefault("partial_rotary_factor", default_partial)
        dim = int(head_dim * _positive(rope, "partial_rotary_factor", where))
        source = f"partial_rotary_factor {rope['partial_rotary_factor']} of head_dim {head_dim}"
    if not _is_int(dim) or dim % 2 or not 0 < dim <= head_dim:
        raise ConfigError(f"{where}: {source} gives {dim!r} rotated dimensions, expected a "
                          f"positive even number up to head_dim {head_dim}")
    if kind == "yarn":
        at = f"{where}: rope_parameters"
        names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
                 "attention_factor", "mscale", "mscale_all_dim", "truncate")
        _need(rope, "factor", at, (int, float))
        yarn = {n: rope[n] for n in names if n in rope}
        for name in yarn.keys() - {"truncate"}:
            if yarn[name] != 0 or not name.startswith("mscale"):  # there 0 says: none
                _positive(rope, name, at)
        if not isinstance(yarn.get("truncate", True), bool):
            raise ConfigError(f"{at}: `truncate` is {yarn['truncate']!r}, expected bool")
        yarn.setdefault("original_max_position_embeddings", fields.get("max_position_embeddings"))
        return RopeConfig(theta, dim, tuple(sorted(yarn.items())))
    if kind not in ("default", "mrope"):
        raise ConfigError(f"{where}: rope_type {kind!r} is not supported, expected default or yarn")
    return RopeConfig(theta, dim)


def _mrope_section(fields: dict, rope: RopeConfig, where: str) -> tuple[int, int, int]:
    given = _rope_fields(fields)
    if given.get("mrope_interleaved", True) is not True:
        raise ConfigError(f"{where}: mrope_interleaved is {given['mrope_interleaved']!r}, only "
                          "True is supported")
    section = given.get("mrope_section", [11, 11, 10])
    if (not isinstance(section, list) or len(section) != 3
            or not all(_is_int(n) and n >= 0 for n in section)):
        raise ConfigError(f"{where}: mrope_section is {section!r}, expected three whole numbers")
    if sum(section) != rope.dim // 2:
        raise ConfigError(f"{where}: mrope_section {section} sums to {sum(section)}, but the "
                          f"rotary embedding has {rope.dim // 2} frequencies")
    return cast(tuple[int, int, int], tuple(section))


def _refuse_quantised(fields: dict, where: str) -> None:
    for name in ("quantization_config", "compression_config"):
        if fields.get(name):
            method = fields[name].get("quant_method", "unknown") if isinstance(
                fields[name], dict) else fields[name]
            raise ConfigError(
                f"{where}: `{name}` names quantised weights ({method}); "
                "only bfloat16, float16 and float32 checkpoints are supported")


def _vision(fields: dict, text_hidden: int, where: str) -> VisionConfig:
    where = f"{where}: vision_config"
    if fields.get("deepstack_visual_indexes"):
        raise ConfigError(f"{where}: deepstack_visual_indexes is "
                          f"{fields['deepstack_visual_indexes']}, expected an empty list")
    if fields.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ConfigError(f"{where}: hidden_act is {fields['hidden_act']!r}, "
                          "expected 'gelu_pytorch_tanh'")
    names = [f.name for f in dataclasses.fields(VisionConfig) if f.name != "rope_theta"]
    vision = VisionConfig(**{n: _need(fields, n, where) for n in names})
    if vision.out_hidden_size != text_hidden:
        raise ConfigError(f"{where}: out_hidden_size is {vision.out_hidden_size}, "
                          f"but the text model's hidden_size is {text_hidden}")
    if vision.hidden_size % vision.num_heads or vision.head_dim % 4:
        raise ConfigError(f"{where}: hidden_size {vision.hidden_size} over {vision.num_heads} "
                          "heads does not give a head size that is a multiple of 4")
    if math.isqrt(vision.num_position_embeddings) ** 2 != vision.num_position_embeddings:
        raise ConfigError(f"{where}: num_position_embeddings is "
                          f"{vision.num_position_embeddings}, expected a square number")
    return vision


def _eos(*places: tuple[dict, str]) -> tuple[int, ...]:
    ids: list[int] = []
    for fields, where in places:
        value = fields.get("eos_token_id")
        here = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_int(i) for i in here):
            raise ConfigError(f"{where}: eos_token_id is {value!r}, expected an id or ids")
        ids += here
    return tuple(dict.fromkeys(ids))


@_parser
def target_config(fields: dict, where: str = "config.json") -> TargetConfig:
    """Parse the target's configuration. Raises ConfigError. Source: HF `Qwen3_5Config`."""
    _refuse_quantised(fields, where)
    names = fields.get("architectures") or []
    if names and not set(names) & set(TARGET_CLASSES):
        raise ConfigError(f"{where}: architectures is {names}, expected {TARGET_CLASSES[0]}")
    if not names and fields.get("model_type") not in ("qwen3_5", "qwen3_5_text"):
        raise ConfigError(f"{where}: model_type is {fields.get('model_type')!r}, "
                          "expected 'qwen3_5'")
    nested = isinstance(fields.get("text_config"), dict)
    text = fields["text_config"] if nested else fields
    at = f"{where}: text_config" if nested else where
    _refuse_quantised(text, at)
    tied = [c["tie_word_embeddings"] for c in (fields, text) if
            c.get("tie_word_embeddings") is not None]
    if not tied:
        raise ConfigError(f"{where}: `tie_word_embeddings` is missing, here and in text_config")
    if len(set(tied)) > 1:
        raise ConfigError(f"{where}: tie_word_embeddings is {tied[0]} at the top level and "
                          f"{tied[1]} in text_config")
    hidden = _need(text, "hidden_size", at)
    layers = _need(text, "num_hidden_layers", at)
    types = text.get("layer_types")
    if types is None:
        every = _need(text, "full_attention_interval", at)
        types = [MIXERS[(i + 1) % every == 0] for i in range(layers)]
    if len(types) != layers or set(types) - set(MIXERS):
        raise ConfigError(f"{at}: layer_types has {len(types)} entries of kinds "
                          f"{sorted(set(types))}, expected {layers} of {list(MIXERS)}")
    if "full_attention" not in types:
        raise ConfigError(f"{at}: layer_types has no full_attention, expected at least one")
    mtp = text.get("mtp_num_hidden_layers")
    mtp = 0 if mtp is None else mtp
    if not _is_int(mtp) or mtp < 0:
        raise ConfigError(f"{at}: mtp_num_hidden_layers is {mtp!r}, expected a whole number")
    for name, want in (("attention_bias", False), ("attn_output_gate", True),
                       ("hidden_act", "silu"), ("mamba_ssm_dtype", "float32")):
        if text.get(name, want) != want:
            raise ConfigError(f"{at}: {name} is {text[name]!r}, only {want!r} is supported")
    head_dim = _need(text, "head_dim", at)
    rope = _rope(text, head_dim, 0.25, at)
    section = _mrope_section(text, rope, at)
    dims = {n: _need(text, n, at) for n in (
        "num_attention_heads", "num_key_value_heads", "linear_num_key_heads",
        "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim", "intermediate_size", "vocab_size", "max_position_embeddings")}
    for many, few in (("num_attention_heads", "num_key_value_heads"),
                      ("linear_num_value_heads", "linear_num_key_heads")):
        if dims[many] % dims[few]:
            raise ConfigError(f"{at}: {many} {dims[many]} is not a multiple of {few} {dims[few]}")
    vision = fields.get("vision_config")
    vision_ids: dict[str, Any] = {n: fields.get(n) for n in ("image_token_id", "video_token_id",
                                             "vision_start_token_id", "vision_end_token_id")}
    if vision:
        for name in vision_ids:
            _need(fields, name, where)
    return TargetConfig(
        hidden_size=hidden, layer_types=tuple(types), head_dim=head_dim, **dims,
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)), tie_word_embeddings=tied[0],
        rope=rope, mrope_section=section,
        mtp_num_hidden_layers=mtp,
        eos_token_ids=_eos((text, at), (fields, where)),
        **vision_ids, vision=_vision(vision, hidden, where) if vision else None)


@_parser
def drafter_config(fields: dict, where: str = "config.json") -> DrafterConfig:
    """Parse a drafter's configuration; each field at top level or in `dflash_config`, which
    wins, except over `is_causal`. Raises ConfigError. Sources: z-lab `dflash`, SGLang
    `dflash_utils`, vLLM `qwen3_dflash`."""
    _refuse_quantised(fields, where)
    names = fields.get("architectures") or []
    if not set(names) & set(DRAFTER_CLASSES):
        raise ConfigError(f"{where}: architectures is {names}, expected one of "
                          f"{list(DRAFTER_CLASSES)}")
    own = fields.get("dflash_config") or {}
    both = {**fields, **{k: v for k, v in own.items() if v is not None}}
    exotic = ("attention_sink_bias", "attention_value_scale", "output_multiplier", "t2d", "d2t",
              "final_logit_softcapping", "input_embedding_scale", "projector_type",
              "draft_vocab_size", "selector_rank", "conv_group_size", "sample_from_anchor",
              "shift_label", "attention_bias")
    scales = ("attention_value_scale", "output_multiplier", "input_embedding_scale")
    for name in exotic:
        value = both.get(name)
        absent = (None, False, 0) if name not in scales else (None, 1)  # a scale of 1 does nothing
        if value is not False and (value is True or value not in absent):
            raise ConfigError(f"{where}: {name} is {both[name]!r}, which this drafter does not "
                              "support (DFlash and MMFlash drafters have none)")
    if both.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act is {both['hidden_act']!r}, expected 'silu'")
    dims = {n: _need(both, n, where) for n in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "max_position_embeddings", "block_size", "num_target_layers")}
    if dims["num_attention_heads"] % dims["num_key_value_heads"]:
        raise ConfigError(f"{where}: num_attention_heads {dims['num_attention_heads']} is not a "
                          f"multiple of num_key_value_heads {dims['num_key_value_heads']}")
    layers = _need(both, "num_hidden_layers", where)
    mask = both.get("mask_token_id")
    if not _is_int(mask) or not 0 <= mask < dims["vocab_size"]:
        raise ConfigError(f"{where}: mask_token_id is {mask!r}, expected an id below "
                          f"vocab_size {dims['vocab_size']}")
    taps = _need(both, "target_layer_ids", where, list)
    if not taps or any(not _is_int(t) or not 0 <= t < dims["num_target_layers"]
                       for t in taps) or len(set(taps)) != len(taps):
        raise ConfigError(f"{where}: target_layer_ids is {taps}, expected distinct ids below "
                          f"num_target_layers {dims['num_target_layers']}")
    windows, causal = _drafter_layers(fields, own, both, layers, where)
    head_dim = both.get("head_dim")
    if head_dim is None:
        head_dim = dims["hidden_size"] // dims["num_attention_heads"]
    if not _is_int(head_dim) or head_dim <= 0 or head_dim % 2:
        raise ConfigError(f"{where}: head_dim is {head_dim!r}, expected a positive even number")
    return DrafterConfig(
        **dims, head_dim=head_dim, rms_norm_eps=float(both.get("rms_norm_eps", 1e-6)),
        rope=_rope(both, head_dim, 1.0, where), mask_token_id=mask, target_layer_ids=tuple(taps),
        windows=windows, causal=causal)


def _drafter_layers(fields: dict, own: dict, both: dict, layers: int, where: str):
    """Window and causality of each layer. `layer_types` is authoritative (R20)."""
    kinds = both.get("layer_types")
    swa = both.get("use_swa", False)
    if not isinstance(swa, bool | None):
        raise ConfigError(f"{where}: use_swa is {swa!r}, expected true or false")
    sliding = "sliding_attention" if swa else "full_attention"
    kinds = [sliding] * layers if kinds is None else kinds
    if len(kinds) != layers or set(kinds) - set(DRAFTER_LAYERS):
        raise ConfigError(f"{where}: layer_types has {len(kinds)} entries of kinds "
                          f"{sorted(set(kinds))}, expected {layers} of {list(DRAFTER_LAYERS)}")
    window = both.get("swa_window_size")
    window = both.get("sliding_window") if window is None else window
    if "sliding_attention" in kinds and (not _is_int(window) or window <= 0):
        raise ConfigError(f"{where}: layer_types has sliding_attention, but sliding_window is "
                          f"{window!r}, expected a positive number")
    given = [(name, place[name]) for place, name in (
        (fields, "is_causal"), (own, "is_causal"), (own, "causal"), (fields, "causal"))
        if place.get(name) is not None]
    for name, value in given:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: {name} is {value!r}, expected true or false")
    stated = given[0][1] if given else None
    slides = [kind == "sliding_attention" for kind in kinds]
    return (tuple(window if s else None for s in slides),
            tuple(s if stated is None else stated for s in slides))


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Raise ConfigError, naming both values, if the drafter was not made for the target (R40)."""
    wants = (("hidden_size", drafter.hidden_size, target.hidden_size),
             ("vocab_size", drafter.vocab_size, target.vocab_size),
             ("num_target_layers", drafter.num_target_layers, target.num_hidden_layers))
    wrong = [f"the drafter's {name} is {mine}, the target's is {theirs}"
             for name, mine, theirs in wants if mine != theirs]
    if wrong:
        raise ConfigError("drafter and target are no pair: " + "; ".join(wrong))


def default_taps(draft_layers: int, target_layers: int) -> tuple[int, ...]:
    """Evenly spaced taps from 1 to target_layers - 3, as z-lab's `dflash` chooses them."""
    if draft_layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(draft_layers))


def _preset(hidden: int, intermediate: int, layers: int, heads: int, values: int) -> TargetConfig:
    vision = VisionConfig(27, 1152, 16, 4304, 16, 2, 2, 3, 2304, hidden)
    return TargetConfig(
        hidden_size=hidden, intermediate_size=intermediate,
        layer_types=tuple(MIXERS[(i + 1) % 4 == 0] for i in range(layers)),
        num_attention_heads=heads, num_key_value_heads=4, head_dim=256,
        linear_num_key_heads=16, linear_num_value_heads=values, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, vocab_size=248320, rms_norm_eps=1e-6,
        tie_word_embeddings=False, max_position_embeddings=262144, rope=RopeConfig(1e7, 64),
        mrope_section=(11, 11, 10), mtp_num_hidden_layers=1, eos_token_ids=(248044,),
        image_token_id=248056, video_token_id=248057, vision_start_token_id=248053,
        vision_end_token_id=248054, vision=vision)


def drafter_preset(target: TargetConfig, draft_layers: int = 5) -> DrafterConfig:
    """The published MMFlash geometry for `target` (model cards; 32/8 heads of 128)."""
    return DrafterConfig(
        hidden_size=target.hidden_size, intermediate_size=target.intermediate_size,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=target.vocab_size,
        rms_norm_eps=1e-6, max_position_embeddings=262144, rope=RopeConfig(1e7, 128),
        block_size=16, mask_token_id=248070,
        target_layer_ids=default_taps(draft_layers, target.num_hidden_layers),
        num_target_layers=target.num_hidden_layers, windows=(None,) * draft_layers,
        causal=(False,) * draft_layers)


PRESETS = {
    "qwen3.5-9b": _preset(4096, 12288, 32, 16, 32),
    "qwen3.8-27b": _preset(5120, 17408, 64, 24, 48),
}
