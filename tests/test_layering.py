"""Who may import whom, and the house rules for files, read from the source with `ast`."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("mmflash_jax", "ports")
FILES = sorted(
    str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")
)
TREES = {name: ast.parse((ROOT / name).read_text(encoding="utf-8")) for name in FILES}

JAX_ONLY = ("mmflash_jax/kernels/", "mmflash_jax/layers.py", "mmflash_jax/sampling.py")
PURE = (*JAX_ONLY, "mmflash_jax/models/", "mmflash_jax/drafters/")
ABOVE_PURE = (
    "ports",
    "mmflash_jax.engine",
    "mmflash_jax.server",
    "mmflash_jax.serve",
    "mmflash_jax.train",
    "mmflash_jax.bench",
    "mmflash_jax.generate",
    "mmflash_jax.command_line",
    "mmflash_jax.round",
)
ORACLES = ("torch", "dflash", "speculators", "vllm", "sglang")
LAUNCHERS = (
    "mmflash_jax/round.py",
    "mmflash_jax/kernels/",  # a Pallas kernel under jit is lowered once for all layers
    "mmflash_jax/generate.py",
    "mmflash_jax/engine/runner.py",
    "mmflash_jax/train/",
    "mmflash_jax/bench/",
    "ports/random_params.py",  # draws weights on the device that is to hold them
)
LONG = re.compile(r"\blong(er)?\b[^.]*\b(because|since|so that)\b", re.IGNORECASE)

every_file = pytest.mark.parametrize("name", FILES)


def imports(name):
    """Dotted names that a file imports anywhere: `a.b` and `a.b.c` for `from a.b import c`."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def within(imported, *modules):
    return any(imported == m or imported.startswith(m + ".") for m in modules)


def offences(name, *modules):
    return [imported for imported in imports(name) if within(imported, *modules)]


def test_there_is_something_to_check():
    assert {"mmflash_jax/sampling.py", "mmflash_jax/round.py"} <= set(FILES)
    assert any(name.startswith("ports/") for name in FILES)
    assert "mmflash_jax.sampling" in list(imports("mmflash_jax/round.py"))


@every_file
def test_pure_layers_know_nothing_above_them(name):
    if name.startswith(PURE):
        assert not offences(name, *ABOVE_PURE)


@every_file
def test_models_do_not_know_drafters(name):
    if name.startswith("mmflash_jax/models/"):
        assert not offences(name, "mmflash_jax.drafters")


@every_file
def test_kernels_layers_and_sampling_import_only_jax(name):
    if name.startswith(JAX_ONLY):
        allowed = ["jax", "numpy"]  # numpy for constants of a trace
        if name.startswith("mmflash_jax/kernels/"):
            allowed += ["mmflash_jax.kernels", "mmflash_jax.layers"]
        foreign = [
            imported
            for imported in imports(name)
            if imported.split(".")[0] not in sys.stdlib_module_names
            and not within(imported, *allowed)
        ]
        assert not foreign


@every_file
def test_the_package_does_not_import_ports_except_where_folders_become_parameters(name):
    if name.startswith("mmflash_jax/") and offences(name, "ports"):
        assert name.startswith(
            (
                "mmflash_jax/generate.py",
                "mmflash_jax/command_line.py",
                "mmflash_jax/engine/",
                "mmflash_jax/train/",
                "mmflash_jax/bench/",
                "mmflash_jax/demo/",
            )
        )


@every_file
def test_no_torch_and_no_other_engine(name):
    assert not offences(name, *ORACLES)


@every_file
def test_programs_are_launched_in_few_places(name):
    """`jax.jit` only where programs start, and around Pallas kernels; all else is traced in."""
    uses = [
        node.lineno
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Attribute)
        and node.attr in ("jit", "pmap")
        and isinstance(node.value, ast.Name)
        and node.value.id == "jax"
    ]
    assert name.startswith(LAUNCHERS) or not (uses or offences(name, "jax.jit", "jax.pmap"))


@every_file
def test_parameters_are_the_only_collection(name):
    """No mutable collection and no module RNG: state is an argument and a result."""
    calls = [
        f"{node.func.attr} at line {node.lineno}"
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("variable", "make_rng", "sow", "perturb")
    ]
    assert not calls


@every_file
def test_every_file_says_what_it_is(name):
    if (ROOT / name).read_text(encoding="utf-8").strip():  # an empty __init__.py has nothing to say
        assert ast.get_docstring(TREES[name])


@every_file
def test_a_long_file_says_why(name):
    lines = (ROOT / name).read_text(encoding="utf-8").count("\n")
    if lines > 500:
        header = ast.get_docstring(TREES[name]) or ""
        assert LONG.search(header), f"{lines} lines and no 'long because ...' in the docstring"


@every_file
def test_names_say_what_a_file_is_for(name):
    assert Path(name).stem not in ("utils", "util", "common", "misc", "helpers")


@every_file
def test_nothing_is_left_to_do(name):
    found = re.findall(r"\b(?:TODO|FIXME|XXX)\b", (ROOT / name).read_text(encoding="utf-8"))
    assert not found


def test_readme_tree_names_every_file():
    """README's tree has one line for each file of the packages and scripts, and no other."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme.split("## Tree", 1)[1].split("```")[1]
    named, folders = set(), []
    for line in filter(str.strip, tree.splitlines()):
        entry = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = []
        if entry.endswith("/"):
            folders.append(entry)
        else:
            named.add("".join(folders) + entry)
    ours = {n for n in FILES if (ROOT / n).read_text(encoding="utf-8").strip()}
    ours |= {f"scripts/{p.name}" for p in (ROOT / "scripts").iterdir() if p.is_file()}
    assert named == ours


def test_readme_figures_are_the_measured_rows():
    """README's table holds every row of scripts/bench_results, number for number, and no other."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in readme.split("## Figures", 1)[1].split("\n## ")[0].splitlines()
             if line.startswith("|")]
    files = sorted((ROOT / "scripts/bench_results").glob("*.json"))
    rows = [row for path in files for row in json.loads(path.read_text())["rows"]]
    assert table[2:] == [[str(row[name]) for name in table[0]] for row in rows]
