"""How jax runs under pytest: on the CPU unless `-m gpu` is asked for, compiled programs kept."""

import os
from importlib.metadata import version
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module, and with it jax, is imported."""
    marks = config.getoption("markexpr")
    if "gpu" not in marks.replace("not gpu", ""):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    cache = Path(config.rootpath) / ".pytest_cache" / f"jax-{version('jax')}"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip(f"needs an NVIDIA card, jax runs on {jax.default_backend()!r}")
