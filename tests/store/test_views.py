"""Views: what the store tells of its tiers."""

from __future__ import annotations

import pytest

from kvstore.testing import InProcessStore
from kvstore.tiers.host import HostTier


def test_a_tier_with_a_problem_is_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    """I14: a tier that takes no blocks is named with its sentence; draining still says so first."""
    with InProcessStore("4MiB") as store:
        assert (store.kv.status().state, store.kv.status().reason) == ("serving", "")
        monkeypatch.setattr(HostTier, "problem", property(lambda tier: "it is broken; mend it"))
        status = store.kv.status()
        assert (status.state, status.reason) == ("degraded", "host: it is broken; mend it")
        host = status.tiers["host"]
        assert (host.state, host.problem) == ("degraded", "it is broken; mend it")
        store.kv.drain(1.0, False)
        assert store.kv.status().state == "draining"


def test_only_tiers_that_there_are_are_shown() -> None:
    """Without a disk nothing speaks of one."""
    with InProcessStore("4MiB") as store:
        assert list(store.kv.status().tiers) == ["host"]
        assert all(list(view.used_bytes) == ["host"] for view in store.kv.tenants())
