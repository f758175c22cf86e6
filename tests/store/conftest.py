"""Desks for tests: each is checked and closed when its test is over."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from desk import Desk, Engine


@pytest.fixture
def shm_directory() -> Iterator[Path]:
    """A private directory in the memory file system, as pools need."""
    path = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make_desk() -> Iterator[Callable[..., Desk]]:
    """Makes desks; checks and closes them at the end."""
    made: list[Desk] = []

    def make(*args: Any, **changes: Any) -> Desk:
        made.append(Desk(*args, **changes))
        return made[-1]

    yield make
    for desk in made:
        desk.settle()
        desk.store.close()


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    """A store of 1 MiB: 256 slots of one block."""
    return make_desk()


@pytest.fixture
def engine(desk: Desk) -> Engine:
    return desk.engine()
