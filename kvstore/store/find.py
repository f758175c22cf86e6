"""Find: a printed block key in the index, for the operator's calls that name one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kvstore.policies.index import Span
from kvstore.store.parts import HOST, SLICE_BLOCKS, Parts


def find_key(parts: Parts, key: bytes, found: Callable[[Any, int], None], absent: Any) -> None:
    """Calls `found(run, block in it)` at once when the key turns up, else `absent()`.

    Searches in slices: keys are digests for names, and no lookup ever needs them.
    """
    runs = deque(parts.index.runs())

    def go_on() -> None:
        left = SLICE_BLOCKS
        while runs and left > 0:
            run = runs.popleft()
            left -= max(1, run.count)
            if run.alive:
                places = parts.index.places([Span(run, 0, run.ready)], HOST, 0).tolist()
                for i, place in enumerate(places):
                    header = parts.header(place) if parts.host.generation(place) else None
                    if header is not None and header.key == key:
                        runs.clear()
                        found(run, i)
                        return
        if runs:
            parts.defer(go_on)
        else:
            absent()

    go_on()
