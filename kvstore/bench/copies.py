"""Plain copies of the same bytes in the same pieces: what a restore or a put is compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import numpy as np

COPIES = ("numpy_copyto", "ctypes_memmove")


def copy_actions(
    source: Sequence[np.ndarray], target: Sequence[np.ndarray]
) -> dict[str, Callable[[], None]]:
    """Both ways to copy `source` to `target` block by block on one thread."""
    pairs = list(zip(target, source, strict=True))
    moves = [(t.ctypes.data, s.ctypes.data, s.nbytes) for t, s in pairs]

    def numpy_copyto() -> None:
        for to, of in pairs:
            np.copyto(to, of)

    def ctypes_memmove() -> None:
        for to, of, size in moves:
            ctypes.memmove(to, of, size)

    return {"numpy_copyto": numpy_copyto, "ctypes_memmove": ctypes_memmove}


def fastest(medians: Mapping[str, float], names: Sequence[str]) -> tuple[str, float]:
    """The fastest of some contestants and its seconds."""
    name = min(names, key=medians.__getitem__)
    return name, medians[name]


def prefaulted(shape: tuple[int, int]) -> np.ndarray:
    """Memory whose pages are all there."""
    return np.full(shape, 0xA5, dtype=np.uint8)
