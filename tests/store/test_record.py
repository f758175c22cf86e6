"""The record of spaces: kept where blocks last longest, and moved there without losing one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from kvstore.core.errors import FailedPrecondition
from kvstore.core.space import Space
from kvstore.core.spec import KVSpec
from kvstore.store.record import SPACES_NAME, FileRecord, move_record, read_spaces
from kvstore.tiers.epochs import EpochsFile


def space(model: str) -> Space:
    spec = KVSpec(
        model=model, revision="r1", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16",
        block_size=16,
    )  # fmt: skip
    return Space(1, spec, "default")


def record(directory: Path, *models: str) -> FileRecord:
    directory.mkdir(exist_ok=True)
    made = FileRecord(directory, EpochsFile(directory), lambda: 9)
    for model in models:
        made.remember(space(model))
    return made


def models(directory: Path) -> list[str]:
    return [known.spec.model for known in read_spaces(directory / SPACES_NAME)]


def test_spaces_are_remembered_once(tmp_path: Path) -> None:
    """I10: a space is on the medium when `remember` returns, and only once."""
    made = record(tmp_path, "a", "b", "a")
    assert models(tmp_path) == ["a", "b"] == [known.spec.model for known in made.known]


def test_a_first_disk_gets_the_hosts_spaces(tmp_path: Path) -> None:
    """The host's record moves to the disk as it is; nothing of it is left behind."""
    host, disk = tmp_path / "host", tmp_path / "disk"
    disk.mkdir()
    record(host, "a", "b").bump(space("a"))
    epochs = move_record(disk, host, first=True)
    assert models(disk) == ["a", "b"]
    assert epochs.epoch(space("a").id) == 1
    assert not list(host.iterdir())
    made = FileRecord(disk, epochs, lambda: 9, durable_slow=True)
    assert made.durable_slow
    assert made.epoch_of(space("a").id) == 1


def test_spaces_of_both_are_joined(tmp_path: Path) -> None:
    """After a time without the disk, spaces of either are known, each once."""
    host, disk = tmp_path / "host", tmp_path / "disk"
    record(disk, "a", "b")
    record(host, "b", "c")
    move_record(disk, host, first=False)
    assert models(disk) == ["a", "b", "c"]
    assert models(host) == []


@pytest.mark.parametrize("steps", range(12))
def test_a_cut_while_spaces_move_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Whenever the process ends, the next start knows all spaces."""
    host, disk = tmp_path / "host", tmp_path / "disk"
    record(disk, "a")
    record(host, "b")
    left = [steps]
    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "fsync"):

            def call(*arguments: object, real: object = getattr(os, name)) -> object:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
                return real(*arguments)  # type: ignore[operator]

            patch.setattr(os, name, call)
        with contextlib.suppress(KeyboardInterrupt):
            move_record(disk, host, first=False)
    move_record(disk, host, first=False)
    assert models(disk) == ["a", "b"]
    assert not (host / SPACES_NAME).exists()


def test_a_host_without_a_directory_has_nothing_to_move(tmp_path: Path) -> None:
    """With sealed pools the record lies on the disk from the first start on."""
    epochs = move_record(tmp_path, None, first=True)
    assert epochs.created


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I12: a space whose write failed is not known, and the sentence says what to do."""
    made = record(tmp_path, "a")

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FailedPrecondition, match="free some space"):
        made.remember(space("b"))
    assert [known.spec.model for known in made.known] == ["a"]
