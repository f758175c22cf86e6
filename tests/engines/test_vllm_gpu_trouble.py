"""Loads and saves of the vLLM connector on a GPU that end early, late, or not at all.

On a driver without a GPU, which does a stream's work when somebody waits for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemons import DaemonProcess, eventually
from fake_cuda import fake_driver
from vllm_desk import Request, tokens
from vllm_gpu_desk import OWN, PLACES, GpuDesk, Held, begun, computed, found, polled, random_page

from kvstore.client.gpu import CudaError, Device
from kvstore.engines.vllm.gpu_worker import GpuWorkerSide
from kvstore.engines.vllm.messages import StepMessage

SUPPORT = Path(__file__).parents[1] / "support"


def test_an_aborted_load_is_over_when_nothing_writes_any_more(
    desks: Callable[..., GpuDesk],
) -> None:
    """The blocks of a request that ended while it was loaded are not given back before."""
    desk = desks("aborted")
    computed(desk, Request("a", tokens(6, 33)), 33)
    request = found(desk, "b", tokens(6, 33), 32)
    held = Held(desk)
    begun(desk, request, 32, PLACES)
    copy = desk.side._running[-1].begun
    desk.scheduler.finished(request)
    for _ in range(20):
        assert not desk.side.results(None, {"b"}).ended
    held.go()
    results = polled(desk)
    assert (results.ended, results.failed_blocks) == ({"b"}, set(PLACES))
    assert copy is not None
    assert copy.copy._events[-1].done()


def test_a_load_that_takes_too_long_is_computed_after_it(desks: Callable[..., GpuDesk]) -> None:
    """Once it is given up, what the model computes into its blocks stays there."""
    desk = desks("slow", transfer_timeout_seconds=0.3)
    computed(desk, Request("a", tokens(7, 33)), 33)
    request = found(desk, "b", tokens(7, 33), 32)
    held = Held(desk)
    begun(desk, request, 32, PLACES)
    results = polled(desk, 2.0)
    assert (results.ended, results.failed_blocks) == ({"b"}, set(PLACES))
    for block in PLACES:
        desk.write(block, random_page(block))
    held.go()
    desk.compute.synchronize()
    for stream in (desk.side._mover._engines.popitem()[1]._loader._last,):
        stream.synchronize()
    for block in PLACES:
        assert np.array_equal(desk.read(block), random_page(block))


def test_new_weights_void_a_copy_under_way(desks: Callable[..., GpuDesk]) -> None:
    """A copy that runs when the weights change counts as failed, once it is over."""
    desk = desks("weights")
    computed(desk, Request("a", tokens(8, 33)), 33)
    request = found(desk, "b", tokens(8, 33), 32)
    held = Held(desk)
    begun(desk, request, 32, PLACES)
    engines = list(desk.side._mover.gpu._engines)
    desk.scheduler.reset()
    desk.step()
    assert not desk.side.results(None, set()).ended
    held.go()
    results = polled(desk)
    assert (results.ended, results.failed_blocks) == ({"b"}, set(PLACES))
    assert eventually(lambda: all(engine._closed for engine in engines))
    assert eventually(lambda: all(_attached(desk)))
    pages = computed(desk, Request("c", tokens(8, 33)), 33)
    again = found(desk, "d", tokens(8, 33), 32)
    assert desk.load(again, 0, 32, PLACES) == set()
    assert np.array_equal(desk.read(PLACES[7]), pages[OWN[7]])


def damage(directory: Path) -> None:
    """Turns over a byte that is not zero in every 256 bytes of a daemon's pools."""
    for path in directory.rglob("*"):
        if path.is_file() and path.stat().st_size >= 8 << 20:
            data = np.memmap(path, np.uint8, "r+").reshape(-1, 256)
            rows = np.flatnonzero(data.any(1))
            data[rows, (data[rows] != 0).argmax(1)] ^= 0xFF


def _attached(desk: GpuDesk) -> list[bool]:
    """Whether each side's session stands."""
    return [desk.scheduler._is_attached(), desk.side._reach.attached is not None]


def test_a_daemon_that_dies_while_it_is_loaded_from(
    lonely_desks: Callable[..., GpuDesk], served: DaemonProcess
) -> None:
    """With kill -9 in the middle of the copies the request computes, and later ones load again.

    What changed in the pool while no daemon ran is not found.
    """
    desk = lonely_desks("killed")
    computed(desk, Request("a", tokens(14, 33)), 33)
    request = found(desk, "b", tokens(14, 33), 32)
    held = Held(desk)
    begun(desk, request, 32, PLACES)
    served.kill()
    assert eventually(lambda: not any(_attached(desk)))
    held.go()
    results = polled(desk)
    assert (results.ended, results.failed_blocks) == ({"b"}, set(PLACES))
    damage(served.pool)
    served.start()
    assert eventually(lambda: all(_attached(desk)), 20.0)
    old = Request("old", tokens(14, 33))
    desk.scheduler.new_request(old)
    assert desk.ask(old) == (0, False)
    pages = computed(desk, Request("c", tokens(15, 33)), 33)
    again = found(desk, "d", tokens(15, 33), 32)
    assert desk.load(again, 0, 32, PLACES) == set()
    assert np.array_equal(desk.read(PLACES[0]), pages[OWN[0]])


def test_blocks_that_are_cleared_while_they_are_copied_fail(
    desks: Callable[..., GpuDesk], shared: DaemonProcess
) -> None:
    """A pool whose blocks went, or hold something else, while the GPU read them is not believed."""
    desk = desks("cleared")
    computed(desk, Request("a", tokens(16, 33)), 33)
    request = found(desk, "b", tokens(16, 33), 32)
    held = Held(desk)
    begun(desk, request, 32, PLACES)
    space = desk.side._reach.attached
    assert space is not None
    with shared.client() as client:
        client.admin.clear(space_id=space.space_id)
    begun_copy = desk.side._running[-1].begun
    assert begun_copy is not None
    assert eventually(lambda: _is_lost(begun_copy.match))
    held.go()
    results = polled(desk)
    assert (results.ended, results.failed_blocks) == ({"b"}, set(PLACES))


def _is_lost(match: Any) -> bool:
    return match.lease is None or match.lease.lost != ""


def test_a_copy_that_the_driver_refuses_costs_a_recompute(
    desks: Callable[..., GpuDesk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load whose copies cannot be asked for fails, and the next one is served."""
    desk = desks("refused")
    computed(desk, Request("a", tokens(18, 33)), 33)
    request = found(desk, "b", tokens(18, 33), 32)

    def refuse(*_: Any, **__: Any) -> None:
        raise CudaError("cuMemcpyBatchAsync", 1, "CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr("kvstore.cuda.device.Stream.copy_many", refuse)
    assert desk.load(request, 0, 32, PLACES) == set(PLACES)
    monkeypatch.undo()
    monkeypatch.setenv("FAKE_CUDA_LAZY", "1")
    again = found(desk, "c", tokens(18, 33), 32)
    assert desk.load(again, 0, 32, PLACES) == set()


@pytest.mark.parametrize("when", ["load", pytest.param("save", marks=pytest.mark.long)])
def test_a_gpu_that_fails_costs_the_store_only(shared: DaemonProcess, when: str) -> None:
    """Once the GPU's context is lost loads fail, saves are left out, and steps go on."""
    result = subprocess.run(
        [sys.executable, "-c", FAILS, shared.address, when], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["failed", "gone", "on"]
    assert result.stderr.count("kvstore is not used any more by this worker") == 1
    assert "Traceback" not in result.stderr


FAILS = """
import os, sys
from types import SimpleNamespace
from daemons import eventually
from fake_cuda import fake_driver
from vllm_desk import Desk, Request, tokens
from vllm_gpu_desk import OWN, PLACES, GpuDesk, computed, found
from kvstore.client.gpu import Device
from kvstore.engines.vllm import mover
mover.LOAD_STAGE_BYTES = 1
address, when = sys.argv[1:]
desk = GpuDesk(SimpleNamespace(address=address), Device(driver=fake_driver()), "fails " + when)
computed(desk, Request("a", tokens(1, 33)), 33)
request = found(desk, "b", tokens(1, 33), 32)
os.environ["FAKE_CUDA_FAIL"] = "1"
if when == "save":
    desk.step([(Request("c", tokens(2, 33)), 0, 33)], {"c": OWN})
assert desk.load(request, 0, 32, PLACES) == set(PLACES)
print("failed")
for n in range(3):
    other = Request(f"d{n}", tokens(3 + n, 33))
    desk.scheduler.new_request(other)
    desk.step([(other, 0, 33)], {other.request_id: OWN})
    again = Request(f"e{n}", tokens(1, 33))
    desk.scheduler.new_request(again)
    if desk.ask(again)[0]:
        assert desk.load(again, 0, 32, PLACES) == set(PLACES)
print("gone on")
Desk.close(desk)
"""


def test_without_a_driver_the_engine_starts_and_computes(
    desks: Callable[..., GpuDesk], caplog: pytest.LogCaptureFixture
) -> None:
    """Where there is no driver, or no such GPU, one line says so and nothing is asked for."""
    desk = desks("there")
    for name in ("libnothing.so.1", ""):
        worker = GpuWorkerSide(desk.side._config, desk.settings, desk.side._caches)
        worker.use_on(desk.side._rank, lambda name=name: lacking(name))
        assert worker.spec_message() is None
        message = StepMessage(weights="new")
        worker.begin(message)
        worker.start_loads(message)
        worker.end_forward(message)
        assert not worker.results(message, {"a"}).ended
        worker.close()
    said = [r.getMessage() for r in caplog.records if "kvstore is not used: " in r.getMessage()]
    assert len(said) == 2
    assert "the CUDA driver libnothing.so.1 cannot be loaded" in said[0]
    assert "there is no GPU GPU-nobody's" in said[1]


def lacking(name: str) -> Any:
    if name:
        from kvstore.cuda.driver import Driver

        return Device(driver=Driver(name))
    return Device("GPU-nobody's", driver=fake_driver())
