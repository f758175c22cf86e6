"""Prefill and decode in two processes: blocks go from one to the other, or are computed again."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from daemons import DaemonProcess, eventually  # noqa: E402
from handover_engine import (  # noqa: E402
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    OUTPUT_TOKENS,
    prompt,
)
from tiny_llama import tiny_llama  # noqa: E402

from kvstore.client import SpecMismatch  # noqa: E402
from kvstore.core.errors import InvalidRequest, KVStoreError  # noqa: E402
from kvstore.engines.dynamic_cache import CacheBlocks  # noqa: E402
from kvstore.engines.generating import decode, prefill_alone  # noqa: E402
from kvstore.engines.handover import Announced, Ticket, wait_for_prefix  # noqa: E402
from kvstore.engines.transformers import prefill_with_store, spec_of  # noqa: E402

TOKENS = 200  # 12 blocks, and 8 tokens that no block holds
WHOLE = TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
SLACK_SECONDS = 5.0  # what a busy machine may take beyond a limit
LINE_SECONDS = 60.0


class Engine:
    """One process that was forked for one order."""

    def __init__(self) -> None:
        self.lines: queue.Queue[dict[str, Any]] = queue.Queue()

    def until(self, key: str, value: Any = None) -> dict[str, Any]:
        """The next line that has `key`, with this value if one is given."""
        while True:
            line = self.lines.get(timeout=LINE_SECONDS)
            assert "error" not in line, line
            if key in line and value in (None, line[key]):
                return line

    @cached_property
    def pid(self) -> int:
        pid: int = self.until("pid")["pid"]
        return pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class Engines:
    """The process that has torch loaded, and those that it forked."""

    def __init__(self, address: str) -> None:
        path = os.pathsep.join([str(Path(__file__).parent.parent / "support"), *sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "handover_engine", address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._made = [Engine()]
        threading.Thread(target=self._read, daemon=True).start()
        self._made[0].until("ready")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = json.loads(text)
            self._made[line["id"]].lines.put(line)

    def start(self, do: str, seed: int, **more: Any) -> Engine:
        made = Engine()
        order = {"do": do, "seed": seed, "tokens": TOKENS, "pause": 0, "wait": 20, "quiet": 1}
        self._made.append(made)
        assert self._process.stdin is not None
        number = len(self._made) - 1
        self._process.stdin.write(json.dumps({"id": number, **order, **more}) + "\n")
        assert made.pid
        return made

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def model() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_llama()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engines(shared: DaemonProcess) -> Iterator[Engines]:
    made = Engines(shared.address)
    yield made
    made.close()


@pytest.fixture
def space(shared: DaemonProcess, model: Any) -> Iterator[Any]:
    with shared.client() as client:
        yield client.attach(spec_of(model, name="tiny", block_size=BLOCK_TOKENS))


def expected(model: Any, seed: int) -> list[int]:
    """The tokens of an engine without a store."""
    return decode(model, prefill_alone(model, prompt(TOKENS, seed)), OUTPUT_TOKENS).tokens


def stored_tokens(space: Any, seed: int) -> tuple[int, int]:
    with space.lookup(prompt(TOKENS, seed)) as match:
        return match.matched_tokens, match.pending_tokens


def test_a_prompt_is_handed_over(model: Any, engines: Engines, space: Any) -> None:
    """The decode side waits while the other still computes, restores every full block, computes
    the tail and goes on with the tokens of an engine that computed it all."""
    writer = engines.start("prefill", 1, pause=0.05)
    writer.until("at", CHUNK_TOKENS)
    reader = engines.start("decode", 1)
    assert stored_tokens(space, 1)[1] > 0
    done = reader.until("tokens")
    assert done["awaited"]["tokens"] == WHOLE
    assert done["awaited"]["reason"] == "all of it is there"
    assert (done["restored"], done["computed"]) == (WHOLE, TOKENS - WHOLE)
    assert done["tokens"] == expected(model, 1)
    assert not done["problem"]
    told = writer.until("ticket")
    assert (told["ticket"]["stored_tokens"], told["computed"]) == (WHOLE, TOKENS)
    again = engines.start("decode", 1, ticket=told["ticket"]).until("tokens")
    assert again["restored"] == WHOLE
    assert again["tokens"] == expected(model, 1)


@pytest.mark.parametrize("moment", [0, CHUNK_TOKENS, 4 * CHUNK_TOKENS, 6 * CHUNK_TOKENS, TOKENS])
def test_a_prefill_side_that_is_killed(
    model: Any, engines: Engines, space: Any, moment: int
) -> None:
    """Whenever it dies, the decode side hears of it at once, restores what was complete, computes
    the rest and gives the right tokens; nothing stays pending, and another one finishes it."""
    seed = 100 + moment
    writer = engines.start("prefill", seed, pause=0.1, linger=60)
    if moment == TOKENS:
        writer.until("ticket")
    else:
        writer.until("at", moment)
    reader = engines.start("decode", seed, wait=20, quiet=0.5)
    time.sleep(0.05)
    writer.signal(signal.SIGKILL)
    done = reader.until("tokens")
    assert done["awaited"]["seconds"] < 0.5 + SLACK_SECONDS
    assert done["tokens"] == expected(model, seed)
    assert done["restored"] + done["computed"] == TOKENS
    assert done["restored"] == done["awaited"]["tokens"]
    assert done["restored"] >= moment // 64 * 64 - 64  # four blocks are committed at a time
    if moment < 6 * CHUNK_TOKENS:
        assert done["awaited"]["reason"].startswith("nobody writes")
    assert not stored_tokens(space, seed)[1]
    assert engines.start("prefill", seed).until("ticket")["ticket"]["stored_tokens"] == WHOLE
    assert engines.start("decode", seed).until("tokens")["restored"] == WHOLE


def test_a_prefill_side_that_is_frozen(model: Any, engines: Engines, space: Any) -> None:
    """Its promise stands, so the decode side waits, but no longer than it was told to."""
    writer = engines.start("prefill", 2, pause=0.1)
    writer.until("at", 4 * CHUNK_TOKENS)
    writer.signal(signal.SIGSTOP)
    done = engines.start("decode", 2, wait=0.7, quiet=0.3).until("tokens")
    assert 0.7 <= done["awaited"]["seconds"] < 0.7 + SLACK_SECONDS
    assert "the time is up" in done["awaited"]["reason"]
    assert done["tokens"] == expected(model, 2)
    writer.signal(signal.SIGCONT)
    assert writer.until("ticket")["ticket"]["stored_tokens"] == WHOLE


# ---- Within one process ----


def test_nobody_writes(space: Any) -> None:
    """A prompt that nobody computes is waited for no longer than `quiet_seconds`, none of no full
    block at all."""
    awaited = wait_for_prefix(space, prompt(TOKENS, 3), deadline_seconds=30, quiet_seconds=0.2)
    assert awaited.tokens == 0
    assert 0.2 <= awaited.seconds < 0.2 + SLACK_SECONDS
    assert awaited.reason == f"nobody writes the {WHOLE} tokens that are missing"
    short = wait_for_prefix(space, prompt(BLOCK_TOKENS, 3), deadline_seconds=30, quiet_seconds=30)
    assert (short.tokens, short.reason) == (0, "all of it is there")
    with pytest.raises(InvalidRequest, match="must not be negative"):
        wait_for_prefix(space, prompt(TOKENS, 3), deadline_seconds=-1)


def test_a_store_that_is_away(served: DaemonProcess, model: Any) -> None:
    """Without a daemon the wait is over at once; so it is when the daemon dies meanwhile."""
    with served.client() as client:
        space = client.attach(spec_of(model, name="tiny", block_size=BLOCK_TOKENS))
        killer = threading.Timer(0.3, served.kill)
        killer.start()
        awaited = wait_for_prefix(space, prompt(TOKENS, 4), deadline_seconds=60, quiet_seconds=60)
        killer.join()
        assert awaited.reason.startswith("no store: ")
        assert awaited.seconds < SLACK_SECONDS
        assert wait_for_prefix(space, prompt(TOKENS, 4), deadline_seconds=60).tokens == 0


def test_tickets(model: Any, shared: DaemonProcess, space: Any) -> None:
    """A ticket of another space is refused, one of an earlier epoch is waited for no more, and one
    says nothing is complete unless it is."""
    ids = prompt(TOKENS, 5)
    done = prefill_with_store(model, ids, space, announce=True)
    ticket = Ticket.of(space, done.put, len(ids))
    assert ticket.stored_tokens == WHOLE
    assert Ticket.of(space, None, len(ids)).stored_tokens == 0
    with shared.client() as client:
        other = client.attach(spec_of(tiny_llama(seed=1), name="tiny", block_size=BLOCK_TOKENS))
        with pytest.raises(SpecMismatch, match="give both the same model"):
            wait_for_prefix(other, ids, deadline_seconds=1, ticket=ticket)
    old = Ticket(ticket.space_id, ticket.epoch + 1, WHOLE)
    began = time.monotonic()
    wait_for_prefix(space, prompt(TOKENS, 6), deadline_seconds=60, quiet_seconds=60, ticket=old)
    assert time.monotonic() - began < SLACK_SECONDS


def test_a_promise_that_is_not_kept(model: Any, space: Any) -> None:
    """An engine that fails, or computes nothing for too long, leaves nothing pending."""
    ids = prompt(TOKENS, 7)
    blocks = CacheBlocks(prefill_alone(model, ids).cache, space.spec)
    late = Announced(space, ids, blocks, 0, {}, limit_seconds=0.1)
    with pytest.raises(KVStoreError, match="block 0 was promised and not computed"):
        late.result()
    assert eventually(lambda: stored_tokens(space, 7) == (0, 0))
    failed = Announced(space, ids, blocks, 0, {})
    failed.give_up()
    with pytest.raises(KVStoreError, match="was promised"):
        failed.result()

    def fail(*ignored: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        prefill_with_store(model, ids, space, announce=True)
    handle.remove()
    assert eventually(lambda: stored_tokens(space, 7) == (0, 0))
    done = prefill_with_store(model, ids, space, announce=True, chunk_tokens=CHUNK_TOKENS)
    assert done.put is not None
    assert done.put.stored == WHOLE // BLOCK_TOKENS
