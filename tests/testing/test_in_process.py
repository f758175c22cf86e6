"""The test kit: a store in one's own process behaves as a daemon's does, with its clients."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import kvstore.testing
from kvstore.client import KVSpec
from kvstore.core.errors import InvalidRequest, LeaseLost, PermissionDenied, StoreUnavailable
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.testing import (
    Fault,
    FaultyTier,
    InProcessStore,
    ManualClock,
    MemoryTier,
    SimulatedMover,
    ThrottledTier,
)

SPEC = KVSpec(
    model="m", revision="r", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32",
    block_size=4,
)  # fmt: skip
TOKENS = list(range(32))


def blocks(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (count, SPEC.block_bytes), np.uint8)


def restored(space: Any, tokens: Any) -> np.ndarray:
    with space.lookup(tokens) as match:
        target = np.empty((match.block_count, SPEC.block_bytes), np.uint8)
        space.restore_into(match, target)
        views = space.restore(match)
        assert [bytes(view) for view in views] == [row.tobytes() for row in target]
        match.check()
        return target


@pytest.fixture
def shm_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("kind", ["host", "memory", "late", "threads"])
def test_put_and_restore(kind: str, shared_memory: bool) -> None:
    """The README's flow works on every kind of store, with and without shared memory."""
    options: dict[str, Any] = {
        "host": {"clock": ManualClock()},
        "memory": {"tier": MemoryTier(1 << 20)},
        "late": {"clock": ManualClock(), "mover": SimulatedMover(Random(3))},
        "threads": {},
    }[kind]
    with InProcessStore("4MiB", **options) as store:
        with store.client(shared_memory=shared_memory) as client:
            space = client.attach(SPEC)
            data = blocks(8)
            assert space.put(TOKENS, data).stored == 8
            assert space.put_async(TOKENS, data).result().present == 8
            assert np.array_equal(restored(space, [*TOKENS, 1, 2]), data)
            assert client.status().block_count == 8
        store.settle()
        store.check_integrity()
        assert store.kv.status().session_count == 0


def test_time_passes_in_advance() -> None:
    """On a ManualClock clients renew while time passes, unless they are to be frozen."""
    with InProcessStore(clock=ManualClock()) as store, store.client() as client:
        space = client.attach(SPEC)
        space.put(TOKENS, blocks(8))
        match = space.lookup(TOKENS)
        store.advance(100)
        match.check()
        store.advance(11, keep=False)
        with pytest.raises(LeaseLost):
            match.check()
        with pytest.raises(StoreUnavailable):
            space.lookup(TOKENS)
        store.advance(2)
        assert space.lookup(TOKENS).matched_tokens == 32
    with InProcessStore() as store, pytest.raises(InvalidRequest, match="ManualClock"):
        store.advance(1)


def test_restart_is_a_kill(shm_directory: Path) -> None:
    """I10: blocks of a directory outlive a restart, clients come back by themselves."""
    store = InProcessStore("4MiB", directory=shm_directory, clock=ManualClock())
    client = store.client()
    space = client.attach(SPEC)
    data = blocks(8)
    space.put(TOKENS, data)
    match = space.lookup(TOKENS)
    store.restart()
    with pytest.raises(StoreUnavailable):
        space.lookup(TOKENS)
    with pytest.raises(LeaseLost):
        match.check()
    store.advance(2)
    assert np.array_equal(restored(space, TOKENS), data)
    store.close()
    with InProcessStore("4MiB", directory=shm_directory) as again, again.client() as client:
        assert np.array_equal(restored(client.attach(SPEC), TOKENS), data)


def test_restart_without_a_directory_is_cold() -> None:
    """What is sealed is gone after a restart; a tier of one's own has to be passed again."""
    with InProcessStore("4MiB", clock=ManualClock()) as store:
        client = store.client()
        space = client.attach(SPEC)
        space.put(TOKENS, blocks(8))
        store.restart()
        store.advance(2)
        assert space.lookup(TOKENS).matched_tokens == 0
    tier = FaultyTier(MemoryTier(1 << 20), Random(0))
    with InProcessStore(tier=tier) as store:
        with pytest.raises(InvalidRequest, match="pass the tier"):
            store.restart()
        store.restart(MemoryTier(1 << 20))
        assert store.client().attach(SPEC).put(TOKENS, blocks(8)).stored == 8


def test_clients_in_many_threads() -> None:
    """Any thread may use a client: none gets another's bytes, and nothing is left over."""
    with InProcessStore("8MiB") as store:
        clients = [store.client() for _ in range(3)]
        spaces = [client.attach(SPEC) for client in clients]

        def work(n: int) -> int:
            space, tokens, data = spaces[n % 3], [n] * 32, blocks(8, n)
            hits = 0
            for _ in range(10):
                space.put(tokens, data)
                found = restored(space, tokens)
                assert np.array_equal(found, data[: len(found)])
                hits += len(found)
            return hits

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(work, range(24)))
        for client in clients:
            client.close()
        store.check_integrity()
        assert store.kv.status().lease_count == 0


def test_roles_and_tenants() -> None:
    """A client may be an engine of some tenants only, as an [[access]] rule would have it."""
    with InProcessStore(sections={"tenants": [{"name": "b"}]}) as store:
        admin, engine = store.client(), store.client(role="engine", tenants=["b"])
        assert set(admin.tenants) == {"default", "b"}
        engine.attach(SPEC, tenant="b")
        with pytest.raises(PermissionDenied):
            engine.attach(SPEC)
        with pytest.raises(PermissionDenied):
            engine.status()


def test_sections_configure_the_store() -> None:
    """Tables of the configuration file work here too, checked as a daemon checks them."""
    sections = {
        "limits": {"lease_ttl_seconds": 2.0},
        "tenants": [{"name": "b", "host_cap": "1MiB"}],
    }
    with InProcessStore(clock=ManualClock(), sections=sections) as store:
        client = store.client()
        space = client.attach(SPEC, tenant="b")
        space.put(list(range(4000)), blocks(1000))
        assert client.status().block_count <= 256
        assert space.lookup(TOKENS).lease is not None
        store.advance(30)
    with pytest.raises(Exception, match="nonsense"):
        InProcessStore(sections={"nonsense": {}})


def test_subscribe_answers_what_is_there() -> None:
    """A stream of events ends here, with what the log has by now."""
    with InProcessStore() as store, store.client() as client:
        client.attach(SPEC).put(TOKENS, blocks(8))
        session = client._link.session()
        events = list(session.stream("Subscribe", pb.SubscribeRequest(from_sequence=1), 1.0))
        assert [event.WhichOneof("kind") for event in events] == ["stored"]


def test_notices_reach_clients() -> None:
    """A client hears of a clear and of a drain at once, as from a daemon."""
    with InProcessStore(clock=ManualClock()) as store:
        client, admin = store.client(), store.client()
        space = client.attach(SPEC)
        space.put(TOKENS, blocks(8))
        match = space.lookup(TOKENS)
        admin.admin.clear(all=True)
        with pytest.raises(LeaseLost, match="ended it"):
            match.check()
        admin.admin.drain(10.0)
        with pytest.raises(StoreUnavailable, match="draining"):
            space.lookup(TOKENS)


def test_faults_show_as_misses() -> None:
    """A tier that fails on purpose makes puts reject and lookups miss, and raises nothing."""
    tier = FaultyTier(MemoryTier(1 << 20), Random(1))
    with InProcessStore(tier=tier) as store, store.client() as client:
        space = client.attach(SPEC)
        tier.budget.rates[Fault.WRITE_ERROR] = 1.0
        result = space.put(TOKENS, blocks(8))
        assert (result.stored, result.rejected) == (0, 8)
        assert "the copy failed" in result.reason
        assert space.lookup(TOKENS).matched_tokens == 0


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_put_whose_space_is_cleared_meanwhile(shared_memory: bool) -> None:
    """A put that loses what it reserved counts the rest as rejected; it is no error."""
    with InProcessStore("4MiB") as store, store.client(shared_memory=shared_memory) as client:
        space, data = client.attach(SPEC), blocks(8)

        def block(position: int) -> np.ndarray:
            if position == 5:
                store.wait(store.kv.clear())
            return data[position]

        result = space.put(TOKENS, block)
        assert result.rejected >= 3
        assert result.reason
        assert space.put(TOKENS, data).rejected == 0
        assert np.array_equal(restored(space, TOKENS), data)


def test_throttled_time_is_the_clock_s() -> None:
    """A throttled tier on a ManualClock takes as long as its bandwidth says, in no time."""
    clock = ManualClock()
    tier = ThrottledTier(MemoryTier(1 << 20), 4096.0, clock=clock, sleep=clock.advance)
    with InProcessStore(tier=tier, clock=clock) as store:
        before = clock.now()
        store.client().attach(SPEC).put([1, 2, 3, 4], blocks(1))
        assert clock.now() - before == pytest.approx(1.0)


def test_a_simulated_order_is_its_seed_s() -> None:
    """One seed gives one order of copies, another seed another."""

    def order(seed: int) -> list[str]:
        mover = SimulatedMover(Random(seed))
        lines: list[str] = []
        for n in range(6):
            job = kvstore.mover.Job(
                "l", "", 0, 1, lambda n=n: lines.append(f"move {n}"),
                lambda moved, n=n: lines.append(f"done {n}"),
            )  # fmt: skip
            assert mover.submit(job)
        assert (mover.pending, mover.queued_bytes("l")) == (6, 6)
        mover.close()
        assert (mover.pending, mover.queued_bytes("l")) == (0, 0)
        return lines

    assert order(1) == order(1)
    assert order(1) != order(2)
    for line in (lines := order(3)):
        if line.startswith("done"):
            assert lines.index(line) > lines.index(line.replace("done", "move"))


def test_the_page_is_right() -> None:
    """The code in docs/testing.md runs, and the page names everything that the kit has."""
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    exec(compile(code, "docs/testing.md", "exec"), {})
    for name in kvstore.testing.__all__:
        assert name in page or name == "SimulatedCrash", f"docs/testing.md does not say {name}"


def test_everything_listed_is_there() -> None:
    """`__all__` names what the kit promises."""
    for name in kvstore.testing.__all__:
        assert getattr(kvstore.testing, name).__doc__
