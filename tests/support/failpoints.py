"""Named failpoints: a real daemon dies, fails or waits at a step of a flow that a test names.

The daemon's own code has no switches: this file, run as `python failpoints.py serve ...`, wraps
the functions that are the steps and then starts the command line. A step is reached just before
the function that does it runs, or, where it says so, just after. A file that both sides map says
what happens at which; it can be changed while the daemon runs.
"""

from __future__ import annotations

import errno
import functools
import importlib
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

KILL, DELAY = -1, -2
EIO, ENOSPC = errno.EIO, errno.ENOSPC
DELAY_SECONDS = 0.3
CONTROL = "FAILPOINTS_CONTROL"
CELL = struct.Struct("<iii")  # action, times left, hits


class Point(NamedTuple):
    """A step: `target` is module:function. `does_io`: it can fail as a medium does."""

    target: str
    does_io: bool = False
    after: bool = False


_STORE, _DISK = "kvstore.store", "kvstore.tiers.disk"
_EPOCHS = "kvstore.tiers.epochs:EpochsFile"

POINTS: dict[str, Point] = {
    # Put: slots, the copy from staging, the index, the headers that make blocks visible.
    "put.reserve": Point(f"{_STORE}.reserve:ReserveFlow._take_slots"),
    "put.copy": Point("kvstore.tiers.host.tier:HostTier.write", True),
    "put.copied": Point("kvstore.tiers.host.tier:HostTier.write", True, after=True),
    "put.take_over": Point(f"{_STORE}.commit:CommitFlow._copied"),
    "put.enter": Point(f"{_STORE}.commit:CommitFlow._publish"),
    "put.publish": Point(f"{_STORE}.publish:Publisher.publish"),
    "put.headers": Point("kvstore.tiers.host.tier:HostTier.commit"),
    "put.visible": Point(f"{_STORE}.publish:Publisher._commit", after=True),
    "put.remember_space": Point(f"{_STORE}.record:FileRecord._write", True),
    # Demote: slots on disk, files, payloads, headers, cells, syncs, the transaction, the index.
    "demote.take": Point(f"{_STORE}.demote:WriteBehind._take"),
    "demote.slots": Point(f"{_DISK}.tier:DiskTier.reserve"),
    "demote.segment": Point(f"{_DISK}.segments:SegmentFiles.make", True),
    "demote.segment_made": Point(f"{_DISK}.segments:SegmentFiles.make", True, after=True),
    "demote.payloads": Point(f"{_DISK}.transfer:Transfer.write_many", True),
    "demote.payloads_written": Point(f"{_DISK}.transfer:Transfer.write_many", True, after=True),
    "demote.headers": Point(f"{_DISK}.group:Committer._write_headers", True),
    "demote.cell": Point(f"{_DISK}.group:Committer._write_cell", True),
    "demote.sync": Point(f"{_DISK}.io:FileIO.fdatasync", True),
    "demote.synced": Point(f"{_DISK}.io:FileIO.fdatasync", True, after=True),
    "demote.folder": Point(f"{_DISK}.segments:SegmentFiles.sync_directory", True),
    "demote.transaction": Point(f"{_DISK}.io:FileIO.commit", True),
    "demote.durable": Point(f"{_DISK}.io:FileIO.commit", True, after=True),
    "demote.books": Point(f"{_DISK}.books:DiskBooks.publish"),
    "demote.take_over": Point(f"{_STORE}.groups:GroupWriter.finish"),
    "demote.enter": Point(f"{_STORE}.groups:GroupWriter._enter"),
    # Promote: slots in host, the read, the check, the headers.
    "promote.submit": Point(f"{_STORE}.promote:Promoter._submit"),
    "promote.read": Point(f"{_DISK}.io:FileIO.read_all", True),
    "promote.arrived": Point(f"{_STORE}.promote:Promoter._arrived"),
    "promote.take_in": Point(f"{_STORE}.promote:Promoter._take_in"),
    "promote.publish": Point(f"{_STORE}.promote:Promoter._publish"),
    "promote.published": Point(f"{_STORE}.promote:Promoter._publish", after=True),
    # Evict: the index lets go, headers are void, slots rest, removals become durable, slots free.
    "evict.drop": Point(f"{_STORE}.evict:Remover.drop"),
    "evict.removed": Point(f"{_STORE}.evict:Remover.removed"),
    "evict.retire": Point(f"{_STORE}.retire:RetiredSlots.retire"),
    "evict.void": Point(f"{_DISK}.tier:DiskTier.discard"),
    "evict.free": Point(f"{_DISK}.tier:DiskTier.free"),
    "evict.forget": Point(f"{_DISK}.index:DiskIndex.commit", True),
    "evict.forgotten": Point(f"{_DISK}.index:DiskIndex.commit", True, after=True),
    "evict.slots_free": Point(f"{_DISK}.books:DiskBooks.removed"),
    # Recover: epochs, segments, index, belief, what is put right, host, trees, adoption, record.
    "recover.epochs": Point("kvstore.daemon.tiers:move_record", True),
    "recover.survey": Point(f"{_DISK}.scanning:Scanner.survey", True),
    "recover.index": Point(f"{_DISK}.opening:load", True),
    "recover.believe": Point(f"{_DISK}.opening:believe", True),
    "recover.put_right": Point(f"{_DISK}.opening:Opening._put_right", True),
    "recover.write_index": Point(f"{_DISK}.opening:Opening._write", True),
    "recover.host": Point("kvstore.daemon.tiers:_open_host", True),
    "recover.find": Point("kvstore.recovery:_find"),
    "recover.graft": Point("kvstore.recovery:_graft"),
    "recover.adopt": Point("kvstore.recovery:_adopt"),
    "recover.confirm": Point(f"{_EPOCHS}.confirm_void", True),
    "recover.spaces": Point("kvstore.recovery:_keep_used_spaces", True),
    "recover.done": Point("kvstore.daemon.daemon:recover", after=True),
    # Bump: closed, written twice, counted, emptied, open again.
    "bump.close": Point(f"{_STORE}.clear:ClearFlow._close"),
    "bump.write": Point(f"{_EPOCHS}._replace", True),
    "bump.one_written": Point(f"{_EPOCHS}._replace", True, after=True),
    "bump.written": Point(f"{_EPOCHS}.bump", True, after=True),
    "bump.empty": Point(f"{_STORE}.clear:ClearFlow._empty"),
    "bump.remove": Point(f"{_STORE}.clear:ClearFlow._remove_some"),
    "bump.done": Point(f"{_STORE}.clear:ClearFlow._done"),
}
NUMBERS = {name: number for number, name in enumerate(POINTS)}


class Failpoints:
    """The test's side. `program` is what runs instead of `kvstore`, `environ` what it needs."""

    def __init__(self, control: Path) -> None:
        control.write_bytes(bytes(CELL.size * len(POINTS)))
        with control.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.program = [sys.executable, str(Path(__file__))]
        self.environ = {CONTROL: str(control)}

    def set(self, name: str, action: int, times: int = 1) -> None:
        CELL.pack_into(self._map, CELL.size * NUMBERS[name], action, times, 0)

    def clear(self, name: str) -> None:
        self.set(name, 0, 0)

    def hits(self, name: str) -> int:
        return int(CELL.unpack_from(self._map, CELL.size * NUMBERS[name])[2])


class _Switch:
    """The daemon's side of one point."""

    def __init__(self, cells: mmap.mmap, number: int) -> None:
        self._cells, self._at = cells, CELL.size * number

    def reached(self) -> None:
        action, left, hits = CELL.unpack_from(self._cells, self._at)
        if not action or left <= 0:
            return
        CELL.pack_into(self._cells, self._at, action, left - 1, hits + 1)
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == DELAY:
            time.sleep(DELAY_SECONDS)
        if action > 0:
            raise OSError(action, os.strerror(action))


def wrapped(function: Callable[..., Any], switch: _Switch, after: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def step(*args: Any, **options: Any) -> Any:
        if not after:
            switch.reached()
        value = function(*args, **options)
        if after:
            switch.reached()
        return value

    return step


def owner_of(point: Point) -> tuple[Any, str]:
    """The object that holds a step's function, and its name there."""
    module, _, path = point.target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


def install(control: str) -> None:
    with open(control, "r+b") as file:
        cells = mmap.mmap(file.fileno(), 0)
    for name, point in POINTS.items():
        owner, attribute = owner_of(point)
        switch = _Switch(cells, NUMBERS[name])
        setattr(owner, attribute, wrapped(getattr(owner, attribute), switch, point.after))


if __name__ == "__main__":
    install(os.environ[CONTROL])
    from kvstore.cli.main import run

    sys.exit(run(sys.argv[1:]))
