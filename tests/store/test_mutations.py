"""Model test and simulation on trial: known bugs are put in, one of the two must find each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from simulation import Simulation
from store_machine import StoreMachine

from kvstore.core.errors import KVStoreError
from kvstore.policies.index import Run
from kvstore.store import commit
from kvstore.store.lookup import LookupFlow
from kvstore.store.restore import RestoreFlow
from kvstore.store.retire import RetiredSlots
from kvstore.store.sessions import Attachment
from kvstore.tiers.host import HostTier

Break = Callable[[pytest.MonkeyPatch], None]


def leases_do_not_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Run, "anchored_blocks", lambda run: 0)


def slots_do_not_rest(patch: pytest.MonkeyPatch) -> None:
    retire = RetiredSlots.retire
    patch.setattr(RetiredSlots, "retire", lambda table, places, readers=(): retire(table, places))


def salts_do_not_count(patch: pytest.MonkeyPatch) -> None:
    digest = Attachment.root_digest
    patch.setattr(Attachment, "root_digest", lambda own, adapter, salt: digest(own, adapter, ""))


def epochs_do_not_count(patch: pytest.MonkeyPatch) -> None:
    failed = lambda reservation, moved: "failed" if moved.error is not None else ""  # noqa: E731
    patch.setattr(commit, "_refused", failed)


def repeats_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LookupFlow, "_is_same", lambda flow, lease, query, local: True)


def checksums_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "verify", lambda tier, place, length, checksum: True)


def reads_are_off_by_one(patch: pytest.MonkeyPatch) -> None:
    path = RestoreFlow.path
    patch.setattr(
        RestoreFlow, "path",
        lambda flow, lease, first, count: path(flow, lease, max(first - 1, 0), count),
    )  # fmt: skip


def try_everything() -> None:
    """A short run of the simulation, then of the model test."""
    for seed in range(40):
        Simulation(seed, 400).run()
    run_state_machine_as_test(
        lambda: StoreMachine("host"),
        settings=settings(
            max_examples=600, stateful_step_count=50, deadline=None, derandomize=True,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],
            report_multiple_bugs=False,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    "broken",
    [
        leases_do_not_hold, slots_do_not_rest, epochs_do_not_count, reads_are_off_by_one,
        repeats_are_not_compared,
        pytest.param(salts_do_not_count, marks=pytest.mark.long),
        pytest.param(checksums_do_not_count, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_known_bugs_are_found(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these bugs, put into the store, makes the model test or the simulation fail."""
    broken(monkeypatch)

    with pytest.raises((AssertionError, KVStoreError, KeyError)):
        try_everything()
