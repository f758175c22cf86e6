"""First tokens of simulated engines, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.policies.cost import CallCost, LinkCost
from kvstore.replay.ttft import EngineCosts, EngineModel, Found, Served, engines_needed

# 10 ms a call and 1 ms a token; 1,000 bytes a token over links of 1 MB/s (disk) and 10 MB/s.
COSTS = EngineCosts(
    CallCost(0.010, 0.001, 0.0),
    LinkCost.of(0.0, 10e6),
    LinkCost.of(0.0, 1e6),
    chunk_tokens=1000,
    bytes_per_token=1000,
)


def serve(requests: list[tuple[float, int, Found]], costs: EngineCosts = COSTS) -> Served:
    """(arrival, input tokens, found) of each request."""
    times = np.array([time for time, _, _ in requests])
    inputs = np.array([tokens for _, tokens, _ in requests])
    return EngineModel(costs, times, inputs, 100).serve([found for _, _, found in requests])


def test_alone_without_a_store() -> None:
    """A prefill of 2,500 tokens takes three calls of at most 1,000."""
    served = serve([(0.0, 2500, Found())])
    assert served.ttft_seconds.tolist() == pytest.approx([2.53])
    assert served.residual_seconds.tolist() == pytest.approx([2.51])
    assert served.restored_token_count == 0


def test_first_come_first_served_in_shared_steps() -> None:
    """The second prompt fills what the first leaves of a step, and waits for nothing else."""
    served = serve([(0.0, 1500, Found()), (0.1, 300, Found())])
    # Steps: 1,000 of the first; then its last 500 and the other's 300 together.
    assert served.ttft_seconds.tolist() == pytest.approx([1.82, 1.72])


def test_restore_from_host() -> None:
    """What is in host comes in its transfer time, and only the rest is computed."""
    served = serve([(5.0, 1000, Found(900))])
    assert served.ttft_seconds.tolist() == pytest.approx([0.090 + 0.110])
    assert served.restored_token_count == 900
    assert served.disk_read_bytes == 0


def test_a_prompt_that_is_all_there_computes_its_last_token() -> None:
    """A whole hit still has one token computed."""
    served = serve([(0.0, 1000, Found(1000))])
    assert served.residual_seconds.tolist() == pytest.approx([0.011])


def test_slow_disk_is_left_alone() -> None:
    """Where the disk is slower than computing, the planner computes what only the disk has."""
    slow = COSTS._replace(disk=LinkCost.of(0.0, 0.1e6))
    served = serve([(0.0, 1000, Found(400, 400))], slow)
    assert served.restored_token_count == 400
    assert served.recomputed_requests == 1
    assert served.disk_read_bytes == 0
    fast = serve([(0.0, 1000, Found(400, 400))], COSTS._replace(disk=LinkCost.of(0.0, 5e6)))
    assert fast.restored_token_count == 800
    assert fast.disk_read_bytes == 400_000


def test_restores_wait_for_each_other_on_a_link() -> None:
    """Two prompts from one disk come one after the other."""
    disk = COSTS._replace(disk=LinkCost.of(0.0, 4e6), engine_count=2)
    served = serve([(0.0, 1000, Found(0, 900)), (0.0, 1000, Found(0, 900))], disk)
    first, second = served.ttft_seconds.tolist()
    assert first == pytest.approx(0.225 + 0.110)
    assert second == pytest.approx(0.450 + 0.110)


def test_requests_go_to_the_engine_with_the_least_work() -> None:
    """With two engines two prompts do not wait for each other."""
    both = [(0.0, 1000, Found()), (0.0, 1000, Found())]
    assert serve(both).ttft_seconds.tolist() == pytest.approx([1.01, 2.02])
    two = serve(both, COSTS._replace(engine_count=2))
    assert two.ttft_seconds.tolist() == pytest.approx([1.01, 1.01])


def test_deadlines() -> None:
    """Misses are counted apart: those that the plan foresaw, and those that it did not."""
    late = COSTS._replace(deadline_seconds=1.5)
    served = serve([(0.0, 1000, Found()), (0.0, 1000, Found())], late)
    assert (served.predicted_misses, served.unpredicted_misses) == (1, 0)
    noisy = COSTS._replace(deadline_seconds=1.05, noise=0.5)
    served = serve([(10.0 * i, 1000, Found()) for i in range(200)], noisy)
    assert served.predicted_misses + served.unpredicted_misses > 20


def test_noise_is_seeded() -> None:
    """Equal seeds spread durations equally, and 0 not at all."""
    noisy = COSTS._replace(noise=0.2)
    requests = [(10.0 * i, 1000, Found()) for i in range(50)]
    first = serve(requests, noisy).ttft_seconds
    assert first.tolist() == serve(requests, noisy).ttft_seconds.tolist()
    assert first.std() > 0.1
    assert serve(requests).ttft_seconds.std() == pytest.approx(0)


def test_engines_needed() -> None:
    """As many engines as keep a fifth of their time free without a store."""
    times, inputs = np.arange(101.0), np.full(101, 990)
    assert engines_needed(COSTS, times, inputs) == 2
    assert engines_needed(COSTS, times, inputs * 3) == 4
    assert engines_needed(COSTS, times[:1], inputs[:1]) == 1
