"""What numbers of events tell a subscriber: of its own tenants every loss, of others nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest

from kvstore.core.completion import Completion
from kvstore.events import EventLog, View
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.steps import Turns
from kvstore.server.subscription import QUEUE_EVENTS, EventStream


class Told(NamedTuple):
    """What a space is to the log."""

    id: bytes
    tenant: str
    block_size: int = 16


class World:
    """A log with an owner's turns, and what was told of each tenant."""

    def __init__(self, kept: int = 10_000) -> None:
        self.deferred: deque[Callable[[], None]] = deque()
        self.log = EventLog(lambda: 0.0, kept)
        self.turns = Turns(self.deferred.append)
        self.keys: list[tuple[str, bytes]] = []
        self._by_view: dict[frozenset[str] | None, list[bytes]] = {}

    def tell(self, tenant: str, key: bytes) -> None:
        self.keys.append((tenant, key))
        for tenants, keys in self._by_view.items():
            if tenants is None or tenant in tenants:
                keys.append(key)
        self.log.removed(Told(tenant.encode(), tenant), "host", key)

    def of(self, tenants: frozenset[str] | None) -> list[bytes]:
        """Keys of these tenants' events, first of all first."""
        if tenants not in self._by_view:
            self._by_view[tenants] = [
                key for tenant, key in self.keys if tenants is None or tenant in tenants
            ]
        return self._by_view[tenants]

    def run(self, turns: int = 1_000_000) -> None:
        while self.deferred and turns:
            self.deferred.popleft()()
            turns -= 1


class Reader:
    """A subscriber that takes events while it is not `held`; asserts that each is the one its
    number says, and that numbers go on by one but where it is told of a loss."""

    def __init__(self, world: World, tenants: frozenset[str] | None, start: int) -> None:
        self.world, self.tenants = world, tenants
        self.messages: list[pb.Event] = []
        self.due, self.start = start, start
        self.lost = 0
        self.is_held = False
        self._held: Completion[None] | None = None
        self.stream = EventStream(world.log, tenants, start, self._hear, self._ended, world.turns)

    def _ended(self, error: BaseException | None) -> None:
        raise error or AssertionError("a subscription ended by itself")

    def _hear(self, message: pb.Event) -> Completion[None] | None:
        self.messages.append(message)
        if message.WhichOneof("kind") == "lost":
            self.lost += max(0, message.lost.next_sequence - self.due)
            self.due = message.lost.next_sequence
        else:
            assert message.sequence == self.due
            keys = self.world.of(self.tenants)
            assert message.removed.block_keys == keys[message.sequence - 1]
            self.due += 1
        if not self.is_held:
            return None
        self._held = Completion()
        return self._held

    def go_on(self) -> None:
        held, self._held = self._held, None
        self.is_held = False
        if held is not None:
            held.resolve(None)


@pytest.mark.parametrize("kept", [10_000, 300])
def test_messages_are_the_same_whatever_others_do(kept: int) -> None:
    """I18: byte for byte an engine is sent the same whether other tenants do nothing or much, as
    long as they do not push its events out of the log."""
    sent = []
    for others in (0, 1, 3):
        world, random = World(kept), Random(1)
        early = Reader(world, frozenset("b"), 1)
        for n in range(60):
            for i in range(others):
                world.tell(random.choice("acd"), b"%d-%d" % (n, i))
            world.tell("b", n.to_bytes(16, "big"))
            if n % 7 == 0:
                world.run()
        late, new = Reader(world, frozenset("b"), 20), Reader(world, frozenset("b"), 0)
        world.run()
        new.due = 61
        world.tell("a", b"another's")
        world.tell("b", b"the last")
        world.run()
        assert (len(early.messages), len(late.messages), len(new.messages)) == (61, 42, 1)
        readers = (early, late, new)
        sent.append([m.SerializeToString() for it in readers for m in it.messages])
    assert sent[0] == sent[1] == sent[2]


@pytest.mark.parametrize("tenants", [frozenset("b"), frozenset("bc"), frozenset("xyz"), None])
def test_replay_from_any_number(tenants: frozenset[str] | None) -> None:
    """A subscriber gets what is kept from its number on, whole and once; a number that is not
    reached yet, or is no longer kept, is told as a loss with the number that comes next."""
    world, random = World(kept=200), Random(2)
    for n in range(500):
        world.tell(random.choice("abcd"), n.to_bytes(16, "big"))
    view = View(world.log, tenants)
    total, oldest = len(world.of(tenants)), view.oldest
    assert view.sequence == total
    for start in [*range(1, total + 1, 9), *range(max(1, oldest - 3), oldest + 3), total + 1,
                  total + 2, total + 400]:  # fmt: skip
        reader = Reader(world, tenants, start)
        world.run()
        told_lost = start < oldest or start > total + 1
        first = oldest if told_lost else start
        assert (reader.messages[:1] != [] and reader.messages[0].HasField("lost")) == told_lost
        assert reader.due == total + 1
        assert len(reader.messages) == told_lost + total + 1 - first
        reader.stream.cancel()
    assert world.log.subscriber_count == 0


@pytest.mark.parametrize("seed", range(12))
def test_no_loss_goes_unnoticed(seed: int) -> None:
    """Readers that stall and come back, over a log that keeps little: each event of theirs comes
    once and in order, or is part of a loss that was told."""
    random = Random(seed)
    world = World(kept=random.choice([5, 50, 3000]))
    views = (frozenset("b"), frozenset("bc"), frozenset("a"), None)
    readers = [Reader(world, view, 1) for view in views]
    for n in range(3000):
        world.tell(random.choice("abcd"), n.to_bytes(16, "big"))
        if random.random() < 0.2:
            world.run(random.randrange(1, 4))
        if random.random() < 0.02 and len(readers) < 20:
            view = View(world.log, frozenset("bc"))
            start = random.randrange(view.oldest, view.sequence + 2)
            readers.append(Reader(world, frozenset("bc"), start))
        if random.random() < 0.01:
            random.choice(readers).is_held = True
        if random.random() < 0.02:
            random.choice(readers).go_on()
    for reader in readers:
        reader.go_on()
    world.run()
    for reader in readers:
        heard = sum(not message.HasField("lost") for message in reader.messages)
        assert reader.due - 1 == len(world.of(reader.tenants))
        assert heard + reader.lost == reader.due - reader.start


def test_a_full_queue_is_read_again_from_the_log() -> None:
    """A reader that stalls while more come than its queue takes has lost none that the log kept."""
    world = World()
    reader = Reader(world, frozenset("b"), 1)
    world.run()
    reader.is_held = True
    for n in range(3 * QUEUE_EVENTS):
        world.tell("a", b"other")
        world.tell("b", n.to_bytes(16, "big"))
        world.run(2)
    reader.go_on()
    world.run()
    assert (reader.due, reader.lost) == (3 * QUEUE_EVENTS + 1, 0)


def test_what_is_kept_of_a_tenant_is_bounded() -> None:
    """I16: books by tenant hold what the log keeps and no more; of silent tenants, nothing."""
    world = World(kept=20)
    for n in range(500):
        world.tell(f"t{n // 5}", b"key")
    log: Any = world.log
    assert sum(map(len, log._kept_of.values())) == len(log._kept) == 20
    assert len(log._kept_of) == 4
    assert all(len(log.kept_of(f"t{n}")) == (5 if n >= 96 else 0) for n in range(100))
