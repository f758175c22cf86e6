"""Staging segments: sized by the daemon, sealed, gone when let go."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest

from kvstore.core.errors import LimitReached
from kvstore.server.staging import Staging, StagingBudget


def test_what_the_client_writes_the_daemon_reads() -> None:
    """The descriptor handed over maps the memory that the daemon's view shows."""
    staging = Staging(8192)
    descriptor = staging.take_descriptor()
    with mmap.mmap(descriptor, 8192) as client:
        client[4096:4100] = b"kvkv"
        assert staging.view is not None
        assert bytes(staging.view[4096:4100]) == b"kvkv"
    os.close(descriptor)
    staging.close()


def test_a_client_cannot_resize_or_unseal_it() -> None:
    """No client can cut the segment short under the daemon's copy, which would be a SIGBUS."""
    staging = Staging(8192)
    descriptor = staging.take_descriptor()
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    os.close(descriptor)
    staging.close()


def test_budget_rounds_cuts_and_refuses() -> None:
    """Segments are whole pages within the session's limit, and together within the total; a single
    page is always to be had, for operators.
    """
    budget = StagingBudget(default_bytes=8192, session_bytes=16384, total_bytes=32768)
    assert budget.take(0) == 8192
    assert budget.take(5000) == 8192
    assert budget.take(1 << 60) == 16384
    with pytest.raises(LimitReached, match="staging_bytes"):
        budget.take(4097)
    assert budget.take(1) == 4096
    budget.give_back(16384 + 4096)
    assert budget.take(4097) == 8192


def test_release_gives_memory_and_budget_back_once() -> None:
    """After release no descriptor and no mapping is left, even with a view still about."""
    budget = StagingBudget(4096, 4096, 4096)
    before = set(os.listdir("/proc/self/fd"))
    staging = Staging(budget.take(0))
    kept = staging.view
    budget.releaser(staging)()
    assert budget.used_bytes == 0
    assert kept is not None
    kept.release()
    del kept
    assert set(os.listdir("/proc/self/fd")) == before
