"""Epochs files that move: what was void in one directory is void in the one that follows it."""

from __future__ import annotations

import os
import random

import pytest
import xxhash

from kvstore.tiers.epochs import NAMES, EpochsFile, begin_with

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


class Cut(Exception):
    """The process ends here."""


@pytest.fixture
def places(tmp_path):
    """Two directories: `host`, with A at epoch 2 and B cleared below 100, and an empty `disk`."""
    host, disk = tmp_path / "host", tmp_path / "disk"
    host.mkdir()
    disk.mkdir()
    epochs = EpochsFile(host)
    epochs.confirm_void()
    epochs.bump(A)
    epochs.bump(A)
    epochs.clear([B], 100)
    return host, disk


def moved(host, disk, first=False):
    epochs = begin_with(disk, host) if first else EpochsFile(disk)
    epochs.take_over(host)
    return epochs


def cut_after(monkeypatch, steps):
    """Lets that many changes of the directories happen, then ends the process before the next."""
    left = [steps]

    def patched(name):
        real = getattr(os, name)

        def call(*arguments, **options):
            if not left[0]:
                raise Cut
            left[0] -= 1
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("replace", "unlink", "fsync", "write"):
        patched(name)


def marks(epochs):
    return {space: tuple(epochs.mark(space)) for space in (A, B, C)}


def test_a_first_disk_begins_with_what_the_host_knew(places):
    """I13: the first start with a disk takes epochs over; the host's blocks stay good."""
    host, disk = places
    epochs = moved(host, disk, first=True)
    assert not epochs.created
    assert not epochs.all_void
    assert marks(epochs) == {A: (2, 0), B: (0, 100), C: (0, 0)}
    assert marks(EpochsFile(disk)) == marks(epochs)
    assert not list(host.iterdir())


def test_nothing_to_take_over_is_a_first_start(tmp_path):
    """Without any file, neither here nor there, it is a start like any first one."""
    host, disk = tmp_path / "host", tmp_path / "disk"
    disk.mkdir()
    epochs = moved(host, disk, first=True)
    assert epochs.created
    assert epochs.all_void


def test_taking_over_nothing_changes_nothing(places):
    """I13: starts that find nothing in the host's directory keep all marks."""
    host, disk = places
    moved(host, disk, first=True)
    raw = (disk / NAMES[0]).read_bytes()
    moved(host, disk)
    assert (disk / NAMES[0]).read_bytes() == raw


@pytest.mark.parametrize("first", [True, False])
def test_a_cut_at_any_step_changes_nothing_of_the_outcome(places, monkeypatch, tmp_path, first):
    """I13: whenever the process ends while files move, the next start ends with the same marks."""
    host, disk = places
    if not first:
        moved(host, disk, first=True)
        late = EpochsFile(host)
        late.confirm_void()
        late.bump(B)
        late.clear([C], 7)
    saved = {path: path.read_bytes() for place in places for path in place.iterdir()}
    expected, steps = None, 0
    while True:
        with monkeypatch.context() as patch:
            cut_after(patch, steps)
            try:
                done = moved(host, disk, first)
            except Cut:
                done = None
        again = moved(host, disk, first and not (disk / "format.json").exists())
        if done is None:
            expected = expected or marks(again)
            assert marks(again) == expected, f"cut after {steps} steps"
            assert not again.all_void
            assert not [path for path in host.iterdir() if path.suffix != ".new"]
        else:
            assert marks(again) == marks(done) == expected
            break
        for place in places:
            for path in place.iterdir():
                path.unlink()
        for path, raw in saved.items():
            path.write_bytes(raw)
        steps += 1
    assert steps > 6
    assert expected == (
        {A: (2, 0), B: (0, 100), C: (0, 0)} if first else {A: (2, 0), B: (1, 100), C: (1, 7)}
    )


def test_what_was_voided_without_the_disk_is_void_on_it(places):
    """I13: a bump while the disk was off counts, though both files count epochs from 0."""
    host, disk = places
    moved(host, disk, first=True)
    late = EpochsFile(host)
    assert late.created, "without a disk the host begins anew"
    late.confirm_void()
    assert late.bump(A) == 1
    epochs = moved(host, disk)
    assert epochs.is_void(A, 2, 1 << 40), "what the disk has of A is older than the bump"
    assert epochs.is_void(A, 1, 1 << 40)
    assert not epochs.is_void(C, 0, 1)


def test_an_epoch_of_the_same_number_is_another(places):
    """I13: one bump each, with and without the disk, are two epochs, not the same."""
    host, disk = places
    moved(host, disk, first=True).bump(C)
    late = EpochsFile(host)
    late.confirm_void()
    late.bump(C)
    assert moved(host, disk).epoch(C) == 2


def test_what_is_void_stays_void(places):
    """I13: damage on either side makes everything void, and the damaged file is kept."""
    host, disk = places
    moved(host, disk, first=True)
    for name in NAMES:
        (host / name).write_bytes(b"noise")
    epochs = moved(host, disk)
    assert epochs.all_void
    assert len(epochs.notes) == 2
    assert EpochsFile(disk).all_void
    assert (host / "epochs.damaged").read_bytes() == b"noise"
    late = EpochsFile(host)
    late.confirm_void()
    assert moved(host, disk).all_void
    assert EpochsFile(disk).all_void


def test_a_start_that_dropped_nothing_yet_voids_what_follows(places):
    """I13: a host file that still says that all is void says so on the disk, too."""
    host, disk = places
    moved(host, disk, first=True)
    assert EpochsFile(host).all_void
    assert moved(host, disk).all_void


def test_a_file_of_before_is_read(places, tmp_path):
    """Files without an origin, of an earlier version, keep their marks and get one."""
    host, _ = places
    old = (
        "4b5645504f43480107000000000000000000000001000000"
        + A.hex() + "0300000000000000" + "0900000000000000"
    )  # fmt: skip
    raw = bytes.fromhex(old)
    for name in NAMES:
        (host / name).write_bytes(raw + xxhash.xxh3_128_digest(raw))
    epochs = EpochsFile(host)
    assert tuple(epochs.mark(A)) == (3, 9)
    assert not epochs.all_void
    assert len((host / NAMES[0]).read_bytes()) == len(raw) + 16 + 40


class Lives:
    """A host pool and a disk with blocks, through starts with the disk and without it."""

    def __init__(self, root, seed):
        self.random = random.Random(seed)
        self.host, self.disk = root / "host", root / "disk"
        self.host.mkdir()
        self.disk.mkdir()
        self.blocks = {self.host: set(), self.disk: set()}  # (id, space, epoch, generation)
        self.void, self.next_id, self.generation, self.kept = set(), 0, 1, 0
        self.epochs, self.on = None, False

    def start(self, on, monkeypatch):
        """Starts with the disk or without, maybe dying on the way a few times."""
        self.on = on
        for steps in [*self.random.choices(range(20), k=self.random.randrange(3)), 1000]:
            with monkeypatch.context() as patch:
                cut_after(patch, steps)
                try:
                    self._open()
                    break
                except Cut:
                    continue
        self._recover()

    def _open(self):
        first = not (self.disk / "format.json").exists()
        self.epochs = moved(self.host, self.disk, first) if self.on else EpochsFile(self.host)
        if self.on:
            (self.disk / "format.json").touch()

    def _recover(self):
        for place in (self.host, self.disk) if self.on else (self.host,):
            good = {
                block for block in self.blocks[place]
                if not self.epochs.created and not self.epochs.is_void(*block[1:])
            }  # fmt: skip
            assert not [block for block in good if block[0] in self.void], "void blocks came back"
            self.blocks[place] = good
            self.kept += len(good)
        self.epochs.confirm_void()
        found = [block[3] for blocks in self.blocks.values() for block in blocks]
        self.generation = max([self.epochs.generation_floor, 1, *(g + 1 for g in found)])

    def act(self):
        space = self.random.choice((A, B, C))
        kind = self.random.random()
        if kind < 0.7:
            self._put(space)
        else:
            self.void |= {b[0] for blocks in self.blocks.values() for b in blocks if b[1] == space}
            if kind < 0.85:
                self.epochs.bump(space)
            else:
                self.epochs.clear([space], self.generation)

    def _put(self, space):
        self.next_id += 1
        for place in (self.host, self.disk) if self.on else (self.host,):
            block = (self.next_id, space, self.epochs.epoch(space), self.generation)
            self.blocks[place].add(block)
            self.generation += 1


@pytest.mark.parametrize("seed", range(40))
def test_nothing_void_comes_back_through_any_row_of_starts(tmp_path, monkeypatch, seed):
    """I13: with the disk on and off, and starts cut short, no bumped or cleared block returns."""
    lives = Lives(tmp_path, seed)
    for _ in range(12):
        lives.start(lives.random.random() < 0.6, monkeypatch)
        for _ in range(lives.random.randrange(8)):
            lives.act()
    assert lives.kept, "a test in which everything is dropped shows nothing"
