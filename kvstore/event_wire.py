"""KV events as vLLM writes them on the wire, so that routers read them: msgpack of these structs.

Fields, their order and their defaults are those of vllm/distributed/kv_events.py: the `Map*` forms
of 0.32, whose events are maps with a `type`; the `Array*` forms of earlier ones and of SGLang,
whose events are arrays with 64-bit hashes. A batch is an array in both.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvstore.core.keys import BLOCK_KEY_BYTES
from kvstore.events import KVEvent

# Names of vLLM's for where a block is.
MEDIA = {"hbm": "GPU", "host": "CPU", "disk": "STORAGE"}
OWNERSHIP = "kvstore"
TOKEN_BYTES = 4
Hash = bytes | int


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one message carries: seconds since the epoch, and events."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class MapStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks became readable; each one's parent is the one before it."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None
    ownership: str | None = None


class MapRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """Blocks left a medium; in others they may still be."""

    block_hashes: list[Hash]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None


class MapCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """Nothing that was told before holds any more."""


class ArrayStored(
    msgspec.Struct, tag="BlockStored", array_like=True, omit_defaults=True, gc=False
):  # fmt: skip
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class ArrayRemoved(
    msgspec.Struct, tag="BlockRemoved", array_like=True, omit_defaults=True, gc=False
):  # fmt: skip
    block_hashes: list[Hash]
    medium: str | None


class ArrayCleared(
    msgspec.Struct, tag="AllBlocksCleared", array_like=True, omit_defaults=True, gc=False
):  # fmt: skip
    pass


class Encoder:
    """Payloads of messages, in one of the two forms: `map` or `array`."""

    def __init__(self, form: str) -> None:
        self._is_map = form == "map"
        self._encode = msgspec.msgpack.Encoder().encode

    def cleared(self) -> bytes:
        return self._encode(MapCleared() if self._is_map else ArrayCleared())

    def event(self, event: KVEvent) -> bytes:
        """One event, stored or removed."""
        medium = MEDIA.get(event.medium, event.medium)
        hashes = list(self._hashes(event.keys))
        if event.kind == "removed":
            if self._is_map:
                return self._encode(MapRemoved(hashes, medium, "LOCAL", OWNERSHIP))
            return self._encode(ArrayRemoved(hashes, medium))
        parent = next(self._hashes(event.parent_key), None)
        tokens, size = token_ids(event, len(hashes)), event.block_size
        if self._is_map:
            return self._encode(
                MapStored(hashes, parent, tokens, size, None, medium, None, "LOCAL", OWNERSHIP)
            )
        return self._encode(ArrayStored(hashes, parent, tokens, size, None, medium))

    def batch(self, seconds: float, events: list[bytes]) -> bytes:
        return self._encode(EventBatch(seconds, [msgspec.Raw(event) for event in events]))

    def _hashes(self, keys: bytes) -> Iterator[Hash]:
        for i in range(0, len(keys), BLOCK_KEY_BYTES):
            key = keys[i : i + BLOCK_KEY_BYTES]
            yield key if self._is_map else int.from_bytes(key[:8], "big")


def token_ids(event: KVEvent, block_count: int) -> list[int]:
    """Tokens of a stored event's blocks; none where symbols are not tokens alone."""
    if len(event.symbols) != block_count * event.block_size * TOKEN_BYTES:
        return []
    return memoryview(event.symbols).cast("I").tolist()
