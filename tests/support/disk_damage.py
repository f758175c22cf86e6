"""Damages of a disk tier's directory: one bit in a named field, and records in the wrong place.

Each works on files alone, as a medium does that flips, tears, misdirects or forgets writes.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

from disk_world import SIZE, drop, header, is_right, number_of, put, recovered

from kvstore.tiers.disk import DiskTier, layout
from kvstore.tiers.disk.io import PAGE
from kvstore.tiers.disk.layout import Geometry, parse_header, parse_superblock
from kvstore.tiers.epochs import EpochsFile

CAPACITY = 8 << 20
BLOCKS = 60
OLDER = "older"
"""Beside the directory: its copy from before the last two groups. In the first of them block 100
took the slot of block 59."""
LATEST, LAST = 100, 101
ALL = {*range(BLOCKS - 1), LATEST, LAST}


def length_of(number: int) -> int:
    """Two sizes, so that there are several segments."""
    return SIZE if number < BLOCKS // 2 else 30_000


def make_directory(path: Path) -> None:
    """Blocks 0 to 58, 100 and 101, written in groups of six, the last two each by itself."""
    path.mkdir(mode=0o700)
    EpochsFile(path).confirm_void()
    tier = DiskTier(path, CAPACITY)
    for first in range(0, BLOCKS, 6):
        put(tier, list(range(first, first + 6)), length_of(first))
    tier.close()
    shutil.copytree(path, path.parent / OLDER)
    tier = DiskTier(path, CAPACITY)
    places = recovered(tier)
    drop(tier, [places[BLOCKS - 1]])
    tier.commit([])
    assert put(tier, [LATEST], length_of(LATEST)) == {LATEST: places[BLOCKS - 1]}
    put(tier, [LAST], length_of(LAST))
    tier.close()


class Slot(NamedTuple):
    """Where a block lies."""

    file: Path
    geometry: Geometry
    index: int

    @property
    def header(self) -> tuple[int, int]:
        """(offset, length)."""
        return self.geometry.header_at(self.index), self.geometry.header_bytes

    @property
    def payload(self) -> tuple[int, int]:
        return self.geometry.payload_at(self.index), self.geometry.payload_bytes


def right_blocks(tier: DiskTier) -> tuple[set[int], set[int]]:
    """Blocks that a start has found, and those of them that can be read; a wrong byte fails."""
    found = recovered(tier)
    right = {i for i, place in found.items() if is_right(tier, place, i, length_of(i))}
    return set(found), right


def segments(path: Path) -> list[Path]:
    return sorted((path / "segments").glob("*.seg"))


def slots(path: Path) -> dict[int, Slot]:
    """Where each block lies, by the headers."""
    found = {}
    for file in segments(path):
        raw = file.read_bytes()
        superblock = parse_superblock(raw[:PAGE])
        assert superblock is not None
        geometry, store_id = superblock.geometry, superblock.store_id
        for index in range(geometry.slot_count):
            page = raw[geometry.header_at(index) :][: geometry.header_bytes]
            record = parse_header(page, store_id, superblock.serial, index)
            if record is not None:
                found[number_of(record.header)] = Slot(file, geometry, index)
    return found


def locate(path: Path, number: int) -> Slot:
    return slots(path)[number]


def flip(file: Path, at: int, bit: int = 2) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))


def read(file: Path, at: int, length: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(at)
        return opened.read(length)


def write(file: Path, at: int, raw: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(raw)


# ---- One bit of a field ----


class Flip(NamedTuple):
    """A bit to flip, and what it may cost with an index and without one."""

    field: str
    file: Path
    at: int
    bit: int
    is_harmless: bool
    lost: set[int]
    lost_without_index: set[int]

    def apply(self) -> None:
        flip(self.file, self.at, self.bit)


def fields(form: struct.Struct) -> list[tuple[int, int]]:
    """(offset, length) of each field of a structure without padding."""
    found, at = [], 0
    for count, code in re.findall(r"(\d*)([a-zA-Z])", form.format):
        size = struct.calcsize(f"<{code}")
        parts = [int(count or 1)] if code == "s" else [size] * int(count or 1)
        for length in parts:
            found.append((at, length))
            at += length
    assert at == form.size, form.format
    return found


def any_flip(path: Path, number: int, random: Random) -> Flip:
    """The flip of this number: page kinds and their fields come in turn."""
    kinds = [_in_superblock, _in_cell, _in_header, _in_payload, _in_header, _in_unused]
    return kinds[number % len(kinds)](path, number // len(kinds), random)


def _field(form: struct.Struct, page: int, number: int, random: Random) -> tuple[str, int]:
    """A byte of a sealed page's field: those of the structure, what follows, and the check."""
    check = layout._CHECK_BYTES
    parts = [*fields(form), (form.size, page - check - form.size), (page - check, check)]
    which = number % len(parts)
    at, length = parts[which]
    return str(which), at + random.randrange(length)


def _in_superblock(path: Path, number: int, random: Random) -> Flip:
    file = random.choice(segments(path))
    name, at = _field(layout._SUPERBLOCK, PAGE, number, random)
    held = {i for i, slot in slots(path).items() if slot.file == file}
    return Flip(f"superblock {name}", file, at, random.randrange(8), False, set(), held)


def _in_cell(path: Path, number: int, random: Random) -> Flip:
    file, page = random.choice(segments(path)), random.choice(layout.CELLS)
    name, at = _field(layout._CELL, PAGE, number, random)
    at += page * PAGE
    return Flip(f"cell {name}", file, at, random.randrange(8), False, set(), set())


def _in_header(path: Path, number: int, random: Random) -> Flip:
    block = random.choice(sorted(ALL))
    slot = locate(path, block)
    at, length = slot.header
    name, within = _field(layout._HEADER, length, number, random)
    return Flip(
        f"header {name}", slot.file, at + within, random.randrange(8), False, set(), {block}
    )


def _in_payload(path: Path, number: int, random: Random) -> Flip:
    block = random.choice(sorted(ALL))
    slot = locate(path, block)
    at = slot.payload[0] + random.randrange(length_of(block))
    return Flip("payload", slot.file, at, random.randrange(8), False, {block}, {block})


def _in_unused(path: Path, number: int, random: Random) -> Flip:
    """Behind a payload, in its slot."""
    block = random.choice(sorted(ALL))
    slot = locate(path, block)
    at, length = slot.payload
    behind = length_of(block)
    at += behind + random.randrange(length - behind)
    return Flip("unused", slot.file, at, random.randrange(8), True, set(), set())


# ---- Records and files in the wrong place or state ----


def _swap(one: Slot, other: Slot, *parts: str) -> None:
    for part in parts:
        (at, length), (to, _) = getattr(one, part), getattr(other, part)
        first, second = read(one.file, at, length), read(other.file, to, length)
        write(one.file, at, second)
        write(other.file, to, first)


def _copy(source: Slot, target: Slot, *parts: str) -> None:
    for part in parts:
        (at, length), (to, _) = getattr(source, part), getattr(target, part)
        write(target.file, to, read(source.file, at, length))


def _stale(path: Path, *parts: str) -> None:
    older = locate(path.parent / OLDER, BLOCKS - 1)
    _copy(older, locate(path, LATEST), *parts)


def _swap_files(path: Path) -> None:
    first, second, *_ = segments(path)
    first.rename(path / "spare")
    second.rename(first)
    (path / "spare").rename(second)


def _older(path: Path, name: str) -> None:
    shutil.rmtree(path / name)
    shutil.copytree(path.parent / OLDER / name, path / name)


def _older_directory(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.parent / OLDER, path)


def _truncate(path: Path) -> None:
    slot = locate(path, LATEST)
    with slot.file.open("r+b") as file:
        file.truncate(slot.payload[0] + 5000)


def _flip_index(path: Path) -> None:
    file = path / "index" / "data.mdb"
    key = header(LATEST).key
    file.write_bytes(file.read_bytes().replace(key, bytes([key[0] ^ 4]) + key[1:]))


def _torn(path: Path) -> None:
    """Only the first sector of a header page got to the medium."""
    slot = locate(path, 7)
    write(slot.file, slot.header[0] + 512, bytes(slot.header[1] - 512))
    flip(slot.file, slot.header[0] + 100)


def _link(path: Path) -> None:
    (path / "segments" / "77.seg").symlink_to("/etc/hostname")


def _stray(path: Path) -> None:
    (path / "segments" / "4000.seg").write_bytes(bytes(100_000))
    (path / "segments" / "4000.seg").chmod(0o600)


def _set(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


class Damage(NamedTuple):
    """What happens to a directory; `lost` are the blocks it costs after `fsck --repair`."""

    spoil: Callable[[Path], object]
    kinds: set[str]
    lost: frozenset[int] = frozenset()
    is_mended: bool = True
    back: frozenset[int] = frozenset()
    """Blocks that were removed before, and are there again."""


DAMAGES: dict[str, Damage] = {
    "a flipped bit in a payload": Damage(
        lambda p: flip(locate(p, 7).file, locate(p, 7).payload[0] + 99), {"payload"}, _set(7)
    ),
    "a flipped bit in a header": Damage(
        lambda p: flip(locate(p, 7).file, locate(p, 7).header[0] + 99), {"header"}
    ),
    "a torn header": Damage(_torn, {"header"}),
    "a flipped bit in a superblock": Damage(lambda p: flip(segments(p)[0], 40), {"superblock"}),
    "a flipped bit in a cell": Damage(
        lambda p: [flip(segments(p)[0], PAGE + 50), flip(segments(p)[0], 2 * PAGE + 50)], {"cell"}
    ),
    "a flipped bit in the index": Damage(_flip_index, {"index"}),
    "a segment that is cut short": Damage(_truncate, {"length", "missing"}, _set(LATEST, LAST)),
    "two payloads swapped": Damage(
        lambda p: _swap(locate(p, 3), locate(p, 4), "payload"), {"payload"}, _set(3, 4)
    ),
    "two records swapped": Damage(
        lambda p: _swap(locate(p, 3), locate(p, 4), "header", "payload"), {"payload"}, _set(3, 4)
    ),
    "two segment files swapped": Damage(_swap_files, {"name"}),
    "a stale record": Damage(lambda p: _stale(p, "header", "payload"), {"payload"}, _set(LATEST)),
    "a stale payload": Damage(lambda p: _stale(p, "payload"), {"payload"}, _set(LATEST)),
    "a stale header": Damage(lambda p: _stale(p, "header"), {"header"}),
    "a misdirected payload": Damage(
        lambda p: _copy(locate(p, 3), locate(p, 4), "payload"), {"payload"}, _set(4)
    ),
    "a misdirected record": Damage(
        lambda p: _copy(locate(p, 3), locate(p, 4), "payload", "header"), {"payload"}, _set(4)
    ),
    "the index deleted": Damage(lambda p: shutil.rmtree(p / "index"), {"index"}),
    "the index replaced by an older copy": Damage(
        lambda p: _older(p, "index"), {"behind", "missing"}
    ),
    "the segments replaced by an older copy": Damage(
        lambda p: _older(p, "segments"), {"payload"}, _set(LATEST, LAST)
    ),
    "the directory replaced by an older copy": Damage(
        _older_directory, set(), _set(LATEST, LAST), back=_set(BLOCKS - 1)
    ),
    "a segment deleted": Damage(
        lambda p: locate(p, LATEST).file.unlink(), {"missing"},
        _set(*range(BLOCKS // 2, BLOCKS - 1), LATEST, LAST),
    ),
    "a foreign file among the segments": Damage(_stray, {"orphan"}),
    "a link among the segments": Damage(_link, {"stranger"}, is_mended=False),
    "a file that others can read": Damage(lambda p: segments(p)[0].chmod(0o644), {"mode"}),
    "format.json deleted": Damage(lambda p: (p / "format.json").unlink(), {"format"}),
    "one epochs file damaged": Damage(lambda p: flip(p / "epochs.copy", 20), {"epochs"}),
    "one epochs file deleted": Damage(lambda p: (p / "epochs").unlink(), {"epochs"}),
    "both epochs files damaged": Damage(
        lambda p: [flip(p / "epochs", 20), flip(p / "epochs.copy", 20)], {"epochs"}
    ),
}  # fmt: skip
