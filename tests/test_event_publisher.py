"""KV events on ZeroMQ: a follower that knows only vLLM's schema rebuilds every tier's index."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("zmq")

import msgspec
from daemons import DaemonProcess
from follower import ready_keys
from zmq_follower import ZmqFollower

from kvstore.client import KVSpec
from kvstore.core.config import load
from kvstore.core.errors import ConfigError
from kvstore.core.machine import FixedMachine
from kvstore.daemon.events import publish_events
from kvstore.event_publisher import Backlog, EventPublisher
from kvstore.event_wire import MEDIA, token_ids
from kvstore.events import EventLog, KVEvent
from kvstore.metrics import Metrics
from kvstore.testing import InProcessStore, MemoryTier

VLLM = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
SECTIONS = {"publish": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*", "topic": "kv@{model}"}
DECODE = """
import json, sys, msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch
decode = msgspec.msgpack.Decoder(KVEventBatch).decode
blocks = {}
for raw in msgspec.msgpack.decode(sys.stdin.buffer.read()):
    for event in decode(raw).events:
        if isinstance(event, AllBlocksCleared):
            blocks.clear()
            continue
        there = blocks.setdefault(event.medium, set())
        change = there.update if isinstance(event, BlockStored) else there.difference_update
        change(key.hex() for key in event.block_hashes)
        assert event.locality == "LOCAL"
print(json.dumps({medium: sorted(keys) for medium, keys in blocks.items()}))
"""


def spec(model: str) -> KVSpec:
    """Blocks of 4 tokens and 4 KiB."""
    return KVSpec(
        model=model, revision="r", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32",
        block_size=4,
    )  # fmt: skip


class World:
    """A small store over two tiers, published; and a follower of it."""

    def __init__(self, **events: Any) -> None:
        self.store = InProcessStore(
            "1MiB", disk=MemoryTier(2 << 20, "disk"),
            sections={"tenants": [{"name": "secret"}]},
        )  # fmt: skip
        kv = self.store.kv
        config = load(None, {}, FixedMachine(), {"events": {**SECTIONS, **events}})
        found = publish_events(config, kv.events, kv, Metrics())
        assert found is not None
        self.publisher: EventPublisher = found
        self.client = self.store.client()
        self.follower = ZmqFollower(*self.publisher.addresses)

    def close(self) -> None:
        self.follower.close()
        self.publisher.close()
        self.store.close()

    def work(self, seed: int, puts: int = 60) -> None:
        """Prompts that share beginnings, more than host holds; some spaces are cleared."""
        random = Random(seed)
        spaces = [self.client.attach(spec(model)) for model in ("a", "b")]
        spaces.append(self.client.attach(spec("a"), tenant="secret"))
        for n in range(puts):
            space = random.choice(spaces)
            tokens = [random.randrange(2) for _ in range(4 * random.randrange(1, 6))]
            tokens += [n] * (4 * random.randrange(20))
            blocks = len(tokens) // 4
            space.put(tokens, [bytes([n % 256]) * space.spec.block_bytes] * blocks)
            if random.random() < 0.05:
                self.client.admin.clear(space_id=space.space_id)
            if random.random() < 0.2:
                self.client.admin.flush()

    def truth(self, form: str = "map") -> dict[tuple[bytes, str], set[Any]]:
        """What is READY, by topic and medium, of the tenant that is published."""
        kv, found = self.store.kv, {}
        for (space_id, medium), keys in ready_keys(kv.parts).items():
            space = kv.parts.spaces[space_id]
            if space.tenant == "default":
                shown = keys if form == "map" else {int.from_bytes(k[:8], "big") for k in keys}
                found[f"kv@{space.spec.model}".encode(), MEDIA[medium]] = shown
        return found


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**events: Any) -> World:
        made.append(World(**events))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_follower_rebuilds_the_index_of_every_tier(
    world: Callable[..., World], form: str
) -> None:
    """Blocks by model and medium equal the daemon's after evictions, demotions and clears.

    Their tokens, chained by parents from None on, are those of the prompts that were stored.
    """
    one = world(form=form)
    one.work(1)
    one.follower.follow()
    one.follower.replay()
    truth = one.truth(form)
    assert one.follower.readable() == truth
    assert {medium for _, medium in truth} == {"CPU", "STORAGE"}
    for (_, _), blocks in truth.items():
        for block in blocks:
            prompt = one.follower.prompt(block)
            assert len(prompt) % 4 == 0
            assert prompt[0] in (0, 1)


def test_a_follower_that_comes_late_asks_for_what_it_missed(world: Callable[..., World]) -> None:
    """With the replay socket it has all from sequence 0 on, without gap or repeat."""
    one = world()
    one.work(2, puts=20)
    late = ZmqFollower(*one.publisher.addresses)
    try:
        assert late.replay() > 1
        one.work(3, puts=20)
        late.follow()
        late.replay()
        assert late.readable() == one.truth()
        assert late.next == one.follower.replay()
    finally:
        late.close()


def test_other_tenants_are_not_told_of(world: Callable[..., World]) -> None:
    """Only tenants that the configuration names are published: events carry tokens."""
    one = world(topic="kv@{model}@{tenant}", tenants=["secret"])
    one.work(4, puts=30)
    one.follower.replay()
    topics = {topic for topic, _ in one.follower.blocks}
    assert topics == {b"kv@a@secret"}


def test_a_queue_that_is_full_tells_that_nothing_holds(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that come too fast are dropped and counted; followers forget all and hear the rest."""
    one = world()
    one.work(5, puts=5)
    dropped: list[int] = []
    one.publisher._on_dropped = dropped.append
    one.follower.follow()
    one.follower.replay()
    assert one.follower.readable()
    monkeypatch.setattr("kvstore.event_publisher.QUEUE_EVENTS", 3)
    with one.publisher._lock:  # the thread cannot take any meanwhile
        events = [
            KVEvent(i, 1.0, "stored", b"", "default", "host", bytes([i]) * 16) for i in range(5)
        ]
        for event in events[:3]:
            one.publisher._queue.append((event, "t"))
        one.publisher._lose()
        one.publisher._queue.append((events[4], "t"))
    monkeypatch.undo()
    one.client.attach(spec("a")).put([9] * 4, [bytes(spec("a").block_bytes)])
    one.follower.follow()
    one.follower.replay()
    assert dropped == [3]
    assert {len(blocks) for blocks in one.follower.readable().values()} == {1}


def test_the_backlog_is_bounded() -> None:
    """By messages and by bytes; what is oldest goes."""
    backlog = Backlog(3, 100)
    for i in range(5):
        backlog.keep(i, b"", bytes(10))
    assert [sequence for sequence, _, _ in backlog.since(0)] == [2, 3, 4]
    backlog.keep(5, b"", bytes(95))
    assert [sequence for sequence, _, _ in backlog.since(0)] == [5]


def test_strange_requests_for_a_replay_are_left(world: Callable[..., World]) -> None:
    """Requests of another form get no answer, and the next good one does."""
    one = world()
    for frames in ((b"",), (b"", b"xyz"), (b"x", b"y", b"z", b"w"), (bytes(1000), bytes(9))):
        one.follower.ask.send_multipart(frames)
    one.work(6, puts=3)
    assert one.follower.replay() > 1


def test_symbols_that_are_not_tokens_alone_are_left_out() -> None:
    """A block with images has a digest beside its tokens: then no token ids are told."""
    event = KVEvent(1, 0.0, "stored", b"", "default", "host", bytes(16), b"", bytes(16), 4)
    assert token_ids(event, 1) == [0, 0, 0, 0]
    assert token_ids(event._replace(symbols=bytes(48)), 1) == []


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ({"publish": "127.0.0.1:5557"}, "events.publish"),
        ({"replay": "tcp://127.0.0.1:1"}, "set events.publish"),
        ({"publish": "udp://x", "replay": ""}, "tcp://127.0.0.1:5557"),
    ],
)
def test_wrong_addresses_are_refused(events: dict[str, str], words: str) -> None:
    """An address that cannot be one is refused with the key and an example."""
    with pytest.raises(ConfigError, match=words):
        load(None, {}, FixedMachine(), {"events": events})


def test_an_address_in_use_is_refused(world: Callable[..., World]) -> None:
    """A port that somebody has is said in one sentence with the fix."""
    taken = world().publisher.addresses[0]
    config = load(None, {}, FixedMachine(), {"events": {"publish": taken}})
    with InProcessStore("1MiB") as store, pytest.raises(ConfigError, match="cannot be bound"):
        publish_events(config, EventLog(lambda: 0.0, 10), store.kv, Metrics())


def test_a_daemon_that_was_killed_tells_what_it_has_taken_back() -> None:
    """kill -9 and a new start: a follower that begins anew has every block that is there again."""
    with DaemonProcess("8MiB") as daemon:
        places = [f"ipc://{daemon.directory}/{name}" for name in ("events", "replay")]
        daemon.configure(f'[events]\npublish = "{places[0]}"\nreplay = "{places[1]}"\n')
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            space = client.attach(spec("a"))
            space.put(list(range(40)), [bytes(space.spec.block_bytes)] * 10)
        first, again = ZmqFollower(*places), None
        try:
            first.replay()
            daemon.kill()
            daemon.start()
            again = ZmqFollower(*places)
            again.replay()
            assert again.readable() == first.readable()
            assert len(again.readable()[b"kvstore", "CPU"]) == 10
        finally:
            for follower in filter(None, (first, again)):
                follower.close()


@pytest.mark.vllm
@pytest.mark.skipif(not VLLM.exists(), reason="needs the environment of make vllm-env")
def test_vllms_own_decoder_reads_the_wire(world: Callable[..., World]) -> None:
    """vLLM's KVEventBatch decodes every message, and what it gives is the daemon's index."""
    one = world()
    one.work(7)
    one.follower.follow()
    one.follower.replay()
    done = subprocess.run(
        [str(VLLM), "-c", DECODE], input=msgspec.msgpack.encode(one.follower.payloads),
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    decoded = json.loads(done.stdout.decode().splitlines()[-1])
    truth: dict[str, set[str]] = {}
    for (_, medium), keys in one.truth().items():
        truth.setdefault(medium, set()).update(key.hex() for key in keys)
    assert {medium: set(keys) for medium, keys in decoded.items() if keys} == truth
