"""One client process of a live replay: `python -m kvstore.replay.worker`.

A Python process runs one thread of bytecode at a time, so several clients are several processes.
The parent sends a job (one JSON line) and then `go`; the worker answers `ready` and, when it is
through, leaves its tally in the result file. It leaves when the parent does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvstore.client import KVClient
from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.errors import StoreUnavailable
from kvstore.core.spec import KVSpec
from kvstore.replay.board import Board
from kvstore.replay.engine import AttachedSpace, Seen, TraceEngine
from kvstore.replay.formats import TraceRequest, load_trace
from kvstore.replay.payload import PromptMaker
from kvstore.replay.tally import Tally
from kvstore.replay.transform import spread_ticks

SLEEP_SLICE_SECONDS = 0.1


class Job(msgspec.Struct, kw_only=True):
    """What a worker is to do; `speed` 0 is as fast as possible."""

    trace: str
    target: str
    board: str
    result: str
    client: int
    clients: int
    model: str
    block_bytes: int
    limit: int = 0
    seed: int = 0
    speed: float = 0.0
    call_timeout_seconds: float = 1.0
    recompute_seconds: float = 0.25


def id_ordinals(requests: list[TraceRequest]) -> dict[int, int]:
    """Numbers ids by first appearance, so that every process agrees on them."""
    ordinals: dict[int, int] = {}
    for request in requests:
        for hash_id in request.hash_ids:
            ordinals.setdefault(hash_id, len(ordinals))
    return ordinals


def replay_spec(model: str, block_size: int, block_bytes: int, seed: int) -> KVSpec:
    """The spec under which a replay keeps its made-up payloads."""
    return KVSpec(
        model=model,
        revision=f"seed-{seed}",
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        dtype="uint8",
        block_size=block_size,
        layout="replay-payload",
        block_bytes=block_bytes,
    )


class Spaces:
    """The attached spaces of a client, one for each tenant of the trace, made when first used."""

    def __init__(self, job: Job, block_size: int) -> None:
        self._client = KVClient.connect(job.target, call_timeout_seconds=job.call_timeout_seconds)
        self._spec = replay_spec(job.model, block_size, job.block_bytes, job.seed)
        self._spaces: dict[str, AttachedSpace] = {}

    def get(self, tenant: str) -> AttachedSpace:
        tenant = tenant or "default"
        if tenant not in self._spaces:
            space = self._client.attach(self._spec, tenant=tenant, shard=0)
            self._spaces[tenant] = AttachedSpace(
                space, space.space_id, space.epoch, self._spec.block_bytes
            )
        return self._spaces[tenant]

    def close(self) -> None:
        self._client.close()


def run(job: Job, requests: list[TraceRequest], board: Board, spaces: Spaces) -> Tally:
    """Serves requests until none is left."""
    ordinals = id_ordinals(requests)
    tally = Tally()
    block_size = requests[0].block_size
    engine = TraceEngine(PromptMaker(block_size, job.seed), block_size, tally)
    for request in _turns(job, requests, board):
        numbers = np.array([ordinals[i] for i in request.hash_ids], dtype=np.int64)
        try:
            engine.serve(spaces.get(request.tenant), request, Seen(board, numbers))
        except StoreUnavailable:
            # Recomputing a prompt takes time; without it one outage would eat the whole trace.
            sleep(job.recompute_seconds)
        board.note(job.client, tally.progress())
    return tally


def _turns(job: Job, requests: list[TraceRequest], board: Board) -> Iterator[TraceRequest]:
    """This client's share: whatever request is next when it is free, at its time if timed."""
    parent, start = os.getppid(), perf_seconds()
    while (number := board.take()) < len(requests):
        due = start
        if job.speed:
            offset = requests[number].timestamp - requests[0].timestamp
            due += offset / 1000 / job.speed
        while perf_seconds() < due and not board.stopped:
            sleep(min(max(due - perf_seconds(), 0), SLEEP_SLICE_SECONDS))
        if board.stopped or os.getppid() != parent:
            return
        yield requests[number]


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    requests = load_trace(job.trace, job.limit)
    if job.speed:
        requests = list(spread_ticks(requests, job.seed))
    board = Board(job.board, job.clients, len(id_ordinals(requests)))
    spaces = Spaces(job, requests[0].block_size)
    spaces.get(requests[0].tenant)
    print("ready", flush=True)
    if sys.stdin.buffer.readline().strip() == b"go":
        tally = run(job, requests, board, spaces)
        Path(job.result).write_bytes(msgspec.json.encode(tally))
    spaces.close()


if __name__ == "__main__":
    main()
