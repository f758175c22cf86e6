"""`ZmqFollower`: a router in small. It reads the wire by vLLM's schema, with no code of ours."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

Place = tuple[bytes, str]


class ZmqFollower:
    """Which blocks are in which (topic, medium), from messages and, for what it missed, replay."""

    def __init__(self, publish: str, replay: str) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.set_hwm(0)
        self.sub.subscribe(b"")
        self.sub.connect(publish)
        self.ask = self.context.socket(zmq.DEALER)
        self.ask.connect(replay)
        self.blocks: dict[Place, set[Any]] = {}
        self.tokens: dict[Any, list[int]] = {}
        self.parents: dict[Any, Any] = {}
        self.next = 0
        self.payloads: list[bytes] = []

    def close(self) -> None:
        self.context.destroy(linger=0)

    def follow(self, seconds: float = 0.3) -> None:
        """Reads what has come; asks again for what is missing; stops when it is quiet so long."""
        while self.sub.poll(int(seconds * 1000)):
            topic, number, payload = self.sub.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if sequence > self.next:
                self.replay()
            if sequence == self.next:
                self.take(topic, payload)

    def replay(self) -> int:
        """Everything from the number that is due; answers with how many messages came."""
        self.ask.send_multipart((b"", self.next.to_bytes(8, "big")))
        count = 0
        while self.ask.poll(5000):
            _, topic, number, payload = self.ask.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                return count
            count += 1
            assert int.from_bytes(number, "big") == self.next, "the replay has a gap"
            self.take(topic, payload)
        raise AssertionError("the replay has no end")

    def take(self, topic: bytes, payload: bytes) -> None:
        self.next += 1
        self.payloads.append(payload)
        seconds, events, *_ = msgspec.msgpack.decode(payload)
        assert isinstance(seconds, float)
        for event in events:
            self.apply(topic, event if isinstance(event, dict) else as_map(event))

    def apply(self, topic: bytes, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            return
        known = self.blocks.setdefault((topic, event["medium"]), set())
        hashes = event["block_hashes"]
        if event["type"] == "BlockRemoved":
            assert known >= set(hashes), "a block is removed that was not there"
            known.difference_update(hashes)
            return
        assert not known & set(hashes), "a block is stored twice"
        known.update(hashes)
        size, tokens = event["block_size"], event["token_ids"]
        assert len(tokens) == size * len(hashes)
        for i, (parent, block) in enumerate(
            zip([event["parent_block_hash"], *hashes], hashes, strict=False)
        ):
            self.parents[block] = parent
            self.tokens[block] = tokens[i * size : (i + 1) * size]

    def readable(self) -> dict[Place, set[Any]]:
        return {place: blocks for place, blocks in self.blocks.items() if blocks}

    def prompt(self, block: Any) -> list[int]:
        """All tokens up to a block's end, by its parents."""
        tokens: list[int] = []
        while block is not None:
            tokens = self.tokens[block] + tokens
            block = self.parents[block]
        return tokens


def as_map(event: list[Any]) -> dict[str, Any]:
    """An event in the array form, by the order of fields in vLLM's older schema."""
    names = {
        "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
                        "medium"),
        "BlockRemoved": ("block_hashes", "medium"),
        "AllBlocksCleared": (),
    }  # fmt: skip
    return {"type": event[0], **dict(zip(names[event[0]], event[1:], strict=True))}
