"""Safetensors folders: bit-exact reading, and every kind of broken folder (R28, R36)."""

import json
import re
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mmflash_jax.config import read_json, target_config
from ports import CheckpointError, safetensors_dir
from ports.qwen35 import load_target
from ports.safetensors_dir import open_dir, plan_shards, resolve
from tests import tiny

MIXED = {
    "bf16": np.arange(-6, 6).reshape(3, 4).astype(ml_dtypes.bfloat16),
    "f32": np.array([1 / 3, np.nan, -0.0, 1e-40], np.float32),
    "f16": np.array([[65504.0, 6e-8]], np.float16), "i64": np.array([2**62, -1]),
    "bool": np.array([True, False, True]), "scalar": np.array(1.5, np.float32),
    "empty": np.empty((0, 7), ml_dtypes.bfloat16),
}


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def write_index(folder, weight_map, **metadata):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": metadata, "weight_map": weight_map}))


def header_of(raw):
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:8 + length]), raw[8 + length:]


def with_header(header, data):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def refuse_devices(monkeypatch):
    """Any array put on a device fails the test."""
    def refuse(*args, **kwargs):
        raise AssertionError("a device array was made before the folder was checked")
    monkeypatch.setattr(jax, "device_put", refuse)


def test_every_dtype_comes_bit_for_bit_r36(tmp_path):
    save_file(MIXED, tmp_path / "model.safetensors")
    files = open_dir(tmp_path)
    assert set(files.tensors) == set(MIXED)
    for name, value in MIXED.items():
        mapped, read = files.tensor(name), np.empty_like(value)
        files.read_into(name, read)
        for found in (mapped, read):
            assert found.dtype == value.dtype and found.shape == value.shape
            assert np.array_equal(bits(found), bits(value)), name
        assert not mapped.flags.writeable or not mapped.size


def test_reading_in_pieces_and_casting_r36(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_dir, "CHUNK", 64)
    value = np.random.default_rng(0).normal(size=(37, 5)).astype(np.float32)
    save_file({"a": np.zeros(3, np.uint8), "b": value}, tmp_path / "model.safetensors")
    files = open_dir(tmp_path)
    whole = np.empty((74, 5), np.float32)
    files.read_into("b", whole[37:])
    assert np.array_equal(whole[37:], value)
    narrow = np.empty(value.shape, ml_dtypes.bfloat16)
    files.read_into("b", narrow)
    assert np.array_equal(bits(narrow), bits(value.astype(ml_dtypes.bfloat16)))


def test_odd_shard_names_and_float_total_size(tmp_path):
    save_file({"a": MIXED["bf16"]}, tmp_path / "model.safetensors-00001-of-00002.safetensors")
    save_file({"b": MIXED["f32"]}, tmp_path / "weights.part")
    write_index(tmp_path, {"a": "model.safetensors-00001-of-00002.safetensors",
                           "b": "weights.part"}, total_size=40.0)
    files = open_dir(tmp_path)
    assert files.tensors["b"].file.name == "weights.part"
    assert np.array_equal(bits(files.tensor("a")), bits(MIXED["bf16"]))


def test_links_out_of_the_folder_are_followed(tmp_path):
    """The hub's cache links each file of a snapshot to a blob elsewhere."""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    save_file({"a": MIXED["f32"]}, tmp_path / "blobs" / "0123")
    (snapshot / "shard.safetensors").symlink_to("../blobs/0123")
    write_index(snapshot, {"a": "shard.safetensors"})
    assert set(open_dir(snapshot).tensors) == {"a"}
    (tmp_path / "blobs" / "0123").unlink()
    with pytest.raises(CheckpointError, match="shard.safetensors: no such file"):
        open_dir(snapshot)


def cut(size):
    return lambda raw: raw[:size(raw)]


def edit(change):
    def apply(raw):
        header, data = header_of(raw)
        return with_header(change(header) or header, data)
    return apply


def set_entry(name, key, value):
    return edit(lambda header: header[name].update({key: value}))


RAW = with_header(json.dumps({  # 8 + 240 + 2 * 1310720 bytes
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [4, 81920], "data_offsets": [0, 1310720]},
    "b": {"dtype": "F32", "shape": [81920, 4], "data_offsets": [1310720, 2621440]}}).ljust(240),
    np.ones(655360, np.float32).tobytes())
POINTER = (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64
           + b"\nsize 5368709120\n")
BROKEN = {  # name: (what is done to the bytes, what the message must say)
    "cut_by_1_byte": (cut(lambda raw: len(raw) - 1), r"has 2621687 bytes, expected 2621688"),
    "cut_by_1_MB": (cut(lambda raw: len(raw) - 2**20), r"has 1573112 bytes, expected 2621688"),
    "header_only": (cut(lambda raw: 8 + int.from_bytes(raw[:8], "little")),
                    r"has 248 bytes, expected 2621688"),
    "half_a_header": (cut(lambda raw: 100), r"header of 240 bytes, but the file has 100 bytes"),
    "four_bytes": (cut(lambda raw: 4), r"the file has 4 bytes"),
    "empty": (cut(lambda raw: 0), r"is empty \(0 bytes\)"),
    "lfs_pointer": (lambda raw: POINTER, r"git-LFS pointer of \d+ bytes, expected 5368709120"),
    "header_length_2_63": (lambda raw: struct.pack("<Q", 2**63) + raw[8:],
                           r"header of 9223372036854775808 bytes, but the file has 2621688"),
    "surplus_bytes": (lambda raw: raw + b"x", r"has 2621689 bytes, expected 2621688"),
    "no_json": (lambda raw: with_header("{nope", b""), r"header is not readable as JSON"),
    "a_list": (lambda raw: with_header([1], b""), r"header is a JSON list"),
    "named_twice": (lambda raw: with_header('{"a": 1, "a": 2}', b""), r"a is named twice"),
    "unknown_dtype": (set_entry("a", "dtype", "F6"), r"a: dtype 'F6' is not known"),
    "wrong_bytes": (set_entry("a", "shape", [7]), r"a: F32 \[7\] takes 28 bytes, .* give 1310720"),
    "negative": (set_entry("a", "shape", [-1, -327680]), r"a: shape .* whole numbers"),
    "no_offsets": (edit(lambda header: header["a"].pop("data_offsets") and None), r"a: header ent"),
    "overlap": (set_entry("b", "data_offsets", [0, 1310720]), r"b: begins at data byte 0, expec"),
    "gap": (edit(lambda header: header.pop("a") and None),
            r"b: begins at data byte 1310720, expected 0 \(leaves a gap"),
}


@pytest.mark.parametrize("sharded", (False, True))
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_file_is_named_with_both_sizes_r28(tmp_path, refuse_devices, kind, sharded):
    path = tmp_path / ("shard-2" if sharded else "model.safetensors")
    path.write_bytes(RAW)
    if sharded:
        save_file({"c": MIXED["f32"]}, tmp_path / "shard-1")
        write_index(tmp_path, {"a": path.name, "b": path.name, "c": "shard-1"})
    change, message = BROKEN[kind]
    path.write_bytes(change(RAW))
    with pytest.raises(CheckpointError, match=f"{path.name}: .*{message}") as caught:
        open_dir(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    fields = tiny.target_fields()
    with pytest.raises(CheckpointError, match=message):
        load_target(tmp_path, target_config(fields))


def test_unfinished_downloads_are_refused_r28(tmp_path):
    save_file(MIXED, tmp_path / "model.safetensors")
    cache = tmp_path / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    for half in (tmp_path / "model.safetensors.incomplete", cache / "abc.0123.incomplete"):
        half.write_bytes(b"half")
        with pytest.raises(CheckpointError, match=f"{half.name}: an unfinished download"):
            open_dir(tmp_path)
        half.unlink()
    open_dir(tmp_path)
    whole = tmp_path / "out.incomplete-1234"
    whole.mkdir()
    save_file(MIXED, whole / "model.safetensors")
    with pytest.raises(CheckpointError, match="interrupted conversion"):
        open_dir(whole)


INDEXES = {  # name: (weight_map, what the message must say)
    "shard_missing": ({"a": "one", "b": "two", "c": "three"}, r"three: no such file"),
    "tensor_missing": ({"a": "one", "b": "two", "z": "two"}, r"two: does not hold z"),
    "tensor_elsewhere": ({"a": "two", "b": "two", "x": "one"}, r"one: holds a, .* lies in two"),
    "tensor_unnamed": ({"a": "one", "x": "two"}, r"two: holds b, which .* does not name"),
    "upwards": ({"a": "../one"}, r"a is said to lie in '../one'"),
    "absolute": ({"a": "/etc/passwd"}, r"'/etc/passwd', which is no file of this folder"),
    "drive": ({"a": "C:\\one"}, r"no file of this folder"),
    "no_text": ({"a": 3}, r"a is said to lie in 3"),
    "nothing": ({}, r"`weight_map` is missing or empty"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_index_that_does_not_fit_its_shards_r28(tmp_path, kind):
    save_file({"a": MIXED["f32"]}, tmp_path / "one")
    save_file({"b": MIXED["f32"]}, tmp_path / "two")
    weight_map, message = INDEXES[kind]
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        open_dir(tmp_path)


def test_tensor_in_two_shards(tmp_path):
    save_file({"a": MIXED["f32"]}, tmp_path / "one")
    save_file({"a": MIXED["f32"], "b": MIXED["f32"]}, tmp_path / "two")
    write_index(tmp_path, {"a": "one", "b": "two"})
    with pytest.raises(CheckpointError, match="a lies twice, in one and in two"):
        open_dir(tmp_path)


def test_broken_index(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    for text, message in (("", r"is empty \(0 bytes\)"), ("{", "not readable as JSON"),
                          (POINTER.decode(), "git-LFS pointer"), ("[1]", "`weight_map` is missi"),
                          ('{"weight_map": {"a": "x", "a": "y"}}', "a is named twice")):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            open_dir(tmp_path)


def test_which_file_is_the_model(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        open_dir(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"holds neither .* \(only pytorch_model.bin\)"):
        open_dir(tmp_path)
    save_file({"a": MIXED["f32"]}, tmp_path / "model.safetensors")
    save_file({"a": MIXED["f32"]}, tmp_path / "one")
    write_index(tmp_path, {"a": "one"})
    with pytest.raises(CheckpointError, match="index.json and model.safetensors, expected one"):
        open_dir(tmp_path)


def test_many_faults_are_raised_at_once(tmp_path):
    for number in range(7):
        (tmp_path / f"s{number}").write_bytes(b"")
    write_index(tmp_path, {f"t{n}": f"s{n}" for n in range(7)})
    with pytest.raises(CheckpointError) as caught:
        open_dir(tmp_path)
    assert str(caught.value).count("is empty") == 4 and "and 3 more problems" in str(caught.value)


def test_resolve(tmp_path, monkeypatch):
    assert resolve(tmp_path) == tmp_path
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / "file")
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve("/nowhere/at/all")
    import huggingface_hub

    def offline(*args, **kwargs):
        raise ConnectionError("no route\nto host")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match="some/model: no such folder.*no route") as caught:
        resolve("some/model")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path))
    assert resolve("some/model") == tmp_path


def test_plan_shards():
    sizes = [("a", 6), ("b", 4), ("c", 1), ("d", 30), ("e", 1)]
    assert plan_shards(sizes, 10) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert plan_shards(sizes, 1 << 60) == [["a", "b", "c", "d", "e"]]


def test_message_of_a_truncated_tiny_checkpoint_names_the_shard_r28(tmp_path, refuse_devices):
    tiny.write_target(tmp_path, shards=3)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    config = target_config(read_json(tmp_path / "config.json"))
    with pytest.raises(CheckpointError, match=re.escape(shard.name) + r": has \d+ bytes, expected"):
        load_target(tmp_path, config)
