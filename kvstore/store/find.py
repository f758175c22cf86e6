"""Find: a printed block key in the index, for the operator's calls that name one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.policies.index import Span
from kvstore.store.parts import SLICE_BLOCKS, Parts
from kvstore.store.slices import RunScan


def find_key(parts: Parts, key: bytes, found: Callable[[Any, int], None], absent: Any) -> None:
    """Calls `found(run, block in it)` at once when the key turns up, else `absent()`.

    Searches in slices: keys are digests for names, and no lookup ever needs them.
    """
    scan = RunScan(parts.index)

    def go_on() -> None:
        left = SLICE_BLOCKS
        while not scan.is_over and left > 0:
            run = scan.next()
            left -= run.count if run is not None else 1
            if run is not None:
                keys = parts.index.keys(Span(run, 0, run.ready))
                if key in keys:
                    found(run, keys.index(key))
                    return
        if scan.is_over:
            absent()
        else:
            parts.defer(go_on)

    go_on()
