"""Configurations as they are published and as they are broken: what `config.py` makes of them.

The published files are written out here, as the specification of the checkpoints tells them, so
that the presets and the parsers are checked against something that neither of them made.
"""

import copy
import dataclasses
import json
import re

import pytest

from mmflash_jax.config import (
    PRESETS,
    ConfigError,
    RopeConfig,
    check_pair,
    default_taps,
    drafter_config,
    drafter_preset,
    read_json,
    target_config,
)
from tests.tiny import target_fields

KINDS = ("linear_attention", "full_attention")
SIZES = {  # hidden, MLP, layers, query heads, GDN value heads
    "qwen3.5-9b": (4096, 12288, 32, 16, 32), "qwen3.8-27b": (5120, 17408, 64, 24, 48)}


def published_target(preset: str) -> dict:
    hidden, mlp, layers, heads, values = SIZES[preset]
    text = {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": hidden, "initializer_range": 0.02,
        "intermediate_size": mlp, "layer_types": [KINDS[i % 4 == 3] for i in range(layers)],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": values, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": heads,
        "num_hidden_layers": layers, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                            "partial_rotary_factor": 0.25, "rope_theta": 10000000,
                            "rope_type": "default"},
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320}
    vision = {
        "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152, "in_channels": 3, "initializer_range": 0.02,
        "intermediate_size": 4304, "model_type": "qwen3_5", "num_heads": 16,
        "num_position_embeddings": 2304, "out_hidden_size": hidden, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2}
    if preset == "qwen3.8-27b":
        text["output_gate_type"] = "swish"  # names what is so in the 9B as well
    return {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053,
            "vision_end_token_id": 248054, "text_config": text, "vision_config": vision,
            "tie_word_embeddings": False, "transformers_version": "5.17.0"}


def published_drafter(preset: str = "qwen3.5-9b") -> dict:
    hidden, mlp, layers, *_ = SIZES[preset]
    taps = {32: [1, 8, 15, 22, 29], 64: [1, 16, 31, 46, 61]}[layers]
    return {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16",
            "attention_bias": False, "attention_dropout": 0.0, "block_size": 16,
            "bos_token_id": 248043, "eos_token_id": 248044, "pad_token_id": None,
            "dflash_config": {"mask_token_id": 248070, "target_layer_ids": taps,
                              "num_target_layers": layers},
            "head_dim": 128, "hidden_act": "silu", "hidden_size": hidden,
            "initializer_range": 0.02, "intermediate_size": mlp,
            "layer_types": ["full_attention"] * 5, "max_position_embeddings": 262144,
            "max_window_layers": 5, "num_attention_heads": 32, "num_hidden_layers": 5,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None,
            "rope_theta": 10000000, "sliding_window": None, "tie_word_embeddings": True,
            "transformers_version": "4.57.1", "use_cache": True, "use_sliding_window": False,
            "vocab_size": 248320}


def changed(fields: dict, *path_and_value) -> dict:
    """A copy with one field set; None removes it."""
    *path, name, value = path_and_value
    fields = inner = copy.deepcopy(fields)
    for key in path:
        inner = inner[key]
    if value is None:
        inner.pop(name, None)
    else:
        inner[name] = value
    return fields


# --- targets --------------------------------------------------------------------------------------

@pytest.mark.parametrize("preset", PRESETS)
def test_published_targets_are_the_presets(preset):
    config = target_config(published_target(preset))
    assert config == PRESETS[preset]
    assert (config.key_dim, config.value_dim, config.conv_dim) == (
        (2048, 4096, 8192) if preset == "qwen3.5-9b" else (2048, 6144, 10240))
    assert config.attention_layers == tuple(range(3, SIZES[preset][2], 4))
    assert len(config.gdn_layers) == 3 * len(config.attention_layers)
    assert config.vision.head_dim == 72 and config.vision.patch_dim == 1536


def test_what_is_tiny_is_read_as_given():
    config = target_config(target_fields(layers=6, interval=3, tied=True))
    assert config.layer_types == (KINDS[0], KINDS[0], KINDS[1]) * 2
    assert config.tie_word_embeddings and config.vision.depth == 2
    assert config.rope == RopeConfig(1e7, 8) and sum(config.mrope_section) == 4
    assert config.eos_token_ids == (256,) and config.mtp_num_hidden_layers == 1


def test_a_text_only_target_nested_and_flat():
    """The class for text alone, as published by tools that cut the vision tower off: fields in
    text_config, or all at the top level."""
    nested = target_fields(vision=False)
    config = target_config(nested)
    assert config.vision is None
    flat = {**nested["text_config"], "architectures": nested["architectures"],
            "model_type": "qwen3_5_text"}
    assert target_config(flat) == dataclasses.replace(
        config, image_token_id=None, video_token_id=None, vision_start_token_id=None,
        vision_end_token_id=None)
    del flat["architectures"]
    assert target_config(flat).hidden_size == config.hidden_size


def test_a_tied_head_is_stated_at_either_place_and_never_twice_differently():
    fields = published_target("qwen3.5-9b")
    tied = changed(changed(fields, "tie_word_embeddings", True),
                   "text_config", "tie_word_embeddings", None)
    assert target_config(tied).tie_word_embeddings
    tied = changed(changed(fields, "tie_word_embeddings", None),
                   "text_config", "tie_word_embeddings", True)
    assert target_config(tied).tie_word_embeddings
    with pytest.raises(ConfigError, match="tie_word_embeddings is True at the top .* False in"):
        target_config(changed(fields, "tie_word_embeddings", True))


def test_layer_types_may_follow_from_the_interval():
    fields = changed(published_target("qwen3.8-27b"), "text_config", "layer_types", None)
    assert target_config(fields) == PRESETS["qwen3.8-27b"]


def test_rotary_fields_of_older_writers():
    """`rope_theta` and `partial_rotary_factor` beside `rope_scaling`, as before transformers 5."""
    fields = published_target("qwen3.5-9b")
    text = fields["text_config"]
    del text["rope_parameters"]
    text |= {"rope_theta": 10000000, "rope_scaling": {"type": "mrope",
                                                      "mrope_section": [11, 11, 10]}}
    assert target_config(fields) == PRESETS["qwen3.5-9b"]  # the factor's default is 0.25
    text["partial_rotary_factor"] = 0.5
    with pytest.raises(ConfigError, match="sums to 32, .* has 64 frequencies"):
        target_config(fields)


def test_yarn():
    fields = published_target("qwen3.5-9b")
    fields["text_config"]["rope_parameters"] |= {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 131072}
    rope = target_config(fields).rope
    assert (rope.theta, rope.dim) == (1e7, 64)
    assert dict(rope.yarn) == {"factor": 4.0, "original_max_position_embeddings": 131072}
    del fields["text_config"]["rope_parameters"]["original_max_position_embeddings"]
    assert dict(target_config(fields).rope.yarn)["original_max_position_embeddings"] == 262144
    del fields["text_config"]["rope_parameters"]["factor"]
    with pytest.raises(ConfigError, match="`factor` is missing"):
        target_config(fields)


@pytest.mark.parametrize("name, value", [
    ("factor", 0), ("factor", -4.0), ("factor", float("inf")), ("beta_fast", "32"),
    ("beta_slow", 0), ("beta_slow", True), ("original_max_position_embeddings", "4096"),
    ("original_max_position_embeddings", 0), ("attention_factor", []), ("mscale", "1"),
    ("truncate", "yes"), ("rope_theta", 1)])
def test_yarn_that_cannot_be_computed_is_refused(name, value):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 65536}
    drafter = changed(published_drafter(), "rope_scaling", {**yarn, name: value})
    target = published_target("qwen3.5-9b")
    target["text_config"]["rope_parameters"] |= {**yarn, name: value}
    for parse, fields in ((drafter_config, drafter), (target_config, target)):
        with pytest.raises(ConfigError, match=rf"`{name}` is {re.escape(repr(value))}, expected"):
            parse(fields)


@pytest.mark.parametrize("place", [(), ("text_config",)])
@pytest.mark.parametrize("name, value, method", [
    ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    ("quantization_config", {"bits": 4}, "unknown"),
    ("compression_config", {"quant_method": "compressed-tensors"}, "compressed-tensors")])
def test_quantised_targets_are_refused_by_name(place, name, value, method):
    fields = changed(published_target("qwen3.5-9b"), *place, name, value)
    with pytest.raises(ConfigError, match=rf"`{name}` names quantised weights \({method}\)"):
        target_config(fields)


@pytest.mark.parametrize("change, message", [
    (("architectures", ["Qwen3VLForConditionalGeneration"]),
     "Qwen3VLForConditionalGeneration.*expected Qwen3_5ForConditionalGeneration"),
    (("architectures", None), None),
    (("text_config", "hidden_size", None), "text_config: `hidden_size` is missing"),
    (("text_config", "hidden_size", "4096"), "`hidden_size` is '4096', expected int"),
    (("text_config", "hidden_size", -1), "`hidden_size` is -1, expected a positive"),
    (("text_config", "num_hidden_layers", 31), "layer_types has 32 entries .* expected 31"),
    (("text_config", "layer_types", ["mamba"] * 32), "32 entries of kinds .'mamba'"),
    (("text_config", "attention_bias", True), "attention_bias is True, only False"),
    (("text_config", "attn_output_gate", False), "attn_output_gate is False, only True"),
    (("text_config", "mamba_ssm_dtype", "bfloat16"), "'bfloat16', only 'float32'"),
    (("text_config", "num_key_value_heads", 3), "num_attention_heads 16 is not a multiple of .* 3"),
    (("text_config", "linear_num_value_heads", 24), "24 is not a multiple of .* 16"),
    (("text_config", "rope_parameters", "rope_theta", None), "`rope_theta` is None"),
    (("text_config", "rope_parameters", "rope_type", "longrope"), "'longrope' is not supported"),
    (("text_config", "rope_parameters", "mrope_section", [8, 8, 8]), "sums to 24, .* 32 freq"),
    (("text_config", "rope_parameters", "rope_theta", 0), "`rope_theta` is 0, .* above 0"),
    (("text_config", "rope_parameters", "rope_theta", True), "`rope_theta` is True"),
    (("text_config", "rope_parameters", "mrope_interleaved", False),
     "mrope_interleaved is False, only True"),
    (("text_config", "rope_parameters", "mrope_section", [16, 16]), r"\[16, 16\], expected three"),
    (("text_config", "rope_parameters", "mrope_section", [32, 1, -1]), "-1.*, expected three"),
    (("text_config", "rope_parameters", "mrope_section", "abc"), "'abc', expected three"),
    (("text_config", "rope_parameters", "partial_rotary_factor", 0), "factor` is 0, .* above 0"),
    (("text_config", "rope_parameters", "partial_rotary_factor", 1.5), "384 rotated .* 256"),
    (("text_config", "layer_types", [KINDS[0]] * 32), "has no full_attention, expected at least"),
    (("text_config", "mtp_num_hidden_layers", -1), "mtp_num_hidden_layers is -1, expected a whole"),
    (("text_config", "mtp_num_hidden_layers", "1"), "mtp_num_hidden_layers is '1'"),
    (("text_config", "mtp_num_hidden_layers", True), "mtp_num_hidden_layers is True"),
    (("text_config", "eos_token_id", [248044, "end"]), r"text_config: eos_token_id is .*'end'"),
    (("eos_token_id", 1.5), "config.json: eos_token_id is 1.5, expected an id"),
    (("image_token_id", None), "`image_token_id` is missing"),
    (("vision_config", "deepstack_visual_indexes", [8, 16]), r"is \[8, 16\], expected an empty"),
    (("vision_config", "hidden_act", "silu"), "'silu', expected 'gelu_pytorch_tanh'"),
    (("vision_config", "out_hidden_size", 5120), "is 5120, .* hidden_size is 4096"),
    (("vision_config", "num_heads", 7), "1152 over 7 heads"),
    (("vision_config", "num_position_embeddings", 2305), "2305, expected a square")])
def test_targets_that_cannot_be_run_are_refused_in_one_line(change, message):
    fields = changed(published_target("qwen3.5-9b"), *change)
    if message is None:
        assert target_config(fields) == PRESETS["qwen3.5-9b"]  # the model_type suffices
        return
    with pytest.raises(ConfigError, match=message) as caught:
        target_config(fields, "somewhere/config.json")
    assert str(caught.value).startswith("somewhere/config.json: ")
    assert "\n" not in str(caught.value)


# --- drafters -------------------------------------------------------------------------------------

@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["DFlashDraftModel", "MMFlashDraftModel"])
def test_published_drafters_are_the_presets(preset, name):
    """Under both class names; the parameter counts of the cards are checked with the tables."""
    config = drafter_config(changed(published_drafter(preset), "architectures", [name]))
    assert config == drafter_preset(PRESETS[preset])
    check_pair(PRESETS[preset], config)


@pytest.mark.parametrize("name", ["block_size", "mask_token_id", "target_layer_ids",
                                  "num_target_layers"])
def test_fields_at_either_place(name):
    fields = published_drafter()
    want = drafter_config(fields)
    inner = fields["dflash_config"]
    value = inner.pop(name, None) or fields.pop(name)
    with pytest.raises(ConfigError, match=name):
        drafter_config(fields)  # R40: nothing is guessed
    assert drafter_config({**fields, name: value}) == want
    assert drafter_config({**fields, "dflash_config": {**inner, name: value}}) == want


def test_where_two_places_differ_dflash_config_wins():
    """As in the model code that publishes them; a null there says nothing."""
    fields = changed(published_drafter(), "dflash_config", "block_size", 8)
    assert drafter_config(fields).block_size == 8
    fields["dflash_config"]["block_size"] = None
    assert drafter_config(fields).block_size == 16


def test_any_number_of_layers_and_taps():
    fields = published_drafter()
    fields |= {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
    fields["dflash_config"]["target_layer_ids"] = [1, 5, 9, 13, 17, 21, 25, 29]
    config = drafter_config(fields)
    assert config.num_hidden_layers == 6 and len(config.target_layer_ids) == 8
    assert config.parameter_count() == 1_291_904_512  # the published six-layer drafter


@pytest.mark.parametrize("layers, target, taps", [
    (5, 32, (1, 8, 15, 22, 29)), (5, 64, (1, 16, 31, 46, 61)), (5, 36, (1, 9, 17, 25, 33)),
    (8, 40, (1, 6, 11, 16, 22, 27, 32, 37)), (8, 32, (1, 5, 9, 13, 17, 21, 25, 29)),
    (1, 32, (16,)), (2, 32, (1, 29))])
def test_default_taps(layers, target, taps):
    assert default_taps(layers, target) == taps


SLIDE = ["sliding_attention"] * 4 + ["full_attention"]


def sliding(**fields) -> dict:
    return {**published_drafter(), "layer_types": SLIDE, "sliding_window": 2048, **fields}


def test_r20_windows_follow_layer_types_alone():
    """R20: sliding layers are causal unless said otherwise; other fields do not override them."""
    by_kind = (True,) * 4 + (False,)
    for fields in (sliding(), sliding(use_sliding_window=False), sliding(max_window_layers=0)):
        config = drafter_config(fields)
        assert config.windows == (2048,) * 4 + (None,) and config.causal == by_kind
    assert drafter_config({**published_drafter(), "sliding_window": 2048,
                           "use_sliding_window": True}).windows == (None,) * 5


def test_r20_causality_from_the_top_level_first():
    inner = published_drafter()["dflash_config"]
    for top, own, want in ((False, None, False), (True, None, True), (None, False, False),
                           (False, True, False)):
        fields = sliding(is_causal=top, dflash_config={**inner, "causal": own})
        assert drafter_config(fields).causal == (want,) * 5


def test_windows_named_in_dflash_config():
    fields = published_drafter()
    del fields["layer_types"]
    assert drafter_config(fields).windows == (None,) * 5
    fields["dflash_config"] |= {"use_swa": True, "swa_window_size": 1024}
    assert drafter_config(fields).windows == (1024,) * 5


def test_a_null_window_hides_no_other():
    fields = sliding(swa_window_size=None)
    fields["dflash_config"]["swa_window_size"] = None
    assert drafter_config(fields).windows == (2048,) * 4 + (None,)


def test_windows_and_causality_named_at_the_place_of_the_other():
    fields = changed(published_drafter(), "layer_types", None) | {
        "use_swa": True, "swa_window_size": 1024}
    assert drafter_config(fields).windows == (1024,) * 5
    inner = published_drafter()["dflash_config"]
    for top, own in (({"causal": False}, {}), ({}, {"is_causal": False}),
                     ({"causal": True}, {"causal": False}),
                     ({"is_causal": False}, {"causal": True}),
                     ({"causal": True}, {"is_causal": False})):
        fields = sliding(**top, dflash_config={**inner, **own})
        assert drafter_config(fields).causal == (False,) * 5


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rope_dim_supersedes_the_partial_factor(place):
    fields = changed(published_drafter(), place, {"rope_type": "default", "rope_dim": 64})
    for partial in ({}, {"partial_rotary_factor": 0.25}):
        assert drafter_config({**fields, **partial}).rope == RopeConfig(1e7, 64)
    for bad in (63, 0, 130, "64", True):
        fields[place]["rope_dim"] = bad
        with pytest.raises(ConfigError, match=f"rope_dim gives {bad!r} rotated .* 128"):
            drafter_config(fields)


@pytest.mark.parametrize("name", ["output_multiplier", "attention_value_scale"])
def test_neutral_scales_are_accepted(name):
    fields = published_drafter()
    for value in (1, 1.0, None, False):
        assert drafter_config({**fields, name: value}) == drafter_config(fields)
    for value in (0.5, 0, True):
        with pytest.raises(ConfigError, match=f"{name} is {value}, which"):
            drafter_config({**fields, name: value})


def test_a_head_size_that_is_not_stated_follows_from_the_others():
    assert drafter_config(changed(published_drafter(), "head_dim", None)).head_dim == 128


def test_yarn_of_a_drafter():
    fields = changed(published_drafter(), "rope_scaling", {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 65536})
    rope = drafter_config(fields).rope
    assert (rope.theta, rope.dim) == (1e7, 128) and dict(rope.yarn)["factor"] == 4.0
    newer = changed(changed(published_drafter(), "rope_theta", None), "rope_parameters",
                    {"rope_theta": 1e7, "rope_type": "default"})
    assert drafter_config(newer).rope == RopeConfig(1e7, 128)


@pytest.mark.parametrize("change, message", [
    (("architectures", ["Qwen3ForCausalLM"]), "Qwen3ForCausalLM.*one of .*MMFlashDraftModel"),
    (("architectures", None), "architectures is .., expected one of"),
    (("quantization_config", {"quant_method": "awq"}), r"quantised weights \(awq\)"),
    (("attention_bias", True), "attention_bias is True"),
    (("dflash_config", "projector_type", "domino"), "projector_type is 'domino'"),
    (("dflash_config", "sample_from_anchor", True), "sample_from_anchor is True"),  # R26
    (("dflash_config", "selector_rank", 256), "selector_rank is 256"),
    (("draft_vocab_size", 32000), "draft_vocab_size is 32000"),
    (("hidden_act", "gelu"), "'gelu', expected 'silu'"),
    (("num_key_value_heads", 5), "32 is not a multiple of num_key_value_heads 5"),
    (("block_size", 0), "`block_size` is 0, expected a positive"),
    (("dflash_config", "mask_token_id", 248320), "is 248320, expected an id below .* 248320"),
    (("dflash_config", "target_layer_ids", [1, 8, 32]), "32.*below num_target_layers 32"),
    (("dflash_config", "target_layer_ids", [1, 8, 8]), "expected distinct ids"),
    (("dflash_config", "target_layer_ids", []), r"target_layer_ids is \[\]"),
    (("dflash_config", "target_layer_ids", 5), "`target_layer_ids` is 5, expected list"),
    (("dflash_config", "target_layer_ids", [True, 8]), "True.*expected distinct ids"),
    (("dflash_config", "mask_token_id", True), "mask_token_id is True"),
    (("head_dim", 0), "head_dim is 0, expected a positive even"),
    (("head_dim", 127), "head_dim is 127"), (("head_dim", "128"), "head_dim is '128'"),
    (("dflash_config", "use_swa", "yes"), "use_swa is 'yes', expected true or false"),
    (("dflash_config", "causal", 1), "causal is 1, expected true or false"),
    (("layer_types", ["full_attention"] * 4), "4 entries .* expected 5"),
    (("layer_types", ["chunked_attention"] * 5), "chunked_attention"),  # R20
    (("layer_types", SLIDE), "sliding_window is None, expected a positive"),
    (("is_causal", "yes"), "is_causal is 'yes', expected true or false")])
def test_drafters_that_cannot_be_run_are_refused_in_one_line(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        drafter_config(changed(published_drafter(), *change), "somewhere/config.json")
    assert str(caught.value).startswith("somewhere/config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change, message", [
    ({"hidden_size": 5120}, "hidden_size is 5120, the target's is 4096"),
    ({"num_target_layers": 36}, "num_target_layers is 36, the target's is 32"),
    ({"vocab_size": 151936}, "vocab_size is 151936, the target's is 248320")])
def test_r40_a_wrong_pair_names_both_values(change, message):
    target = PRESETS["qwen3.5-9b"]
    drafter = dataclasses.replace(drafter_preset(target), **change)
    with pytest.raises(ConfigError, match=message):
        check_pair(target, drafter)


def test_r40_the_drafter_of_the_other_target():
    """All that differs is named at once."""
    with pytest.raises(ConfigError) as caught:
        check_pair(PRESETS["qwen3.5-9b"], drafter_preset(PRESETS["qwen3.8-27b"]))
    assert "hidden_size is 5120, the target's is 4096" in str(caught.value)
    assert "num_target_layers is 64, the target's is 32" in str(caught.value)


# --- files ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("content, message", [
    (None, "no such file"), (b"", "not a readable JSON"), (b"{", "not a readable JSON"),
    (b"[" * 100_000, "not a readable JSON"), (b"9" * 5000, "not a readable JSON"),
    (b"\xff\xfe", "not a readable JSON"), (b"[]", "expected a JSON object, found list")])
def test_files_that_hold_no_configuration(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_json(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published_target("qwen3.5-9b")))
    assert target_config(read_json(path)) == PRESETS["qwen3.5-9b"]


@pytest.mark.parametrize("name, value", [
    ("architectures", 3), ("layer_types", 7), ("rope_parameters", [1]), ("rms_norm_eps", "small"),
    ("tie_word_embeddings", []), ("vision_config", 5), ("text_config", {"hidden_size": {}})])
def test_a_field_of_the_wrong_type_is_a_config_error(name, value):
    fields = published_target("qwen3.5-9b")
    where = fields["text_config"] if name in fields["text_config"] else fields
    where[name] = value
    with pytest.raises(ConfigError, match="config.json"):
        target_config(fields)
