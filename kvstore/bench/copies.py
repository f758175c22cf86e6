"""Plain copies of the same bytes in the same pieces: what a restore or a put is compared with."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

COPIES = ("numpy_copyto", "ctypes_memmove")


def copy_actions(
    source: Sequence[np.ndarray], *targets: Sequence[np.ndarray]
) -> dict[str, Callable[[], None]]:
    """Both ways to copy `source` block by block on one thread, to each target in turn."""
    pairs = itertools.cycle([list(zip(t, source, strict=True)) for t in targets])
    moves = itertools.cycle(
        [
            [(t.ctypes.data, s.ctypes.data, s.nbytes) for t, s in zip(target, source, strict=True)]
            for target in targets
        ]
    )

    def numpy_copyto() -> None:
        for to, of in next(pairs):
            np.copyto(to, of)

    def ctypes_memmove() -> None:
        for to, of, size in next(moves):
            ctypes.memmove(to, of, size)

    return {"numpy_copyto": numpy_copyto, "ctypes_memmove": ctypes_memmove}


def fastest(medians: Mapping[str, float], names: Sequence[str]) -> tuple[str, float]:
    """The fastest of some contestants and its seconds."""
    name = min(names, key=medians.__getitem__)
    return name, medians[name]


def windows(blocks: int, count: int) -> list[list[np.ndarray]]:
    """`count` targets of `blocks` 1 MiB blocks each.

    A put writes to memory that no cache holds; a copy to the same target again and again would
    not, and be compared with it unfairly.
    """
    rows = prefaulted((blocks * count, 1 << 20))
    return [list(rows[i * blocks : (i + 1) * blocks]) for i in range(count)]


def prefaulted(shape: tuple[int, int]) -> np.ndarray:
    """Memory whose pages are all there."""
    return np.full(shape, 0xA5, dtype=np.uint8)
