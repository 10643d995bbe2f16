"""Drafters: name table, other savers' names, mask embedding, export for SGLang and vLLM."""

import dataclasses
import io
import json
import pickle
import zipfile

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mmflash_jax.config import PRESETS, drafter_config, drafter_preset, read_json
from ports import CheckpointError
from ports.config_files import drafter_json
from ports.dflash import drafter_table, load_drafter, save_drafter
from ports.mask_embedding import FILE, read_mask_embedding, write_mask_embedding
from ports.name_table import flat
from ports.random_params import random_drafter
from tests import tiny

SLIDING = ("sliding_attention", "sliding_attention", "full_attention")


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def assert_same_bits(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert np.array_equal(bits(found[name]), bits(value)), name


@pytest.fixture
def folder(tmp_path):
    tiny.write_drafter(tmp_path / "drafter", tiny.target_fields(), dtype="bfloat16")
    return tmp_path / "drafter"


def config_of(folder):
    return drafter_config(read_json(folder / "config.json"))


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("preset, numbers", (
    ("qwen3.5-9b", 1_048_626_432), ("qwen3.8-27b", 1_730_213_120)))
def test_published_counts(preset, numbers):
    config = drafter_preset(PRESETS[preset])
    table = drafter_table(config)
    assert sum(int(np.prod(leaf.shape)) for leaf in table) == numbers
    assert config.parameter_count() == numbers
    names = [name for leaf in table for name, _ in leaf.parts]
    assert len(names) == len(set(names)) == 58
    shapes = {name: shape for leaf in table for name, shape in leaf.parts}
    h = config.hidden_size
    assert shapes["fc.weight"] == (h, 5 * h)
    assert shapes["layers.4.self_attn.q_proj.weight"] == (4096, h)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (1024, h)
    assert shapes["layers.0.self_attn.o_proj.weight"] == (h, 4096)
    assert shapes["layers.0.self_attn.q_norm.weight"] == (128,)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_round_trip_keeps_every_bit(tmp_path, dtype):
    tiny.write_drafter(tmp_path / "in", tiny.target_fields(), dtype=dtype, layer_types=SLIDING,
                       window=7, architecture="MMFlashDraftModel")
    fields = read_json(tmp_path / "in" / "config.json")
    fields["auto_map"] = {"AutoModel": "mmflash.MMFlashDraftModel"}
    fields["bos_token_id"] = 17
    (tmp_path / "in" / "config.json").write_text(json.dumps(fields))
    config = config_of(tmp_path / "in")
    params = load_drafter(tmp_path / "in", config, None)
    stored = load_file(tmp_path / "in" / "model.safetensors")
    rows = [stored[f"layers.1.self_attn.{n}_proj.weight"] for n in "qkv"]
    assert np.array_equal(bits(params["layers_1"]["qkv"]), bits(np.concatenate(rows)))
    for files_from in (None, tmp_path / "in"):
        save_drafter(params, config, tmp_path / "out", files_from=files_from, overwrite=True)
        assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json",
                                                                  "model.safetensors"}
        assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), stored)
        out = read_json(tmp_path / "out" / "config.json")
        assert out["architectures"] == ["DFlashDraftModel"] and "auto_map" not in out
        assert drafter_config(out) == config
        assert out["bos_token_id"] == (None if files_from is None else 17)
        assert out["dtype"] == dtype


def test_other_savers_names(folder):
    config, expected = config_of(folder), load_drafter(folder, config_of(folder))

    def rename(tensors):
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)
        tensors["encoder.fc.weight"] = tensors.pop("model.fc.weight")
        tensors["encoder.output_norm_enc.weight"] = tensors.pop("model.hidden_norm.weight")
        tensors["model.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    rewrite(folder, rename)
    assert_same_bits(dict(flat(load_drafter(folder, config))), dict(flat(expected)))
    rewrite(folder, lambda t: t.update({"fc.weight": np.ones(3, np.float32)}))
    with pytest.raises(CheckpointError, match="fc.weight and .*fc.weight are the same parameter"):
        load_drafter(folder, config)


def test_wrong_drafters_are_named(folder, monkeypatch):
    config = config_of(folder)
    monkeypatch.setattr(jax, "device_put", None)  # nothing may reach a device
    with pytest.raises(CheckpointError, match=r"q_norm\.weight has shape \[20\], expected \[40\]"):
        load_drafter(folder, dataclasses.replace(config, head_dim=40, num_attention_heads=3))
    with pytest.raises(CheckpointError, match=r"fc\.weight has shape \[56, 112\], expected \[56, "):
        load_drafter(folder, dataclasses.replace(config, target_layer_ids=(0, 1, 2)))
    with pytest.raises(CheckpointError, match=r"layers\.3\S+ is missing \(11 tensors are missing"):
        load_drafter(folder, dataclasses.replace(config, windows=(None,) * 4, causal=(False,) * 4))
    rewrite(folder, lambda t: t.update({"embed_tokens.weight": np.ones((2, 2), np.float32)}))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is surplus"):
        load_drafter(folder, config)
    rewrite(folder, lambda t: (t.pop("embed_tokens.weight"),
                               t.update({"fc.weight_scale_inv": np.ones(2, np.float32)})))
    with pytest.raises(CheckpointError, match=r"fc\.weight_scale_inv .*quantised"):
        load_drafter(folder, config)


@pytest.mark.parametrize("dtype", (np.float32, ml_dtypes.bfloat16, np.float16))
def test_mask_embedding_round_trip(folder, tmp_path, dtype):
    config = config_of(folder)
    assert "mask_embedding" not in load_drafter(folder, config)
    value = np.linspace(-1, 1, 56).astype(dtype)
    write_mask_embedding(folder, value, config.mask_token_id)
    params = load_drafter(folder, config, None)
    assert params["mask_embedding"].dtype == dtype
    assert np.array_equal(bits(params["mask_embedding"]), bits(value))
    assert load_drafter(folder, config)["mask_embedding"].dtype == ml_dtypes.bfloat16
    save_drafter(params, config, tmp_path / "out")
    found = load_drafter(tmp_path / "out", config, None)
    assert_same_bits(dict(flat(found)), dict(flat(params)))
    with pytest.raises(CheckpointError, match=f"mask_token_id is {config.mask_token_id}, in the "
                                              "config 3"):
        load_drafter(folder, dataclasses.replace(config, mask_token_id=3))


def test_mask_embedding_is_the_file_that_torch_writes(tmp_path):
    torch = pytest.importorskip("torch")
    value = np.linspace(-1, 1, 56).astype(np.float32)
    for dtype, kind in ((torch.bfloat16, ml_dtypes.bfloat16), (torch.float32, np.float32)):
        tensor = torch.tensor(value).to(dtype)
        saved = {"embedding": tensor, "mask_token_id": 9}
        torch.save(saved, tmp_path / FILE)
        found = read_mask_embedding(tmp_path, 56, 9)
        assert found.dtype == kind
        assert np.array_equal(found.astype(np.float32), tensor.float().numpy())
        write_mask_embedding(tmp_path, found, 9)
        loaded = torch.load(tmp_path / FILE, weights_only=True)
        assert loaded["mask_token_id"] == 9 and torch.equal(loaded["embedding"], tensor)
    saved = {"embedding": torch.nn.Parameter(torch.ones(56)), "mask_token_id": torch.tensor(9)}
    torch.save(saved, tmp_path / FILE)
    assert read_mask_embedding(tmp_path, 56, 9).tolist() == [1.0] * 56
    torch.save({**saved, "per_position": torch.ones(16, 56)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match="per_position"):
        read_mask_embedding(tmp_path, 56, 9)
    torch.save(saved, tmp_path / FILE, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="cannot be read as a torch file"):
        read_mask_embedding(tmp_path, 56, 9)


class Boom:
    """Unpickled by an ordinary unpickler, this would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_mask_embedding_runs_no_code(tmp_path):
    def archive(saved):
        raw = io.BytesIO()
        with zipfile.ZipFile(raw, "w") as file:
            file.writestr("archive/data.pkl", pickle.dumps(saved, 2))
        (tmp_path / FILE).write_bytes(raw.getvalue())

    archive({"embedding": Boom(tmp_path / "boom"), "mask_token_id": 9})
    with pytest.raises(CheckpointError, match="open is not allowed"):
        read_mask_embedding(tmp_path, 56, 9)
    assert not (tmp_path / "boom").exists()
    for saved, message in (([1], "expected a dict"), ({"mask_token_id": 9}, "expected a dict"),
                           ({"embedding": 1, "mask_token_id": 9}, "embedding has shape int"),
                           ({"embedding": 1, "mask_token_id": 8}, "mask_token_id is 8"),
                           ({"embedding": 1, "mask_token_id": 9, "x": 1}, "has .'x'., which"),
                           ({"embedding": 1, "per_position": 1}, "per_position")):
        archive(saved)
        with pytest.raises(CheckpointError, match=message):
            read_mask_embedding(tmp_path, 56, 9)
    write_mask_embedding(tmp_path, np.ones(55, np.float32), 9)
    with pytest.raises(CheckpointError, match=r"embedding has shape \(55,\), expected \(56,\)"):
        read_mask_embedding(tmp_path, 56, 9)
    raw = (tmp_path / FILE).read_bytes()
    for broken in (raw[:-100], b"", b"version https://git-lfs.github.com/spec/v1\n"):
        (tmp_path / FILE).write_bytes(broken)
        with pytest.raises(CheckpointError, match="mask_embedding.pt: cannot be read as a torch"):
            read_mask_embedding(tmp_path, 56, 9)


def test_made_config_reads_back():
    target = PRESETS["qwen3.8-27b"]
    base = drafter_preset(target)
    slide = (2048, 2048, 2048, 2048, None)
    by_kind = tuple(w is not None for w in slide)
    yarn = (("factor", 4.0), ("original_max_position_embeddings", 65536))
    for change in ({}, {"windows": slide, "causal": by_kind},
                   {"windows": slide, "causal": (False,) * 5}, {"causal": (True,) * 5},
                   {"rope": dataclasses.replace(base.rope, yarn=yarn)}, {"head_dim": 128},
                   {"target_layer_ids": (3, 1, 60), "block_size": 8}):
        config = dataclasses.replace(base, **change)
        fields = json.loads(json.dumps(drafter_json(config, target=target)))
        assert drafter_config(fields) == config
        for name in ("block_size", "num_target_layers"):
            assert fields[name] == fields["dflash_config"][name] == getattr(config, name)
    fields = drafter_json(base, target=target)
    assert fields["architectures"] == ["DFlashDraftModel"] and fields["model_type"] == "qwen3"
    assert fields["dflash_config"]["target_layer_ids"] == [1, 16, 31, 46, 61]
    assert fields["dflash_config"]["mask_token_id"] == 248070
    assert fields["eos_token_id"] == 248044 and fields["rope_theta"] == 1e7
    for change, message in (({"windows": (1, 2, 3, 4, None)}, "have windows .1, 2, 3, 4."),
                            ({"causal": (True, False) * 2 + (True,)}, "layers are causal")):
        with pytest.raises(CheckpointError, match=message):
            drafter_json(dataclasses.replace(base, **change))


def test_export_of_five_layers_has_58_tensors(tmp_path):
    """The layout that SGLang and vLLM load, from random parameters of a small geometry."""
    fields = tiny.target_fields(layers=8)
    tiny.write_drafter(tmp_path / "shape", fields, layers=5, taps=(1, 2, 3, 4, 5))
    config = config_of(tmp_path / "shape")
    params = random_drafter(config, jax.random.key(3))
    save_drafter(params, config, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert len(tensors) == 58 and all(t.dtype == ml_dtypes.bfloat16 for t in tensors.values())
    assert set(tensors) == set(load_file(tmp_path / "shape" / "model.safetensors"))
    assert sum(t.size for t in tensors.values()) == config.parameter_count()
    assert_same_bits(dict(flat(load_drafter(tmp_path / "out", config))), dict(flat(params)))


def test_export_loads_in_the_published_model_code(tmp_path):
    pytest.importorskip("torch")
    model = pytest.importorskip("dflash.model")
    tiny.write_drafter(tmp_path / "in", tiny.target_fields(), dtype="bfloat16")
    config = config_of(tmp_path / "in")
    save_drafter(load_drafter(tmp_path / "in", config, None), config, tmp_path / "out")
    loaded, report = model.DFlashDraftModel.from_pretrained(tmp_path / "out",
                                                            output_loading_info=True)
    assert not any(report.values()), report
    assert sum(p.numel() for p in loaded.parameters()) == config.parameter_count()
    assert loaded.config.block_size == config.block_size
