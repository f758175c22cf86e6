"""A real daemon for engines that run in the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from daemons import DaemonProcess

LIMITS = """
tiers.host.prefault = false
tiers.host.mlock = false
"""


@pytest.fixture
def served() -> Iterator[DaemonProcess]:
    made = DaemonProcess("16MiB", LIMITS)
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    with DaemonProcess("16MiB", LIMITS) as daemon:
        yield daemon


@pytest.fixture
def world(shared: DaemonProcess) -> Iterator[Any]:
    """Engines of SGLang's in spaces of their own, on a daemon that outlives the test."""
    from sglang_world import World

    made = World(shared)
    yield made
    made.close()


@pytest.fixture
def lonely(served: DaemonProcess) -> Iterator[Any]:
    """Engines of SGLang's on a daemon that may be killed."""
    from sglang_world import World

    made = World(served)
    yield made
    made.close()
