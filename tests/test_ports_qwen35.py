"""Targets: the name table against the published lists, loading, saving, wrong checkpoints."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mmflash_jax.config import PRESETS, ConfigError, RopeConfig, read_json, target_config
from ports import CheckpointError
from ports.config_files import target_json
from ports.name_table import flat
from ports.qwen35 import load_target, save_target, target_table
from ports.random_params import random_target
from ports.safetensors_dir import open_dir
from tests import tiny

DATA = Path(__file__).parent / "data"
BF16 = np.dtype(ml_dtypes.bfloat16)


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def tensors_of(folder):
    files = open_dir(folder)
    return {name: np.array(files.tensor(name)) for name in files.tensors}


def assert_same_bits(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert np.array_equal(bits(found[name]), bits(value)), name


def config_of(folder):
    return target_config(read_json(folder / "config.json"))


@pytest.fixture
def folder(tmp_path):
    tiny.write_target(tmp_path / "target", dtype="bfloat16", shards=3)
    return tmp_path / "target"


def rewrite(folder, change):
    """Apply `change` to the folder's tensors and write them as one file."""
    tensors = tensors_of(folder)
    change(tensors)
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name, preset, numbers, nbytes", (
    ("9b", "qwen3.5-9b", 9_653_104_368, 19_306_216_416),
    ("27b", "qwen3.8-27b", 27_781_427_952, 55_562_855_904)))
def test_table_is_the_published_list(name, preset, numbers, nbytes):
    expected = json.loads((DATA / f"expected_tensors_{name}.json").read_text())
    table = target_table(PRESETS[preset])
    shapes = {part: list(shape) for leaf in table for part, shape in leaf.parts}
    assert shapes == {part: shape for part, (_, shape) in expected.items()}
    assert sum(len(leaf.parts) for leaf in table) == len(expected)
    assert sum(math.prod(leaf.shape) for leaf in table) == numbers
    sizes = {"BF16": 2, "F32": 4}
    assert sum(math.prod(s) * sizes[d] for d, s in expected.values()) == nbytes
    kept = {part for leaf in table if leaf.keep for part, _ in leaf.parts}
    assert {part for part, (dtype, _) in expected.items() if dtype == "F32"} <= kept
    for leaf in table:  # rows add up
        assert list(leaf.rows())[-1][2].stop == leaf.shape[0]


def test_fused_rows_are_where_the_model_reads_them(folder):
    config, stored = config_of(folder), tensors_of(folder)
    params = load_target(folder, config, None, mtp=True)
    for i, kind in enumerate(config.layer_types):
        at, mixer = f"model.language_model.layers.{i}", params[f"layers_{i}"]["mixer"]
        if kind == "full_attention":
            names = [f"self_attn.{n}_proj.weight" for n in "qkv"]
            fused = mixer["qkv"]
        else:
            names = [f"linear_attn.in_proj_{n}.weight" for n in ("qkv", "z", "b", "a")]
            fused = mixer["qkvzba"]
            conv = stored[f"{at}.linear_attn.conv1d.weight"]
            assert np.array_equal(bits(mixer["conv"]), bits(conv[:, 0]))
            assert mixer["conv"].shape == (config.conv_dim, 4)
        rows = np.concatenate([stored[f"{at}.{n}"] for n in names])
        assert np.array_equal(bits(fused), bits(rows))
        rows = np.concatenate([stored[f"{at}.mlp.{n}_proj.weight"] for n in ("gate", "up")])
        assert np.array_equal(bits(params[f"layers_{i}"]["mlp"]["gate_up"]), bits(rows))
    patch = stored["model.visual.patch_embed.proj.weight"]
    assert patch.shape[1:] == (3, 2, 16, 16)
    assert np.array_equal(bits(params["vision"]["patch"]["weight"]), bits(patch))
    assert params["vision"]["patch"]["weight"].shape == (patch.shape[0], 1536)


@pytest.mark.parametrize("sizes", (
    {"dtype": "bfloat16"}, {"dtype": "bfloat16", "f32_states": False}, {"dtype": "float32"},
    {"tied": True}, {"vision": False, "mtp": False}, {"vision": False, "dtype": "bfloat16"}))
def test_round_trip_keeps_every_bit_r36(tmp_path, sizes):
    tiny.write_target(tmp_path / "in", shards=2, **sizes)
    config = config_of(tmp_path / "in")
    params = load_target(tmp_path / "in", config, None, mtp=config.mtp_num_hidden_layers > 0)
    save_target(params, config, tmp_path / "out", files_from=tmp_path / "in",
                max_shard_bytes=100_000)
    assert_same_bits(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "in"))
    modes = {p.stat().st_mode for p in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # whoever reads the config reads the weights
    index = read_json(tmp_path / "out" / "model.safetensors.index.json")
    shards = set(index["weight_map"].values())
    assert len(shards) > 3 and shards == {p.name for p in (tmp_path / "out").glob("*.safetens*s")}
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for t in tensors_of(tmp_path / "in").values())
    beside = {p.name for p in (tmp_path / "in").iterdir() if "safetensors" not in p.name}
    assert beside <= {p.name for p in (tmp_path / "out").iterdir()}
    for name in beside:
        assert (tmp_path / "in" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_dtypes_of_a_run_r36(tmp_path):
    """Matrices get the run's dtype; decay terms and the gated norm are never narrowed."""
    tiny.write_target(tmp_path / "f32", dtype="float32")
    tiny.write_target(tmp_path / "bf16", dtype="bfloat16", f32_states=False)
    config = config_of(tmp_path / "f32")
    for stored, run in (("f32", "bfloat16"), ("bf16", jnp.float32), ("f32", "float32")):
        params = load_target(tmp_path / stored, config, run)
        kept = np.float32 if stored == "f32" else BF16
        assert "mtp" not in params
        for path, value in flat(params):
            keep = path[-2:] in (("mixer", "A_log"), ("mixer", "dt_bias"), ("mixer", "norm"))
            assert isinstance(value, jax.Array)
            assert value.dtype == (kept if keep else jnp.dtype(run)), path
    embed = tensors_of(tmp_path / "f32")["model.language_model.embed_tokens.weight"]
    narrow = load_target(tmp_path / "f32", config, "bfloat16")["embed"]
    assert np.array_equal(bits(narrow), bits(embed.astype(BF16)))
    with pytest.raises(CheckpointError, match="cannot be loaded as int8"):
        load_target(tmp_path / "f32", config, "int8")


def test_groups_that_are_asked_for(folder):
    config = config_of(folder)
    assert "vision" not in load_target(folder, config, vision=False)
    assert {"vision", "mtp"} <= set(load_target(folder, config, mtp=True))
    rewrite(folder, lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.")])
    assert "mtp" not in load_target(folder, config)  # as HF saves it
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight is missing \(15 tensors"):
        load_target(folder, config, mtp=True)
    rewrite(folder, lambda t: t.pop("model.visual.pos_embed.weight"))
    for vision in (True, False):  # half a group is a fault even if it is not asked for
        with pytest.raises(CheckpointError, match=r"model\.visual\.pos_embed\.weight is missing"):
            load_target(folder, config, vision=vision)
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers is 0"):
        load_target(folder, dataclasses.replace(config, mtp_num_hidden_layers=0), mtp=True)


def test_progress_and_placement(folder):
    seen = []
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = load_target(folder, config_of(folder), progress=lambda *n: seen.append(n),
                         place=lambda path, shape: sharding)
    total = sum(value.nbytes for _, value in flat(params))
    assert seen[-1] == (total, total) and [n for n, _ in seen] == sorted(n for n, _ in seen)
    assert all(value.sharding == sharding for _, value in flat(params))


def test_tied_head_r19(tmp_path):
    tiny.write_target(tmp_path, tied=True, dtype="bfloat16")
    config, embed = config_of(tmp_path), "model.language_model.embed_tokens.weight"
    assert config.tie_word_embeddings and "head" not in load_target(tmp_path, config)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t[embed]}))
    assert "head" not in load_target(tmp_path, config)

    def differ(tensors):
        head = tensors[embed].copy()
        head[-1, -1] += 1
        tensors["lm_head.weight"] = head
    rewrite(tmp_path, differ)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from .*embed_tokens"):
        load_target(tmp_path, config)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t[embed][1:]}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is bfloat16 \[319, 56\]"):
        load_target(tmp_path, config)


def test_untied_head_r19(folder):
    config, stored = config_of(folder), tensors_of(folder)
    params = load_target(folder, config)
    assert np.array_equal(bits(params["head"]), bits(stored["lm_head.weight"]))
    assert not np.array_equal(bits(params["head"]), bits(params["embed"]))
    rewrite(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load_target(folder, config)
    fields = read_json(folder / "config.json")
    del fields["tie_word_embeddings"], fields["text_config"]["tie_word_embeddings"]
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        target_config(fields)


LAYER = "model.language_model.layers.0"
WRONG = {  # name: (what is done to the tensors, what the message must say)
    "missing": (lambda t: t.pop(f"{LAYER}.linear_attn.A_log"),
                r"model\.safetensors: \S*layers\.0\.linear_attn\.A_log is missing"),
    "surplus": (lambda t: t.update({"model.extra.weight": np.ones(3, np.float32)}),
                r"model\.safetensors: model\.extra\.weight is surplus"),
    "shape": (lambda t: t.update({f"{LAYER}.mlp.up_proj.weight": np.ones((3, 2), np.float32)}),
              r"layers\.0\.mlp\.up_proj\.weight has shape \[3, 2\], expected \[88, 56\]"),
    "transposed": (lambda t: t.update({f"{LAYER}.mlp.up_proj.weight":
                                       t[f"{LAYER}.mlp.down_proj.weight"]}),
                   r"up_proj\.weight has shape \[56, 88\], expected \[88, 56\]"),
    "float64": (lambda t: t.update({f"{LAYER}.input_layernorm.weight": np.ones(56)}),
                r"input_layernorm\.weight is F64, expected BF16, F16 or F32"),
    "int8": (lambda t: t.update({f"{LAYER}.mlp.up_proj.weight": np.ones((88, 56), np.int8)}),
             r"up_proj\.weight \(I8\) belongs to quantised weights"),
    "fp8": (lambda t: t.update({f"{LAYER}.mlp.up_proj.weight":
                                np.ones((88, 56), ml_dtypes.float8_e4m3fn)}),
            r"up_proj\.weight \(F8_E4M3\) belongs to quantised weights"),
    "both_prefixes": (lambda t: t.update({"model.norm.weight": np.ones(56, np.float32)}),
                      r"model\.(language_model\.)?norm\.weight are the same parameter"),
}


def add_packed(ending):
    return lambda tensors: tensors.update(
        {f"{LAYER}.mlp.up_proj.{ending}": np.ones(2, np.float32)})


for packed in ("weight_scale_inv", "weight_packed", "qweight", "qzeros", "weight_scale"):
    WRONG[packed] = (add_packed(packed), rf"up_proj\.{packed} \(F32\) belongs to quantised weights")


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_tensors_are_named(folder, monkeypatch, kind):
    change, message = WRONG[kind]
    rewrite(folder, change)
    monkeypatch.setattr(jax, "device_put", None)  # nothing may reach a device
    with pytest.raises(CheckpointError, match=message) as caught:
        load_target(folder, config_of(folder))
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_rotary_buffers_are_no_surplus(folder):
    rewrite(folder, lambda t: t.update({
        "model.language_model.rotary_emb.inv_freq": np.ones(4, np.float32),
        "model.visual.rotary_pos_emb.inv_freq": np.ones(4, np.float32)}))
    load_target(folder, config_of(folder))


def test_all_faults_are_collected(folder):
    def change(tensors):
        for name in list(tensors):
            if name.endswith("_layernorm.weight"):
                tensors[name] = tensors[name][:-1]
        del tensors["lm_head.weight"]
        tensors["odd"] = np.ones(1, np.float32)
    rewrite(folder, change)
    with pytest.raises(CheckpointError) as caught:
        load_target(folder, config_of(folder))
    text = str(caught.value)
    assert "lm_head.weight is missing" in text and "odd is surplus" in text
    assert "has shape [55], expected [56]" in text and "and 8 more problems" in text


def test_mixed_dtypes_in_one_fused_weight(folder):
    name = f"{LAYER}.mlp.up_proj.weight"
    rewrite(folder, lambda t: t.update({name: t[name].astype(np.float32)}))
    load_target(folder, config_of(folder), "bfloat16")
    with pytest.raises(CheckpointError, match="BF16 and .*up_proj.weight is F32, expected one"):
        load_target(folder, config_of(folder), None)


def test_save_refuses_wrong_parameters_and_leaves_nothing(folder, tmp_path):
    config = config_of(folder)
    params = load_target(folder, config)
    out = tmp_path / "new" / "out"
    norm = params["norm"]
    for wrong, message in (
            ({k: v for k, v in params.items() if k != "norm"}, "parameter norm is missing"),
            ({**params, "extra": norm}, "parameter extra is surplus"),
            ({**params, "norm": norm[1:]}, r"norm has shape \[55\], expected \[56\]"),
            ({k: v for k, v in params.items() if k != "vision"},
             "parameter vision/patch/weight is missing")):
        with pytest.raises(CheckpointError, match=message):
            save_target(wrong, config, out)
    other = dataclasses.replace(config, rms_norm_eps=1e-5)
    with pytest.raises(CheckpointError, match="is not the configuration of these parameters"):
        save_target(params, other, out, files_from=folder)
    assert not out.parent.exists()


def test_failed_save_leaves_nothing_r28(folder, tmp_path, monkeypatch):
    config = config_of(folder)
    params = load_target(folder, config)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("ports.safetensors_dir.save_file", full)
    before = set(tmp_path.iterdir())
    with pytest.raises(OSError):
        save_target(params, config, tmp_path / "a" / "b")
    assert set(tmp_path.iterdir()) == before


def test_overwriting(folder, tmp_path):
    config = config_of(folder)
    params, out = load_target(folder, config), tmp_path / "out"
    out.mkdir()
    save_target(params, config, out)  # an empty folder is no obstacle
    (out / "stale.json").write_text("{}")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        save_target(params, config, out)
    save_target(params, config, out, overwrite=True)
    assert not (out / "stale.json").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"target", "out"}
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        save_target(params, config, home, overwrite=True)
    assert (home / "letter.txt").exists()
    with pytest.raises(CheckpointError, match="is a file"):
        save_target(params, config, home / "letter.txt", overwrite=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_made_config_reads_back(preset):
    config = PRESETS[preset]
    rope = RopeConfig(1e7, 64, (("factor", 4.0), ("original_max_position_embeddings", 262144)))
    for change in ({}, {"vision": None}, {"tie_word_embeddings": True}, {"rope": rope},
                   {"eos_token_ids": (248046, 248044)}, {"eos_token_ids": ()}):
        wanted = dataclasses.replace(config, **change)
        fields = json.loads(json.dumps(target_json(wanted)))
        assert target_config(fields) == wanted
    vision = dataclasses.replace(config.vision, rope_theta=5.0)
    with pytest.raises(CheckpointError, match="config.json cannot state vision"):
        target_json(dataclasses.replace(config, vision=vision))


def test_random_target_is_a_sound_checkpoint(tmp_path):
    config = target_config(tiny.target_fields(hidden=256))
    params = random_target(config, jax.random.key(0), mtp=True)
    for leaf in target_table(config):
        value = params
        for key in leaf.path:
            value = value[key]
        wide = np.asarray(value, np.float32)
        assert value.shape == leaf.shape and np.isfinite(wide).all()
        f32 = leaf.init == "a_log" or leaf.path[-2:] == ("mixer", "norm")
        assert value.dtype == (np.float32 if f32 else BF16), leaf.path
        if leaf.init == "matrix":
            assert wide.std() * math.sqrt(leaf.shape[1]) == pytest.approx(1, rel=0.2)
        centre = {"scale": 1, "one": 1, "offset": 0, "small": 0}.get(leaf.init)
        assert centre is None or abs(wide - centre).max() < 0.2
    again = random_target(config, jax.random.key(0), vision=False)
    assert np.array_equal(bits(again["embed"]), bits(params["embed"]))
    assert not {"vision", "mtp"} & set(again)
    other = random_target(config, jax.random.key(1))
    assert not np.array_equal(bits(other["head"]), bits(params["head"]))
    save_target(params, config, tmp_path / "out")
    found = load_target(tmp_path / "out", config_of(tmp_path / "out"), None, mtp=True)
    assert config_of(tmp_path / "out") == config
    assert_same_bits(dict(flat(found)), dict(flat(params)))
