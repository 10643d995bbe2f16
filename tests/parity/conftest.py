"""Fixtures of the parity tests: where the expected arrays come from, checkpoints on disk."""

import functools

import pytest

from tests.parity import cases, references


@functools.cache
def _live(group):
    return references.compute(group, full=True)


@functools.cache
def _committed(group):
    return references.load(group)


@pytest.fixture(params=["committed", "live"])
def expected(request):
    """`expected(group)`: the committed references, and those of the torch oracles computed now
    (skipped where torch is not installed)."""
    if request.param == "live":
        pytest.importorskip("torch")
        pytest.importorskip("dflash")
        return _live
    return _committed


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """`folders(name)`: the target folder of a target case, or target and drafter of a drafter
    case with `pair=True`; written once."""
    @functools.cache
    def write(name, pair=False):
        folder = tmp_path_factory.mktemp(name)
        return (cases.write_pair if pair else cases.write_target)(name, folder)

    return write
