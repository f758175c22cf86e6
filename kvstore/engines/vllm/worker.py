"""The worker side: loads between steps, saves after a step, and what steps took.

load:  lookup (the scheduler side's lease) and restore, on a thread
       -> between two steps: copy into vLLM's blocks -> check -> report
save:  copy out of vLLM's blocks at the end of the step -> put, on a thread

Copies are made between steps and not beside them: an engine on processors computes with all of
them, and waits for the slowest of its threads.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvstore.client import Match, Space
from kvstore.client.buffers import Blocks
from kvstore.core.clock import perf_seconds
from kvstore.core.errors import KVStoreError, StoreUnavailable
from kvstore.engines.background import Background
from kvstore.engines.vllm.engine import Rank, rank_of, reach_of, with_weights
from kvstore.engines.vllm.loads import Fetched, Load, Loads, Results
from kvstore.engines.vllm.messages import LoadJob, SaveJob, SpecMessage, StepMessage
from kvstore.engines.vllm.pages import Groups
from kvstore.engines.vllm.settings import Settings

logger = logging.getLogger(__name__)

LINK = "host>hbm"  # the copy from the store's memory into vLLM's blocks, wherever those lie
CALLS_QUEUED = 256
COPY_BYTES = 64 << 20  # between two steps, so that those who generate wait for little
IDLE_WAIT_SECONDS = 0.005  # of a step without work, instead of asking again at once


class WorkerSide:
    """What the connector does in a worker process; steps call it from one thread."""

    def __init__(self, config: Any, settings: Settings, kv_cache_config: Any) -> None:
        self._config, self._settings, self._caches = config, settings, kv_cache_config
        self._rank: Rank | None = None
        self._weights = ""
        self._saver = Background("kvstore-save", CALLS_QUEUED)
        self._teller = Background("kvstore-tell", CALLS_QUEUED)
        self._loads: Loads[Any] = Loads()
        self._buffers = Buffers(settings.save_queue_bytes)
        self._began: float | None = None

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Takes vLLM's KV caches; raises SpecError for those that cannot be moved."""
        self.use(rank_of(self._config, self._settings, self._caches, kv_caches))

    def use(self, rank: Rank) -> None:
        """Moves the pages of this rank from now on."""
        assert isinstance(rank.groups, Groups), "pages in host memory"
        self._rank, self._groups = rank, rank.groups
        self._attach()

    def _attach(self, in_background: bool = False) -> None:
        rank = self._rank
        assert rank is not None
        self._reach = reach_of(
            self._config, self._settings, with_weights(rank.spec, self._weights), rank.shard
        )
        self._reach.start(in_background)

    def spec_message(self) -> SpecMessage | None:
        """What the scheduler side attaches with."""
        rank = self._rank
        if rank is None:
            return None
        return SpecMessage(msgspec.json.encode(rank.spec))

    # ---- Of each step ----

    def begin(self, message: StepMessage) -> None:
        """A step begins; after new weights nothing of the old ones is taken any more."""
        self._began = perf_seconds()
        if message.weights != self._weights:
            self._change_weights(message.weights)

    def _change_weights(self, weights: str) -> None:
        self._weights = weights
        self._loads.forbid()
        before = self._reach
        self._attach(in_background=True)
        if not self._saver.submit(before.close):
            before.close()

    def start_loads(self, message: StepMessage) -> None:
        for job in message.loads:
            self._loads.start(job, self._fetch)

    def end_forward(self, message: StepMessage) -> None:
        """The model has computed the step: its time is told, its full blocks are kept."""
        if self._began is not None and (message.prefill or message.decode_tokens):
            seconds, self._began = perf_seconds() - self._began, None
            if self._rank is not None and self._rank.reports and self._settings.report_steps:
                self._teller.submit(partial(self._report_step, message, seconds))
        for job in message.saves:
            self._save(job)

    def results(self, message: StepMessage | None, finished: set[str]) -> Results:
        """Copies what was fetched; a step without work waits a little for it, and copies all."""
        self._loads.cancel(finished)
        is_idle = message is not None and message.is_idle
        results, room = Results(), COPY_BYTES
        for load, fetched in self._loads.take(IDLE_WAIT_SECONDS if is_idle else 0.0):
            if room <= 0 and not is_idle:
                self._loads.put_back(load, fetched)
                continue
            results.add(load.job, self._copy(load, fetched))
            self._loads.ended(load)
            room -= sum(map(len, fetched.views)) if fetched is not None else 0
        return results

    def close(self) -> None:
        self._loads.close()
        if self._rank is not None:
            limit = self._settings.transfer_timeout_seconds
            self._saver.close(limit)
            self._teller.close(0.1)
            self._reach.close()

    # ---- Loads, on their threads ----

    def _fetch(self, job: LoadJob) -> Fetched | None:
        """The blocks of a job, readable; None if there are none."""
        space, match = self._look_up(job)
        try:
            views = space.restore(match, partial=True)[: job.count]
        except BaseException:
            match.release()
            raise
        if not views or match.ranges[0].start != job.first:
            match.release()
            return None
        return Fetched(space, match, views)

    def _look_up(self, job: LoadJob) -> tuple[Space, Match]:
        """The scheduler side's lookup once more: both share its lease."""
        space = self._reach.attached
        if space is None:
            raise StoreUnavailable("the daemon is away; the blocks are recomputed")
        match = space.lookup(
            **job.looked_up.arguments(),  # type: ignore[arg-type]
            local_tokens=job.local_tokens,
            request_id=job.request_id,
        )
        return space, match

    # ---- Loads, between steps ----

    def _copy(self, load: Load, fetched: Fetched | None) -> int:
        """Copies what was fetched; answers with how many leading blocks are right."""
        if fetched is None:
            return 0
        try:
            return 0 if load.is_cancelled else self._copied(load.job, fetched)
        except KVStoreError as error:
            logger.info("%s computes what it was to load: %s", load.job.request_id, error)
            return 0
        except Exception:
            logger.exception("%s computes what it was to load", load.job.request_id)
            return 0
        finally:
            # The last of those that hold the lease ends it, after what is told of it.
            if not self._teller.submit(fetched.match.release):
                fetched.match.release()

    def _copied(self, job: LoadJob, fetched: Fetched) -> int:
        rank, began = self._rank, perf_seconds()
        assert rank is not None
        views = fetched.views
        for ids, view in zip(_by_block(job, rank.blocks_each), views, strict=False):
            self._groups.write(ids, np.frombuffer(view, np.uint8))
        fetched.match.check()
        seconds = perf_seconds() - began
        self._teller.submit(partial(_report_load, fetched, seconds))
        return len(views)

    # ---- Saves ----

    def _save(self, job: SaveJob) -> None:
        """Copies blocks out of vLLM's memory now, as they may be another's after this step."""
        rank, space = self._rank, self._reach.attached
        if rank is None or space is None:
            return
        taken: list[np.ndarray] = []
        for ids in _by_block(job, rank.blocks_each):
            buffer = self._buffers.take(self._groups.block_bytes)
            if buffer is None:
                break
            taken.append(buffer)
            if not self._groups.read(ids, buffer):
                self._buffers.give_back([taken.pop()])
                break
        if taken and not self._saver.submit(partial(self._put, space, job, taken)):
            self._buffers.give_back(taken)

    def _put(self, space: Space, job: SaveJob, taken: list[np.ndarray]) -> None:
        try:
            put_blocks(space, job, taken, len(taken))
        finally:
            self._buffers.give_back(taken)

    def _report_step(self, message: StepMessage, seconds: float, clock: str = "wall") -> None:
        space, rank = self._reach.attached, self._rank
        if space is None or rank is None:
            return
        with suppress(KVStoreError):
            space.report_step(
                seconds * rank.stage_count,
                message.prefill,
                decode_tokens=message.decode_tokens,
                decode_context_tokens=message.decode_context_tokens,
                clock=clock,
            )


def worker_side(config: Any, settings: Settings) -> type[WorkerSide]:
    """Which side a worker has: on a GPU, if that was asked for, or in host memory."""
    if not settings.gpu or config.device_config.device_type != "cuda":
        return WorkerSide
    from kvstore.engines.vllm.gpu_worker import GpuWorkerSide

    return GpuWorkerSide


def put_blocks(space: Space, job: SaveJob, blocks: Blocks, count: int) -> None:
    """Stores the first `count` blocks of a job, as far as the daemon takes them."""
    prompt = job.prompt.cut(job.first + count, space.spec.block_size)
    try:
        space.put(
            blocks=blocks,
            first_block=job.first,
            request_id=job.request_id,
            hints=job.hints,
            **prompt.arguments(),  # type: ignore[arg-type]
        )
    except KVStoreError as error:
        logger.debug("blocks of %s were not stored: %s", job.request_id, error)


def _by_block(job: LoadJob | SaveJob, blocks_each: int) -> Iterator[list[tuple[int, ...]]]:
    """A job's engine block ids by store block and group."""
    for start in range(0, job.count * blocks_each, blocks_each):
        yield [ids[start : start + blocks_each] for ids in job.block_ids]


def _report_load(fetched: Fetched, seconds: float) -> None:
    size = sum(map(len, fetched.views))
    with suppress(KVStoreError):
        fetched.space.report_transfer(LINK, size, seconds, match=fetched.match)


class Buffers:
    """Memory for blocks on their way to the store, of so many bytes at most, and used again."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._used = limit_bytes, 0
        self._free: deque[np.ndarray] = deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray | None:
        """A buffer, or None while too much is on its way."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._used + size > self._limit:
                return None
            self._used += size
        return np.empty(size, np.uint8)

    def give_back(self, buffers: list[np.ndarray]) -> None:
        with self._lock:
            self._free.extend(buffers)
