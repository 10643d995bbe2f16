"""Orbax folders and the converter: bit-equal both ways, nothing half-written, one-line errors."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from mmflash_jax.config import PRESETS, drafter_config, read_json, target_config
from ports import CheckpointError, convert, name_table
from ports.dflash import load_drafter, save_drafter
from ports.mask_embedding import write_mask_embedding
from ports.name_table import flat
from ports.orbax_dir import is_orbax, save_params
from ports.qwen35 import load_target, save_target
from ports.random_params import random_target
from ports.safetensors_dir import open_dir
from tests import tiny


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def assert_same_bits(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert np.array_equal(bits(found[name]), bits(value)), name


def tensors_of(folder):
    files = open_dir(folder)
    return {name: np.array(files.tensor(name)) for name in files.tensors}


def config_of(folder):
    return target_config(read_json(folder / "config.json"))


@pytest.fixture
def folder(tmp_path):
    tiny.write_target(tmp_path / "hf", dtype="bfloat16", shards=3)
    return tmp_path / "hf"


@pytest.fixture
def orbax(folder, tmp_path):
    convert.to_orbax(folder, tmp_path / "orbax")
    return tmp_path / "orbax"


@pytest.mark.parametrize("sizes", (
    {"dtype": "bfloat16"}, {"dtype": "bfloat16", "f32_states": False, "vision": False},
    {"tied": True, "mtp": False}))
def test_both_ways_bit_equal_r36(tmp_path, sizes, capsys):
    hf, orbax, back = (tmp_path / n for n in ("hf", "deep/orbax", "back"))
    tiny.write_target(hf, **sizes)
    assert convert.main(["to-orbax", str(hf), str(orbax)]) == 0
    assert convert.main(["to-hf", str(orbax), str(back), "--max-shard-gb", "0.0002"]) == 0
    assert capsys.readouterr().out == f"wrote {orbax}\nwrote {back}\n"
    assert is_orbax(orbax) and not is_orbax(back) and not is_orbax(hf)
    assert_same_bits(tensors_of(back), tensors_of(hf))
    assert len(list(back.glob("*.safetensors"))) > 2
    for path in hf.iterdir():
        if "safetensors" not in path.name:
            assert (back / path.name).read_bytes() == path.read_bytes(), path.name
            if path.name != "config.json":
                assert (orbax / path.name).read_bytes() == path.read_bytes(), path.name
    assert read_json(orbax / "config.json") == read_json(hf / "config.json")
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "deep", "back"}


def test_drafter_both_ways(tmp_path):
    hf, orbax, back = (tmp_path / n for n in ("hf", "orbax", "back"))
    tiny.write_drafter(hf, tiny.target_fields(), dtype="bfloat16", window=9, layer_types=(
        "sliding_attention", "sliding_attention", "full_attention"))
    config = drafter_config(read_json(hf / "config.json"))
    for mask in (False, True):
        if mask:
            write_mask_embedding(hf, np.linspace(-2, 1, 56, dtype=np.float32),
                                 config.mask_token_id)
        convert.to_orbax(hf, orbax, overwrite=mask)
        convert.to_hf(orbax, back, overwrite=mask)
        assert_same_bits(tensors_of(back), tensors_of(hf))
        expected = dict(flat(load_drafter(hf, config, None)))
        assert (("mask_embedding",) in expected) == mask
        for folder in (orbax, back):
            assert drafter_config(read_json(folder / "config.json")) == config
            assert_same_bits(dict(flat(load_drafter(folder, config, None))), expected)
    assert sorted(p.name for p in back.iterdir()) == ["config.json", "mask_embedding.pt",
                                                      "model.safetensors"]


@pytest.mark.parametrize("dtype", ("bfloat16", "float32", None))
@pytest.mark.parametrize("asked", ({}, {"vision": False}, {"mtp": True}))
def test_orbax_loads_as_the_original_does(folder, orbax, dtype, asked):
    config, seen = config_of(folder), []
    expected = load_target(folder, config, dtype, **asked)
    found = load_target(orbax, config, dtype, progress=lambda *n: seen.append(n), **asked)
    assert_same_bits(dict(flat(found)), dict(flat(expected)))
    assert all(isinstance(value, jax.Array) for _, value in flat(found))
    total = sum(value.nbytes for _, value in flat(found))
    assert seen[-1] == (total, total)


def test_trained_parameters_from_the_device(tmp_path):
    """What training saves is what serving and the converter read."""
    tiny.write_drafter(tmp_path / "hf", tiny.target_fields())
    fields = read_json(tmp_path / "hf" / "config.json")
    config = drafter_config(fields)
    params = jax.tree.map(lambda x: x * 2, load_drafter(tmp_path / "hf", config, "float32"))
    save_params(params, "drafter", fields, tmp_path / "orbax")
    save_drafter(params, config, tmp_path / "direct")
    convert.to_hf(tmp_path / "orbax", tmp_path / "hf2")
    assert_same_bits(tensors_of(tmp_path / "hf2"), tensors_of(tmp_path / "direct"))
    assert_same_bits(dict(flat(load_drafter(tmp_path / "orbax", config, None))),
                     dict(flat(params)))


RESHARD = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from mmflash_jax.config import read_json, drafter_config
from pathlib import Path
from ports.dflash import load_drafter
from ports.name_table import flat
from ports.orbax_dir import save_params
source, out = Path(sys.argv[1]), Path(sys.argv[2])
fields = read_json(source / "config.json")
config = drafter_config(fields)
def place(devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    return lambda path, shape: NamedSharding(
        mesh, PartitionSpec("x") if shape[0] % devices == 0 else PartitionSpec())
original = dict(flat(load_drafter(source, config, None)))
sharded = load_drafter(source, config, None, place=place(8))
assert len(sharded["fc"].sharding.device_set) == 8
save_params(sharded, "drafter", fields, out)
for devices in (1, 2, 4, 8):
    for path, value in flat(load_drafter(out, config, None, place=place(devices))):
        assert len(value.sharding.device_set) == devices
        assert value.addressable_shards[0].data.nbytes in (value.nbytes, value.nbytes // devices)
        assert (np.asarray(value) == np.asarray(original[path])).all()
"""


def test_saved_on_eight_devices_restored_on_fewer_r42(tmp_path):
    tiny.write_drafter(tmp_path / "hf", tiny.target_fields())
    env = {**os.environ, "JAX_PLATFORMS": "cpu",
           "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run([sys.executable, "-c", RESHARD, tmp_path / "hf", tmp_path / "out"], env=env,
                   check=True)


def test_broken_orbax_folders_are_named_r28(folder, orbax, monkeypatch):
    config = config_of(folder)
    manifest = (orbax / "manifest.json").read_text()
    monkeypatch.setattr(jax, "device_put", None)  # nothing may reach a device

    def refused(message):
        with pytest.raises(CheckpointError, match=message) as caught:
            load_target(orbax, config)
        assert "\n" not in str(caught.value)
    data = max((orbax / "params" / "layers_1").rglob("*"), key=lambda p: p.stat().st_size)
    raw = data.read_bytes()
    name = data.relative_to(orbax).as_posix()
    for broken in (raw[:-1], b"", raw + b"x"):
        data.write_bytes(broken)
        refused(f"{name}: has {len(broken)} bytes, expected {len(raw)}")
    data.unlink()
    refused(f"{name}: no such file")
    data.write_bytes(raw)
    for broken, message in (("{", "not a readable manifest"), ("[]", "not a readable manifest"),
                            (manifest.replace("version 1", "version 9"), "format is .*version 9"),
                            (manifest.replace('"target"', '"drafter"'), "holds a drafter, expec"),
                            (manifest.replace('"norm": [', '"nrom": ['),
                             "parameter norm is missing; parameter nrom is surplus")):
        (orbax / "manifest.json").write_text(broken)
        refused(message)
    (orbax / "manifest.json").unlink()
    refused("manifest.json is missing, so the folder is not whole")
    (orbax / "manifest.json").write_text(manifest)
    other = orbax.rename(orbax.with_name("orbax.incomplete-0123"))
    with pytest.raises(CheckpointError, match="interrupted conversion"):
        load_target(other, config)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax's own
def test_orbax_data_that_cannot_be_read_r28(folder, orbax):
    """Same size, other bytes: found by orbax while reading, and named."""
    data = orbax / "params" / "layers_1" / "manifest.ocdbt"
    data.write_bytes(bytes(len(data.read_bytes())))
    with pytest.raises(CheckpointError, match="params/layers_1: cannot be restored") as caught:
        load_target(orbax, config_of(folder))
    assert "\n" not in str(caught.value)


def truncate(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])


def drop_vision(folder):
    """The config names a vision tower, the files hold none: no orbax folder of it would load."""
    tensors = {n: a for n, a in tensors_of(folder).items() if not n.startswith("model.visual")}
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")


BAD = {  # name: (what is done to the folder, arguments, what stderr must say)
    "truncated": (truncate, ["to-orbax", "{hf}", "{out}"], "bytes, expected"),
    "no_vision": (drop_vision, ["to-orbax", "{hf}", "{out}"], "model.visual."),
    "no_config": (lambda f: (f / "config.json").unlink(), ["to-orbax", "{hf}", "{out}"],
                  "config.json: no such file"),
    "no_folder": (None, ["to-orbax", "{hf}/none/at/all", "{out}"], "no such folder"),
    "wrong_way": (None, ["to-hf", "{hf}", "{out}"], "is no orbax folder"),
    "onto_itself": (None, ["to-orbax", "{hf}", "{hf}"], "expected another folder"),
    "inside": (None, ["to-orbax", "{hf}", "{hf}/x"], "expected another folder"),
    "around": (None, ["to-orbax", "{hf}", "{hf}/.."], "expected another folder"),
    "not_empty": (None, ["to-orbax", "{hf}", "{full}"], "exists and is not empty"),
    "no_checkpoint": (None, ["to-orbax", "{hf}", "{full}", "--overwrite"], "holds no checkpoint"),
    "shard_size": (None, ["to-hf", "{hf}", "{out}", "--max-shard-gb", "0"], "--max-shard-gb is"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_exits_2_with_one_line_r28(folder, tmp_path, capsys, kind):
    change, arguments, message = BAD[kind]
    full = tmp_path / "full"
    full.mkdir()
    (full / "letter.txt").write_text("dear")
    if change:
        change(folder)
    before = sorted(p for p in tmp_path.rglob("*"))
    names = {"hf": folder, "out": tmp_path / "a" / "out", "full": full}
    assert convert.main([a.format(**names) for a in arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert sorted(p for p in tmp_path.rglob("*")) == before


def test_unknown_arguments_exit_2(capsys):
    for arguments in ([], ["sideways", "a", "b"], ["to-hf", "a"], ["to-hf", "a", "b", "--speed"]):
        with pytest.raises(SystemExit) as caught:
            convert.main(arguments)
        assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        convert.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "to-orbax" in text and "examples:" in text and ".incomplete" in text


def test_failure_while_writing_leaves_nothing_r28(folder, orbax, tmp_path, monkeypatch):
    before = {p.name for p in tmp_path.iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("ports.safetensors_dir.save_file", full)
    monkeypatch.setattr("ports.orbax_dir.copy_beside", full)
    assert convert.main(["to-hf", str(orbax), str(tmp_path / "out")]) == 2
    assert convert.main(["to-orbax", str(folder), str(tmp_path / "out")]) == 2
    assert {p.name for p in tmp_path.iterdir()} == before


SLOWLY = """
import sys, time
from ports import convert, orbax_dir
tree = convert.tree
def slow(pairs):
    time.sleep(0.3)
    return tree(pairs)
convert.tree = slow
sys.exit(convert.main(sys.argv[1:]))
"""


def test_kill_9_leaves_nothing_that_loads_r28(folder, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", SLOWLY, "to-orbax", str(folder), str(out)])
    try:
        for _ in range(600):
            left = [p for p in tmp_path.iterdir() if p.name.startswith("out")]
            if any(p.is_dir() and (p / "params").is_dir() for p in left):
                break
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [p.name.startswith("out.incomplete-") for p in left] == [True] and not out.exists()
    with pytest.raises(CheckpointError, match="interrupted conversion"):
        load_target(left[0], config_of(folder))
    with pytest.raises(CheckpointError, match="the folder is not whole"):
        load_target(left[0].rename(tmp_path / "renamed"), config_of(folder))
    convert.to_orbax(folder, out)
    assert load_target(out, config_of(folder))


def test_reading_ahead_is_bounded_r36(monkeypatch):
    """At most READ_AHEAD bytes, or one parameter, are read and not yet taken."""
    monkeypatch.setattr(name_table, "READ_AHEAD", 100)
    lock, held, most = threading.Lock(), 0, 0

    def read(size):
        nonlocal held, most
        with lock:
            held += size
            most = max(most, held)
        return size
    sizes = [10] * 30 + [250] + [60, 60, 30] * 5
    taken = []
    for job, size in name_table.read_ahead(sizes, lambda size: size, read):
        assert job == size
        taken.append(size)
        with lock:
            held -= size
    assert taken == sizes and most <= 260  # the one taken has not been given back yet


def test_reading_ahead_stops_at_a_fault():
    def read(job):
        if job == 3:
            raise CheckpointError("three")
        return job
    seen = []
    with pytest.raises(CheckpointError, match="three"):
        for job, _ in name_table.read_ahead(range(1000), lambda _: 1, read):
            seen.append(job)
    assert seen == [0, 1, 2]


MEASURE = """
import resource, sys
import jax, orbax.checkpoint
from pathlib import Path
from mmflash_jax.config import read_json, target_config
from ports import convert
from ports.name_table import flat
from ports.qwen35 import load_target, save_target
from ports.random_params import random_target
way, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
jax.devices()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, params = peak(), 0
if way == "load":
    tree = load_target(source, target_config(read_json(source / "config.json")))
    params = sum(value.nbytes for _, value in flat(tree))  # on a CPU they are host memory too
elif way == "to-orbax":
    convert.to_orbax(source, out)
else:
    convert.to_hf(source, out, max_shard_bytes=10**9)
print(peak() - before - params)
"""


@pytest.mark.slow
def test_host_memory_r36(tmp_path):
    """Two of the largest parameter and what is read ahead: for the 27B (2.5 GB in shards of
    3.1 GB) 7 GB, where 1.5 times the largest shard + 4 GB are allowed."""
    config = dataclasses.replace(
        PRESETS["qwen3.5-9b"], vision=None, vocab_size=100_000, mtp_num_hidden_layers=0,
        layer_types=("linear_attention", "full_attention") * 2)
    largest = 2 * config.vocab_size * config.hidden_size
    hf, orbax, back = (tmp_path / n for n in ("hf", "orbax", "back"))
    save_target(random_target(config, jax.random.key(0)), config, hf, max_shard_bytes=10**9)
    for way, source, out in (("load", hf, hf), ("to-orbax", hf, orbax), ("to-hf", orbax, back)):
        done = subprocess.run([sys.executable, "-c", MEASURE, way, source, out], check=True,
                              env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True)
        assert int(done.stdout) < 2 * largest + 1.5e9, way
    for path in hf.glob("*.safetensors"):
        assert path.read_bytes() == (back / path.name).read_bytes()
