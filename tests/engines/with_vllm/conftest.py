"""A tiny model, and vLLM without a store, which is what the others are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_world import BATCH, Engine, tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[Engine]:
    """vLLM without a store: what it answers is right."""
    engine = Engine(model, None, **BATCH)
    yield engine.wait()
    engine.close()
