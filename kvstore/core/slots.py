"""Slots on the wire: places and generations of consecutive blocks, compressed into runs."""

from __future__ import annotations

import struct
from operator import sub

import numpy as np

from kvstore.core.block import NO_PLACE
from kvstore.core.errors import InvalidRequest

_EMPTY_PLACES = np.empty(0, dtype=np.int64)
_EMPTY_GENERATIONS = np.empty(0, dtype=np.uint64)
FEW = 64
_PLACE, _GENERATION = struct.Struct("<q").pack, struct.Struct("<Q").pack
_RAMP = np.arange(1024, dtype=np.int64)


def encode_slots(
    places: np.ndarray, generations: np.ndarray, step: int
) -> tuple[bytes, bytes, bytes]:
    """Packs `places` (int64) and `generations` (uint64), one a block, into runs.

    Within a run places step by `step` (a slot's bytes >> 12) and generations by 1; a run of place
    NO_PLACE is blocks without a slot. Returns first places (int64), first generations (uint64) and
    block counts (uint32), little-endian.
    """
    count = len(places)
    if not count:
        return b"", b"", b""
    if count <= FEW:
        return _encode_few(places.tolist(), generations.tolist(), step)
    if count <= len(_RAMP) and _is_one_run(places, generations, step):
        return places[:1].tobytes(), generations[:1].tobytes(), count.to_bytes(4, "little")
    breaks = (np.diff(places) != step) | (np.diff(generations) != 1)
    absent = places == NO_PLACE
    breaks = np.where(absent[1:] & absent[:-1], False, breaks | absent[:-1])
    first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    counts = np.diff(first, append=count).astype("<u4")
    return (
        places[first].astype("<i8", copy=False).tobytes(),
        generations[first].astype("<u8", copy=False).tobytes(),
        counts.tobytes(),
    )


def _encode_few(places: list[int], generations: list[int], step: int) -> tuple[bytes, bytes, bytes]:
    """As `encode_slots`, without arrays: they cost more than so few blocks are worth."""
    count, place, generation = len(places), places[0], generations[0]
    if (
        place >= 0
        and places[-1] - place == (count - 1) * step
        and places == list(range(place, place + count * step, step))
        and generations == list(range(generation, generation + count))
    ):
        return _PLACE(place), _GENERATION(generation), count.to_bytes(4, "little")
    first_places, first_generations, starts = [place], [generation], [0]
    for i in range(1, count):
        place, generation = place + step, generation + 1
        absent = places[i - 1] == NO_PLACE
        if absent and places[i] == NO_PLACE:
            continue
        if absent or places[i] != place or generations[i] != generation:
            place, generation = places[i], generations[i]
            first_places.append(place)
            first_generations.append(generation)
            starts.append(i)
    sizes = map(sub, [*starts[1:], count], starts)
    runs = len(starts)
    return (
        struct.pack(f"<{runs}q", *first_places),
        struct.pack(f"<{runs}Q", *first_generations),
        struct.pack(f"<{runs}I", *sizes),
    )


def _is_one_run(places: np.ndarray, generations: np.ndarray, step: int) -> bool:
    first, count = int(places[0]), len(places)
    if first < 0 or int(places[-1]) - first != (count - 1) * step:
        return False
    # Comparing bytes costs a third of comparing arrays.
    ramp = _RAMP[:count]
    expected = (ramp * step + first).tobytes(), (ramp.view(np.uint64) + generations[0]).tobytes()
    return bool(expected == (places.tobytes(), generations.tobytes()))


def decode_slots(
    places: bytes, generations: bytes, counts: bytes, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Places and generations of every block; the inverse of `encode_slots`."""
    if len(places) != len(generations) or len(places) != 2 * len(counts) or len(places) % 8:
        raise InvalidRequest(
            f"slots disagree: {len(places)} bytes of places, {len(generations)} of generations, "
            f"{len(counts)} of counts"
        )
    if not counts:
        return _EMPTY_PLACES, _EMPTY_GENERATIONS
    first_places = np.frombuffer(places, dtype="<i8")
    first_generations = np.frombuffer(generations, dtype="<u8")
    sizes = np.frombuffer(counts, dtype="<u4").astype(np.int64)
    if len(sizes) == 1:
        ramp = np.arange(int(sizes[0]), dtype=np.int64)
        if first_places[0] == NO_PLACE:
            ramp[:] = 0
        return first_places[0] + ramp * step, first_generations[0] + ramp.view(np.uint64)
    ends = np.cumsum(sizes)
    ramp = np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(ends - sizes, sizes)
    starts = np.repeat(first_places, sizes)
    ramp[starts == NO_PLACE] = 0
    return starts + ramp * step, np.repeat(first_generations, sizes) + ramp.view(np.uint64)
