"""The vLLM connector's worker side on a GPU, driven as vLLM drives it, on a driver without a GPU.

The driver does a stream's work when somebody waits for it, and of other streams only what that
waits for: whoever forgets to wait, or to have a stream wait for another, finds the old bytes.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from daemons import eventually
from vllm_desk import BLOCK, BLOCKS, Request, tokens
from vllm_gpu_desk import OWN, PLACES, GpuDesk, Held, begun, computed, found, polled, random_page

from kvstore.client.gpu import Calibration
from kvstore.core.errors import SpecError
from kvstore.engines.vllm.gpu_worker import GpuWorkerSide
from kvstore.engines.vllm.messages import StepMessage
from kvstore.engines.vllm.pages import Pages
from kvstore.engines.vllm.settings import Settings
from kvstore.engines.vllm.worker import WorkerSide, worker_side


@pytest.mark.parametrize(
    ("kind", "way"),
    [("packed", "pieces"), ("kv-first", "staged"), ("nhd", "staged"), ("cross-layer", "pieces")],
)
def test_a_block_comes_back_byte_for_byte(
    desks: Callable[..., GpuDesk], kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one engine computed another has in its own blocks, and none besides."""
    least = Calibration(1 if way == "pieces" else 1 << 40)
    monkeypatch.setattr("kvstore.engines.vllm.mover.Calibration", lambda: least)
    one, other = (desks(f"exact {kind} {way}", kind, blocks_each=2) for _ in range(2))
    pages = computed(one, Request("a", tokens(1, 33)), 33)
    request = found(other, "b", tokens(1, 33), 32)
    assert other.load(request, 0, 32, PLACES) == set()
    for ours, theirs in zip(PLACES, OWN, strict=True):
        assert np.array_equal(other.read(ours), pages[theirs])
    for block in set(range(BLOCKS)) - set(PLACES):
        assert (other.read(block) == 0xEE).all()


def test_pages_may_be_used_again_as_soon_as_the_step_is_over(desks: Callable[..., GpuDesk]) -> None:
    """What the next step writes to saved pages is not what is stored, though its stream is done."""
    desk = desks("reused")
    go_on = threading.Event()
    desk.side._saver.submit(lambda: go_on.wait(10.0))  # the put comes late
    pages = computed(desk, Request("a", tokens(2, 33)), 33)
    for block in OWN:
        desk.write(block, random_page(99 + block))
    desk.compute.synchronize()
    assert not np.array_equal(desk.read(OWN[0]), pages[OWN[0]])
    go_on.set()
    request = found(desk, "b", tokens(2, 33), 32)
    assert desk.load(request, 0, 32, PLACES) == set()
    for ours, theirs in zip(PLACES, OWN, strict=True):
        assert np.array_equal(desk.read(ours), pages[theirs])


def test_a_load_comes_after_what_was_asked_of_its_pages(desks: Callable[..., GpuDesk]) -> None:
    """Work of earlier steps that still writes to pages does not do so after they were loaded."""
    desk = desks("late work")
    pages = computed(desk, Request("a", tokens(3, 33)), 33)
    request = found(desk, "b", tokens(3, 33), 32)
    for block in PLACES:
        desk.write(block, random_page(7))  # of a request that has ended meanwhile
    assert desk.load(request, 0, 32, PLACES) == set()
    desk.compute.synchronize()
    for ours, theirs in zip(PLACES, OWN, strict=True):
        assert np.array_equal(desk.read(ours), pages[theirs])


def test_a_step_waits_for_no_gpu(desks: Callable[..., GpuDesk]) -> None:
    """Steps with saves and loads return while the model's stream stands still."""
    desk = desks("still")
    computed(desk, Request("a", tokens(4, 33)), 33)
    request = found(desk, "b", tokens(4, 33), 32)
    held = Held(desk)
    began = time.monotonic()
    begun(desk, request, 32, PLACES)
    later = Request("c", tokens(5, 9))
    desk.scheduler.new_request(later)
    desk.step([(later, 0, 9)], {"c": [10, 11]})
    assert not desk.side.results(None, set()).ended
    assert time.monotonic() - began < 3.0
    held.go()
    assert polled(desk).ended == {"b"}
    assert found(desk, "d", tokens(5, 9), 8)


def test_windows_that_moved_on_are_left_out(desks: Callable[..., GpuDesk]) -> None:
    """A dropped block of a group is neither stored as if it were there nor written."""
    desk = desks("hybrid", group_count=2, kind="cross-layer")
    second = [0, 0, *range(11, 17)]
    computed(desk, Request("a", tokens(9, 33)), 33, (OWN, second))
    other = Request("b", tokens(10, 33))
    whole = list(range(9, 17))
    pages = computed(desk, other, 33, (OWN, whole))
    request = found(desk, "c", tokens(10, 33), 32)
    ours, theirs = list(range(20, 28)), [0, 0, 0, *range(25, 30)]
    before = desk.read(0, 1)
    desk.scheduler.allocated(request, (ours, theirs), 32)
    (results,) = desk.step()
    results = results if results.ended else polled(desk)
    assert (results.ended, results.failed) == ({"c"}, set())
    for n in range(8):
        assert np.array_equal(desk.read(ours[n], 0), pages[OWN[n]])
        if theirs[n]:
            assert np.array_equal(desk.read(theirs[n], 1), pages[whole[n]])
    assert np.array_equal(desk.read(0, 1), before)
    missing = Request("d", tokens(9, 33))
    desk.scheduler.new_request(missing)
    assert desk.ask(missing) == (0, False)


def test_what_the_engine_has_is_not_written_again(desks: Callable[..., GpuDesk]) -> None:
    """Of a store block that the engine has in part, only the rest is copied."""
    desk = desks("partial", blocks_each=4)
    pages = computed(desk, Request("a", tokens(11, 33)), 33)
    request = found(desk, "b", tokens(11, 33), 24, computed=8)
    assert desk.load(request, 8, 24, PLACES) == set()
    for n, block in enumerate(PLACES):
        assert np.array_equal(desk.read(block), pages[OWN[n]]) == (n >= 2)


def test_no_more_is_on_its_way_than_there_is_memory_for(
    desks: Callable[..., GpuDesk], caplog: pytest.LogCaptureFixture
) -> None:
    """Saves beyond save_queue_bytes are left out, and slots that are read are not written."""
    desk = desks("bounded", save_queue_bytes=3 * 768)
    assert "what is beyond that is not stored" in caplog.text
    taker = desk.side._mover.taker
    assert taker is not None
    go_on = threading.Event()
    desk.side._saver.submit(lambda: go_on.wait(10.0))
    pages = computed(desk, Request("a", tokens(12, 33)), 33)
    computed(desk, Request("b", tokens(13, 33)), 33, PLACES)
    assert not taker._free
    go_on.set()
    assert eventually(lambda: len(taker._free) == 3)
    request = found(desk, "c", tokens(12, 33), 3 * BLOCK)
    assert desk.load(request, 0, 3 * BLOCK, PLACES[:3]) == set()
    for ours, theirs in zip(PLACES[:3], OWN, strict=False):
        assert np.array_equal(desk.read(ours), pages[theirs])
    missing = Request("d", tokens(13, 33))
    desk.scheduler.new_request(missing)
    assert desk.ask(missing) == (0, False)
    none = desks("unsaved", save_queue_bytes=0)
    computed(none, Request("a", tokens(12, 33)), 33)
    assert none.side._mover.taker is None


def test_steps_are_timed_by_the_gpu(
    desks: Callable[..., GpuDesk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told of a step is from its begin on the GPU to its end there, not the call's time."""
    desk = desks("timed", report_steps=True)
    told: list[tuple[StepMessage, float, str]] = []
    monkeypatch.setattr(desk.side, "_report_step", lambda *call: told.append(call))
    request = Request("a", tokens(17, 9))
    desk.scheduler.new_request(request)
    desk.ask(request)
    desk.scheduler.allocated(request, ([1, 2],), 0)
    message = StepMessage(prefill=[(9, 0, "a")])
    desk.side.begin(message)
    held = Held(desk)
    desk.side.end_forward(message)
    desk.side.results(message, set())
    time.sleep(0.2)
    desk.side.results(message, set())
    assert not told
    held.go()
    assert eventually(lambda: desk.side.results(message, set()) and told)
    ((told_message, seconds, clock),) = told
    assert (told_message, clock) == (message, "device")
    assert 0.15 < seconds < 5.0


def test_a_gpu_is_served_only_if_that_was_asked_for() -> None:
    """Without the setting a worker has the side that refuses a GPU; processors never have this."""
    cuda, cpu = (_config(kind) for kind in ("cuda", "cpu"))
    assert worker_side(cuda, Settings()) is WorkerSide
    assert worker_side(cuda, Settings(gpu="untested")) is GpuWorkerSide
    assert worker_side(cpu, Settings(gpu="untested")) is WorkerSide
    with pytest.raises(SpecError, match='add "gpu": "untested" to kv_connector_extra_config'):
        Pages({"layers.0.attn": torch.zeros(4, 8, device="meta")}, 4)


def _config(kind: str) -> Any:
    return SimpleNamespace(device_config=SimpleNamespace(device_type=kind))


def test_nothing_of_cuda_is_loaded_without_a_gpu() -> None:
    """The modules of the connector load no driver, and no torch, before a cache is registered."""
    code = (
        "import sys; import kvstore.engines.vllm.gpu_worker, kvstore.engines.vllm.worker; "
        "assert 'torch' not in sys.modules; "
        "assert not any('libcuda' in line for line in open('/proc/self/maps'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
