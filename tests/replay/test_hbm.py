"""A simulated tier above host: by the rule that serves, and with its links in the plans."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from daemons import SPEC, Tagged
from fake_cuda import fake_driver

from kvstore.cli.main import run
from kvstore.core.clock import ManualClock
from kvstore.core.keys import Chain, Segment
from kvstore.core.space import Space
from kvstore.cuda.device import Device
from kvstore.policies.cost import CallCost, LinkCost
from kvstore.policies.ghost import Ghost
from kvstore.policies.ghost_hbm import Copies
from kvstore.policies.ghost_hbm import HbmTier as GhostTier
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.replay.formats import BUNDLED
from kvstore.replay.ttft import EngineCosts, EngineModel, Found
from kvstore.testing import InProcessStore
from kvstore.tiers.hbm import HbmTier

MIB = 1 << 20
SLOTS = MIB // SPEC.block_bytes
SPARED = 0.8


class Live:
    """A store with a GPU, which is told that copies spare a share of a load's time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.tier = HbmTier(Device(driver=fake_driver()), {"": MIB}, buffer_bytes=1 << 18)
        sections = {"tiers": {"hbm": {"staging_bytes_per_session": "64MiB"}}}
        self.store = InProcessStore("64MiB", hbm=self.tier, clock=self.clock, sections=sections)
        self.client = self.store.client()
        self.space = self.client.attach(SPEC)
        hbm = self.store.kv.parts.hbm
        assert hbm is not None
        monkeypatch.setattr(hbm, "_spared", lambda *_: SPARED)
        uuid = self.tier.device_uuid
        self.call("AttachDevice", pb.AttachDeviceRequest(device_uuid=uuid))

    def call(self, method: str, request: Any) -> Any:
        answer = self.client._link.session().call(method, request, 5.0)
        self.store.settle()
        return answer

    def load(self, tokens: list[int]) -> int:
        """Loads what is stored of a prompt and stores it; how many blocks had copies."""
        found = 0
        with self.space.lookup(tokens) as match:
            if match.lease is not None:
                request = pb.LoadDeviceRequest(lease_id=match.lease.id, staging_bytes=64 * MIB)
                answer = self.call("LoadDevice", request)
                found = int((np.frombuffer(answer.offsets, "<i8") >= 0).sum())
        self.space.put(tokens, [np.frombuffer(b, np.uint8) for b in Tagged().blocks(tokens)])
        return found


def chain_of(tokens: list[int]) -> Chain:
    symbols = np.array(tokens, "<u4").tobytes()
    return Chain((Segment(symbols, 4 * SPEC.block_size),))


def test_a_simulation_promotes_what_the_daemon_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loads at the same times find as many copies in a store and in a simulation."""
    live, random = Live(monkeypatch), Random(3)
    tier = GhostTier(Copies(MIB, lambda *_: SPARED))
    ghost = Ghost("lru", {"": 64 * MIB}, hbm=[tier])
    space, times = Space(1, SPEC, "default"), []
    for _ in range(60):
        first = 1000 * min(int(random.expovariate(0.4)), 9)
        tokens = list(range(first, first + SPEC.block_size * random.choice([16, 48, 96])))
        now = live.clock.now()
        simulated = ghost.serve(space, bytes(32), chain_of(tokens), now).hbm_blocks
        assert live.load(tokens) == simulated
        assert live.tier.usage().block_count == len(tier.promotion)
        times.append(simulated)
        live.clock.advance(random.random() * 3)
        live.client.keep()
    assert sum(times) > 500
    assert len(tier.promotion) == SLOTS  # it was full, so the coldest made room
    live.store.close()
    live.tier.close()


def test_copies_go_with_their_blocks() -> None:
    """What host evicts has no copy any more, and its room is free."""
    space = Space(1, SPEC, "default")
    hbm = GhostTier(Copies(8 * space.slot_bytes, lambda *_: 1.0))
    ghost = Ghost("lru", {"": 8 * space.slot_bytes}, hbm=[hbm])
    one, other = (list(range(n, n + 8 * SPEC.block_size)) for n in (0, 1000))
    found = [ghost.serve(space, bytes(32), chain_of(one), float(t)).hbm_blocks for t in range(4)]
    assert found == [0, 0, 0, 8]
    ghost.serve(space, bytes(32), chain_of(other), 4.0)
    assert len(hbm.promotion) == 0
    found = [ghost.serve(space, bytes(32), chain_of(other), t).hbm_blocks for t in (5.0, 6.0, 7.0)]
    assert found == [0, 0, 8]


def test_copies_come_over_a_link_of_their_own() -> None:
    """What has copies comes over hbm>hbm beside what comes from host, and is not copied up."""
    costs = EngineCosts(
        CallCost(0.010, 0.001, 0.0), LinkCost.of(0.0, 10e6), LinkCost.of(0.0, 1e6),
        chunk_tokens=1000, bytes_per_token=1000, hbm=LinkCost.of(0.0, 100e6),
    )  # fmt: skip

    def ttft(found: Found) -> tuple[float, int]:
        times, inputs = np.array([0.0]), np.array([1000])
        served = EngineModel(costs, times, inputs, 100).serve([found])
        return served.ttft_seconds[0], served.hbm_read_bytes

    assert ttft(Found(900)) == (pytest.approx(0.090 + 0.110), 0)
    assert ttft(Found(hbm_tokens=900)) == (pytest.approx(0.009 + 0.110), 900_000)
    assert ttft(Found(300, 0, 600)) == (pytest.approx(0.030 + 0.110), 600_000)


def test_simulate_and_tune_take_a_tier_hbm(capsys: pytest.CaptureFixture[str]) -> None:
    """Hits by tier add up, bytes go by link, and first tokens do not come later."""
    fast = ["--limit", "300", "--jobs", "1", "--json"]
    base = ["simulate", str(BUNDLED), *fast, "--policy", "lru", "--tier", "host=20%"]
    slow = ["--link", "host>hbm=2GB/s,1ms"]
    assert run([*base, *slow]) == 0
    without = json.loads(capsys.readouterr().out)["results"][0]
    assert run([*base, *slow, "--tier", "hbm=5%"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    tiers = result["tiers"]
    assert list(tiers) == ["host", "hbm"]
    assert tiers["hbm"]["token_hit_ratio"] > 0.01
    by_tier = sum(tier["token_hit_ratio"] for tier in tiers.values())
    assert by_tier == pytest.approx(result["token_hit_ratio"]) == without["token_hit_ratio"]
    links = result["bytes_by_link"]
    assert links["hbm>hbm"] > 0
    assert links["hbm>hbm"] + links["host>hbm"] == result["restored_bytes"]
    assert result["ttft_mean_seconds"] < without["ttft_mean_seconds"]
    assert run(["tune", str(BUNDLED), *fast, "--policy", "lru", "--no-disk", "--hbm", "5%"]) == 0
    assert json.loads(capsys.readouterr().out)["hbm_blocks"] > 0


@pytest.mark.parametrize("text", ["hbm=5%,10%", "hbm=0", "hbm=much"])
def test_wrong_sizes_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A tier hbm has one size, of a block or more."""
    options = ["--limit", "50", "--jobs", "1", "--tier", "host=5%", "--tier", text]
    assert run(["simulate", str(BUNDLED), *options]) == 2
    assert "hbm" in capsys.readouterr().err
