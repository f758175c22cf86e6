"""A space's KV events, as they come: what became readable in which tier, and what left it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.client.session import Attachment
from kvstore.client.transport import CallTimeout
from kvstore.proto.v1 import kvstore_pb2 as pb

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """`kind` is stored, removed, cleared, or lost: earlier events are not there any more.

    `keys` are block keys of 16 bytes, `symbols` their packed token ids or hashes, `parent_key` is
    that of the first one's parent.
    """

    sequence: int
    kind: str
    tier: str = ""
    keys: tuple[bytes, ...] = ()
    symbols: tuple[bytes, ...] = ()
    parent_key: bytes = b""
    block_size: int = 0


def events(
    attachment: Attachment, from_sequence: int, silence_seconds: float
) -> Iterator[BlockEvent]:
    """Events of the attachment's space; ends when none came for so long."""
    request = pb.SubscribeRequest(from_sequence=from_sequence)
    stream = attachment.session.transport.stream("Subscribe", request, silence_seconds)
    try:
        for event in stream:
            kind = event.WhichOneof("kind")
            if kind == "lost" or event.space_id == attachment.space_id:
                yield _event(event, kind)
    except CallTimeout:
        return  # nothing happened, which says nothing about the daemon


def _event(event: pb.Event, kind: str) -> BlockEvent:
    if kind == "stored":
        stored = event.stored
        keys = cut(stored.block_keys, KEY_BYTES)
        symbols = cut(stored.symbols, len(stored.symbols) // max(len(keys), 1))
        return BlockEvent(
            event.sequence, kind, stored.medium, keys, symbols, stored.parent_key,
            stored.block_size,
        )  # fmt: skip
    if kind == "removed":
        removed = event.removed
        return BlockEvent(event.sequence, kind, removed.medium, cut(removed.block_keys, KEY_BYTES))
    if kind == "lost":
        return BlockEvent(max(event.sequence, event.lost.next_sequence - 1), kind)
    return BlockEvent(event.sequence, kind)


def cut(data: bytes, width: int) -> tuple[bytes, ...]:
    """Consecutive pieces of `width` bytes."""
    return tuple(data[i : i + width] for i in range(0, len(data), width)) if width else ()
