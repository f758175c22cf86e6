"""The store's blocks as vLLM's KV events: what routers learn from an engine's event stream.

The daemon's events name blocks by its own keys and, in external mode, by vLLM's hashes; removals
have the key only, so what each key stands for is remembered.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvstore.client import BlockEvent, Space
from kvstore.core.errors import KVStoreError
from kvstore.engines.reach import Reach

logger = logging.getLogger(__name__)

EVENTS_KEPT = 1 << 14
KEYS_KEPT = 1 << 20
SILENCE_SECONDS = 60.0  # after which the stream is opened anew, from where it was
RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Stored:
    """Blocks that a tier has now, by vLLM's hashes; `parent` is that of the first's parent."""

    tier: str
    hashes: tuple[bytes, ...]
    parent: bytes | None
    block_size: int


@dataclass(frozen=True)
class Removed:
    """Blocks that a tier has no more."""

    tier: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True)
class Cleared:
    """Everything is gone, or may be: what was told before counts no more."""


class Translator:
    """A space's events in vLLM's hashes, by which its blocks are named there."""

    def __init__(self) -> None:
        self._hashes: dict[bytes, bytes] = {}

    def translate(self, event: BlockEvent) -> Stored | Removed | Cleared | None:
        """What an event means for vLLM, if anything."""
        if event.kind == "stored":
            return self._stored(event)
        if event.kind == "removed":
            known = tuple(self._hashes[key] for key in event.keys if key in self._hashes)
            return Removed(event.tier, known) if known else None
        self._hashes.clear()
        return Cleared()

    def _stored(self, event: BlockEvent) -> Stored:
        for key, digest in zip(event.keys, event.symbols, strict=True):
            self._hashes.pop(key, None)
            self._hashes[key] = digest
        while len(self._hashes) > KEYS_KEPT:
            del self._hashes[next(iter(self._hashes))]
        parent = self._hashes.get(event.parent_key)
        return Stored(event.tier, event.symbols, parent, event.block_size)


class Follower:
    """Follows the daemon's events on a thread; `take` has what came since the last call."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._events: deque[Stored | Removed | Cleared] = deque(maxlen=EVENTS_KEPT)
        self._over = threading.Event()
        self._next = 1  # everything that the daemon still knows of
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)
        self._thread.start()

    def take(self) -> list[Stored | Removed | Cleared]:
        """Events in their order; if there were too many, everything counts as cleared first."""
        count = len(self._events)
        taken = [self._events.popleft() for _ in range(count)]
        return [Cleared(), *taken] if count == EVENTS_KEPT else taken

    def _run(self) -> None:
        translator = Translator()
        while not self._over.is_set():
            space = self._reach.attached
            if space is not None:
                with suppress(KVStoreError):
                    self._follow(space, translator)
            self._over.wait(RETRY_SECONDS)

    def _follow(self, space: Space, translator: Translator) -> None:
        for event in space.events(self._next, silence_seconds=SILENCE_SECONDS):
            self._next = event.sequence + 1
            said = translator.translate(event)
            if said is not None:
                self._events.append(said)
            if self._over.is_set():
                return

    def close(self) -> None:
        self._over.set()


def as_vllm(event: Stored | Removed | Cleared) -> Any:
    """The event as vLLM's own kind."""
    from vllm.distributed.kv_events import (  # type: ignore[import-not-found]
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
    )
    from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
        maybe_convert_block_hash,
    )

    if isinstance(event, Cleared):
        return AllBlocksCleared()
    hashes = [maybe_convert_block_hash(digest) for digest in event.hashes]
    medium = MEDIA.get(event.tier, event.tier)
    if isinstance(event, Removed):
        return BlockRemoved(block_hashes=hashes, medium=medium)
    parent = None if event.parent is None else maybe_convert_block_hash(event.parent)
    return BlockStored(
        block_hashes=hashes, parent_block_hash=parent, token_ids=[],
        block_size=event.block_size, lora_id=None, medium=medium, lora_name=None,
    )  # fmt: skip


MEDIA = {"host": "CPU", "disk": "STORAGE", "hbm": "GPU"}
