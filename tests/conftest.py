"""Checks that the tree is installed, so that a forgotten install says so at once."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_configure(config: pytest.Config) -> None:
    try:
        found = importlib.util.find_spec("kvstore.tiers")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise pytest.UsageError(
            "kvstore is not installed here; run `make install` and use .venv/bin/pytest"
        )
