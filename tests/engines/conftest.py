"""A real daemon for engines that run in the test's process."""

from __future__ import annotations

from collections.abc import Iterator

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
