"""Subscribers, many and slow: how many there may be, and what they cost the owner thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from desk import Desk
from peers import CallError, LanePeer
from served import config_for_tests, serving

from kvstore.events import EventLog
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.steps import Turns
from kvstore.server.subscription import TURN_EVENTS, EventStream

STREAMS, EVENTS = 8, 3000


class Reader:
    """What one stream sent."""

    def __init__(self, log: EventLog, start: int, turns: Turns, tenant: str = "") -> None:
        self.heard: list[Any] = []
        tenants = frozenset([tenant]) if tenant else None
        self.stream = EventStream(log, tenants, start, self.heard.append, lambda error: None, turns)


@pytest.fixture
def space() -> Any:
    return Desk().engine().space


def run(deferred: deque[Callable[[], None]], each_turn: Callable[[], None]) -> int:
    """Turns of an owner until nothing is left; answers with how many there were."""
    turns = 0
    while deferred:
        for _ in range(len(deferred)):
            deferred.popleft()()
        each_turn()
        turns += 1
    return turns


def test_a_long_log_is_read_in_short_turns(space: Any) -> None:
    """However many subscribers read the whole log at once, a turn of the owner sends a few events,
    and each gets all of them in order, with those that come meanwhile."""
    deferred: deque[Callable[[], None]] = deque()
    log, turns = EventLog(lambda: 0.0, 10_000), Turns(deferred.append)
    for _ in range(EVENTS):
        log.removed(space, "host", bytes(16))
    readers = [Reader(log, 1, turns) for _ in range(STREAMS)]
    sent = [0]

    def each_turn() -> None:
        now = sum(len(reader.heard) for reader in readers)
        assert now - sent[0] <= TURN_EVENTS
        sent[0] = now
        if log.sequence < EVENTS + 100:
            log.removed(space, "host", bytes(16))

    assert run(deferred, each_turn) >= STREAMS * EVENTS // TURN_EVENTS
    for reader in readers:
        assert [event.sequence for event in reader.heard] == [*range(1, log.sequence + 1)]
    assert log.subscriber_count == STREAMS
    log.removed(space, "host", bytes(16))
    assert all(reader.heard[-1].sequence == log.sequence for reader in readers)


def test_others_events_cost_nothing(space: Any) -> None:
    """A log full of other tenants' events is not gone through, in one turn or many."""
    deferred: deque[Callable[[], None]] = deque()
    log, turns = EventLog(lambda: 0.0, 10_000), Turns(deferred.append)
    for _ in range(EVENTS):
        log.removed(space, "host", bytes(16))
    reader = Reader(log, 1, turns, tenant="another")
    assert run(deferred, lambda: None) <= 2
    assert not reader.heard


def test_who_leaves_lets_others_go_on(space: Any) -> None:
    """A stream that is cancelled while it waits for its turn does not hold up the next."""
    deferred: deque[Callable[[], None]] = deque()
    log, turns = EventLog(lambda: 0.0, 100), Turns(deferred.append)
    log.removed(space, "host", bytes(16))
    leaves, stays = Reader(log, 1, turns), Reader(log, 1, turns)
    leaves.stream.cancel()
    run(deferred, lambda: None)
    assert not leaves.heard
    assert len(stays.heard) == 1
    assert log.subscriber_count == 1


def refusal(peer: LanePeer) -> str:
    """What a Subscribe that cannot be is answered."""
    call = peer.send("Subscribe", pb.SubscribeRequest())
    with pytest.raises(CallError) as refused:
        peer.answer("Subscribe", call)
    assert refused.value.code == "RESOURCE_EXHAUSTED"
    return refused.value.message


def test_subscriptions_have_limits(tmp_path: Path) -> None:
    """I16: a session, and all together, have so many subscriptions; who is over hears which limit
    it is, and when a connection ends its places are free again."""
    limits = {"subscriptions": 5, "subscriptions_per_session": 3}
    with serving(tmp_path, config_for_tests(limits=limits)) as daemon:
        first, second = LanePeer(daemon.lane_path), LanePeer(daemon.lane_path)
        for peer, count in ((first, 3), (second, 2)):
            peer.open()
            for _ in range(count):
                peer.send("Subscribe", pb.SubscribeRequest())
        log = daemon.store.events
        assert daemon.eventually(lambda: log.subscriber_count == 5)
        assert "limits.subscriptions_per_session" in refusal(first)
        assert "limits.subscriptions;" in refusal(second)
        first.close()
        assert daemon.eventually(lambda: log.subscriber_count == 2)
        second.send("Subscribe", pb.SubscribeRequest())
        assert daemon.eventually(lambda: log.subscriber_count == 3)
        assert "limits.subscriptions_per_session" in refusal(second)
        second.close()
