"""Checks that the tree is installed, so that a forgotten install says so at once."""

from __future__ import annotations

import importlib.util
import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("markexpr")
    if "gpu" not in chosen or "not gpu" in chosen:
        # Before the first module with kernels, whichever test imports it: it is interpreted or
        # compiled for good from then on.
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        found = importlib.util.find_spec("kvstore.tiers")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise pytest.UsageError(
            "kvstore is not installed here; run `make install` and use .venv/bin/pytest"
        )
