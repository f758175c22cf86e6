"""Both sides of the vLLM connector against a real daemon, driven as vLLM drives them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from daemons import DaemonProcess
from vllm_desk import BLOCK, Desk, Request, spec, tokens

from kvstore.engines.vllm.events import Removed, Stored

BLOCKS = list(range(1, 9))


@pytest.fixture
def desks(shared: DaemonProcess) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make(*specs: Any, **settings: Any) -> Desk:
        made.append(Desk(shared, *specs, **settings))
        return made[-1]

    yield make
    for desk in made:
        desk.close()


def eventually(condition: Callable[[], Any], seconds: float = 5.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return value


def stored(desk: Desk, request: Request, blocks: list[int], count: int) -> None:
    """Computes a request's first `count` tokens, and waits until the daemon has their blocks."""
    desk.scheduler.new_request(request)
    desk.ask(request)
    desk.scheduler.allocated(request, (blocks,), 0)
    desk.step([(request, 0, count)], {request.request_id: blocks})
    desk.scheduler.finished(request)
    again = Request(f"{request.request_id} again", [*request.all_token_ids[:count], 1])

    def found() -> bool:
        desk.scheduler.new_request(again)
        answer = desk.ask(again)
        desk.scheduler.finished(again)
        return answer[0] == count // BLOCK * BLOCK

    assert eventually(found)


def test_a_block_comes_back_byte_for_byte(desks: Callable[..., Desk]) -> None:
    """What one engine computed another has in its own blocks, and none besides."""
    name = spec("exact")
    one, other = desks(name), desks(name)
    one.fill(BLOCKS)
    stored(one, Request("a", tokens(1, 33)), BLOCKS, 33)
    request = Request("b", tokens(1, 33))
    other.scheduler.new_request(request)
    assert other.ask(request) == (32, True)
    places = [20, 21, 22, 23, 24, 25, 26, 27]
    assert other.load(request, 0, 32, places) == set()
    for ours, theirs in zip(places, BLOCKS, strict=True):
        assert torch.equal(other.storage[0][:, ours], one.storage[0][:, theirs])
    untouched = [n for n in range(32) if n not in places]
    assert not other.storage[0][:, untouched].any()


def test_what_the_engine_has_is_not_written_again(desks: Callable[..., Desk]) -> None:
    """Of a store block that the engine has in part, only the rest is copied."""
    name = spec("partial", block_size=4 * BLOCK, block_bytes=4 * 3 * 256)
    one, other = desks(name), desks(name)
    one.fill(BLOCKS)
    request = Request("a", tokens(2, 33))
    stored_blocks = [*BLOCKS, 9]
    one.scheduler.new_request(request)
    one.step([(request, 0, 33)], {"a": stored_blocks})
    again = Request("b", tokens(2, 33))

    def found() -> bool:
        other.scheduler.new_request(again)
        return bool(other.ask(again, computed=8) == (24, True))

    assert eventually(found)
    places = [10, 11, 12, 13, 14, 15, 16, 17]
    assert other.load(again, 8, 24, places) == set()
    assert not other.storage[0][:, [10, 11]].any()
    for ours, theirs in zip(places[2:], BLOCKS[2:], strict=True):
        assert torch.equal(other.storage[0][:, ours], one.storage[0][:, theirs])


def test_stages_agree_on_the_shortest_match(desks: Callable[..., Desk]) -> None:
    """With pipeline stages a prefix counts as far as every stage has it."""
    stages = (
        spec("stages", pp_size=2, layer_first=0),
        spec("stages", pp_size=2, layer_first=3),
    )
    engine, half = desks(*stages), desks(stages[1])
    half.fill(BLOCKS)
    half_request = Request("half", tokens(3, 33))
    stored(half, half_request, BLOCKS, 33)
    engine.fill(BLOCKS)
    request = Request("first", tokens(3, 17))
    stored(engine, request, BLOCKS, 16)
    whole = Request("whole", tokens(3, 33))
    engine.scheduler.new_request(whole)
    assert engine.ask(whole) == (16, True)
    assert engine.load(whole, 0, 16, [20, 21, 22, 23]) == set()
    assert torch.equal(engine.storage[0][:, 20], engine.storage[0][:, 1])
    assert torch.equal(engine.storage[1][:, 20], half.storage[0][:, 1])


def test_only_accepted_tokens_are_saved(desks: Callable[..., Desk]) -> None:
    """A block that drafts filled waits until they are accepted."""
    desk = desks(spec("drafts"))
    request = Request("a", tokens(4, 10))
    desk.scheduler.new_request(request)
    desk.ask(request)
    desk.scheduler.allocated(request, (BLOCKS,), 0)
    desk.step([(request, 0, 10)], {"a": BLOCKS})
    assert [(job.first, job.count) for job in desk.message.saves] == [(0, 2)]
    request.all_token_ids.append(77)
    desk.step([(request, 10, 4)], {"a": BLOCKS}, {"a": [5, 6, 7]})
    assert not desk.message.saves
    request.all_token_ids += [78, 79]
    desk.step([(request, 12, 1)], {"a": BLOCKS})
    assert [(job.first, job.count) for job in desk.message.saves] == [(2, 1)]


def test_no_store_stores_nothing(desks: Callable[..., Desk]) -> None:
    """A request that asks not to be kept is not; one with nonsense for wishes is served."""
    desk = desks(spec("wishes"))
    private = Request("a", tokens(5, 9), kv_transfer_params={"kvstore": {"no_store": True}})
    odd = Request("b", tokens(6, 9), kv_transfer_params={"kvstore": {"priority": "high"}})
    for request in (private, odd):
        desk.scheduler.new_request(request)
    desk.step([(private, 0, 9), (odd, 0, 9)], {"a": BLOCKS, "b": BLOCKS})
    assert [job.request_id for job in desk.message.saves] == ["b"]


@pytest.mark.parametrize("pause_seconds", [0.0, 0.3])
def test_new_weights_void_what_is_under_way(
    desks: Callable[..., Desk], pause_seconds: float
) -> None:
    """A load that began under the old weights counts as failed, even if it has ended since."""
    desk = desks(spec(f"weights {pause_seconds}"))
    desk.fill(BLOCKS)
    stored(desk, Request("a", tokens(7, 33)), BLOCKS, 33)
    request = Request("b", tokens(7, 33))
    desk.scheduler.new_request(request)
    assert desk.ask(request) == (32, True)
    desk.scheduler.allocated(request, ([20, 21, 22, 23, 24, 25, 26, 27],), 32)
    loads = desk.scheduler.message(_empty()).loads
    desk.scheduler.reset()
    worker = desk.workers[0]
    message = desk.scheduler.message(_empty())
    message.loads = loads
    failed: set[int] = set()
    worker.start_loads(message)
    time.sleep(pause_seconds)
    worker.begin(message)
    assert eventually(lambda: failed.update(worker.results(message, set()).failed_blocks) or failed)
    assert failed == {20, 21, 22, 23, 24, 25, 26, 27}
    fresh = Request("c", tokens(7, 33))
    desk.scheduler.new_request(fresh)
    assert eventually(desk.scheduler._is_attached)
    assert desk.ask(fresh) == (0, False)


def _empty() -> Any:
    return SimpleNamespace(
        total_num_scheduled_tokens=0, scheduled_new_reqs=[], num_scheduled_tokens={},
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    )  # fmt: skip


def test_a_prefix_that_is_being_stored_is_waited_for(desks: Callable[..., Desk]) -> None:
    """A prompt handed over waits for the engine that stores it, and not for ever."""
    name = spec("handed over")
    prefill, decode = desks(name), desks(name, hand_over_seconds=1.0)
    wishes = {"do_remote_prefill": True, "kvstore": {"prompt_tokens": 33}}
    request = Request("b", tokens(8, 33), kv_transfer_params=wishes)
    decode.scheduler.new_request(request)
    began = time.monotonic()
    assert decode.scheduler.matched_tokens(request, 0) == (None, False)
    prefill.fill(BLOCKS)
    first = Request("a", tokens(8, 33), kv_transfer_params={"do_remote_decode": True})
    prefill.scheduler.new_request(first)
    prefill.step([(first, 0, 33)], {"a": BLOCKS})
    assert prefill.scheduler.finished(first) == {
        "do_remote_prefill": True, "do_remote_decode": False, "kvstore": {"prompt_tokens": 33},
    }  # fmt: skip
    assert decode.ask(request) == (32, True)
    assert time.monotonic() - began < 1.0
    lost = Request("c", tokens(9, 33), kv_transfer_params=wishes)
    decode.scheduler.new_request(lost)
    began = time.monotonic()
    assert decode.ask(lost) == (0, False)
    assert 0.9 < time.monotonic() - began < 3.0


def test_without_a_daemon_nothing_is_waited_for(served: DaemonProcess) -> None:
    """With the daemon gone prompts are computed at once, and it is used again when it is back."""
    desk = Desk(served, spec("away"))
    desk.fill(BLOCKS)
    stored(desk, Request("a", tokens(1, 33)), BLOCKS, 33)
    served.kill()
    request = Request("b", tokens(1, 33))
    desk.scheduler.new_request(request)
    eventually(lambda: not desk.scheduler._is_attached())
    began = time.monotonic()
    assert desk.ask(request) == (0, False)
    assert time.monotonic() - began < 0.05
    desk.step([(request, 0, 33)], {"b": BLOCKS})
    assert not desk.message.saves
    served.start()

    def found() -> bool:
        desk.scheduler.new_request(request)
        return bool(desk.ask(request) == (32, True))

    assert eventually(found)
    desk.close()


def test_the_store_s_blocks_are_events_in_vllm_s_hashes(desks: Callable[..., Desk]) -> None:
    """With vLLM's hashes as names its event stream tells which blocks each tier has."""
    name = spec("events", key_mode="external", hash_algorithm="vllm-sha256_cbor/seed=default")
    desk = desks(name)
    hashes = [hashlib.sha256(bytes([n])).digest() for n in range(8)]
    request = Request("a", tokens(9, 33), block_hashes=hashes)
    desk.fill(BLOCKS)
    desk.scheduler.new_request(request)
    desk.step([(request, 0, 33)], {"a": BLOCKS})
    told: list[Any] = []
    assert eventually(
        lambda: told.extend(desk.scheduler.take_events()) or sum(len(e.hashes) for e in told) == 8
    )
    assert all(isinstance(event, Stored) and event.tier == "host" for event in told)
    assert [digest for event in told for digest in event.hashes] == hashes
    assert told[0].parent is None
    again = Request("b", tokens(9, 33), block_hashes=hashes)
    desk.scheduler.new_request(again)
    assert desk.ask(again) == (32, True)
    assert not any(isinstance(event, Removed) for event in desk.scheduler.take_events())


def test_a_daemon_that_refuses_is_gone_without(
    desks: Callable[..., Desk], caplog: pytest.LogCaptureFixture
) -> None:
    """An engine whose tenant the daemon does not allow starts, says why, and computes."""
    desk = desks(spec("refused"), tenant="nobody's")
    assert "kvstore is not used: " in caplog.text
    request = Request("a", tokens(1, 33))
    desk.scheduler.new_request(request)
    assert desk.ask(request) == (0, False)
    desk.step([(request, 0, 33)], {"a": BLOCKS})
    assert not desk.message.saves
