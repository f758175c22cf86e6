"""The worker side on a GPU: loads beside the steps, saves that the steps do not wait for.

load:  lookup and the GPU's copies into vLLM's blocks are asked for on a thread, to begin after
       what vLLM had asked of its stream -> polled after each step -> check -> report
save:  at the end of the step blocks are copied aside on the GPU; vLLM's stream goes on after that
       -> put, on a thread, which copies them to host memory

Blocks of a load are vLLM's again once it is reported, so it is reported when nothing writes to
them any more, whether it was wanted to its end or not.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvstore.client import Match, Space
from kvstore.client.gpu import CudaError, CudaUnavailable, EngineSide, Event, Taken
from kvstore.client.gpu import Load as Copy
from kvstore.core.clock import perf_seconds
from kvstore.core.errors import KVStoreError, StoreUnavailable
from kvstore.engines.vllm.device_pages import DeviceGroups
from kvstore.engines.vllm.engine import Rank, rank_of
from kvstore.engines.vllm.loads import Load, Results
from kvstore.engines.vllm.messages import LoadJob, SaveJob, StepMessage
from kvstore.engines.vllm.mover import Ground, Mover, TorchGround
from kvstore.engines.vllm.pages import Groups
from kvstore.engines.vllm.settings import Settings
from kvstore.engines.vllm.worker import IDLE_WAIT_SECONDS, WorkerSide, put_blocks

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.0005  # of a step without work, while copies run
STEPS_KEPT = 64  # whose end the GPU has not reached
FAILURES = (CudaError, CudaUnavailable, KVStoreError, RuntimeError)  # of the GPU, or of torch on it


class Begun(NamedTuple):
    """A load whose copies the GPU was asked for, and the lease on what they read."""

    engine: EngineSide
    match: Match
    copy: Copy


class Running(NamedTuple):
    """A load that has not been reported; what it began, if anything, and when it is given up."""

    load: Load
    begun: Begun | None
    deadline: float


class Step(NamedTuple):
    """A step, from and to when the GPU computed it."""

    message: StepMessage
    begin: Event
    end: Event


class GpuWorkerSide(WorkerSide):
    """What the connector does in a worker process with a GPU."""

    def __init__(self, config: Any, settings: Settings, kv_cache_config: Any) -> None:
        super().__init__(config, settings, kv_cache_config)
        self._mover: Mover | None = None
        self._failed = False
        self._after: Event | None = None  # what was asked of the GPU before the step
        self._running: list[Running] = []
        self._steps: deque[Step] = deque(maxlen=STEPS_KEPT)

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Takes vLLM's KV caches; raises SpecError for those that cannot be moved."""
        rank = rank_of(self._config, self._settings, self._caches, kv_caches, on_gpu=True)
        device = next(iter(kv_caches.values())).device
        logger.warning("kvstore moves KV of %s, which has never been run on a GPU", device)
        self.use_on(rank, partial(TorchGround, device))

    def use_on(self, rank: Rank, ground: Callable[[], Ground]) -> None:
        """Moves the pages of this rank from now on; without its GPU nothing is stored or loaded."""
        assert isinstance(rank.groups, DeviceGroups), "pages on a GPU"
        try:
            self._mover = Mover(ground(), rank.groups, self._settings.save_queue_bytes)
        except FAILURES as error:
            logger.error("kvstore is not used: %s", error)
            return
        self._tell_room(rank)
        self._rank = rank
        self._attach()

    def _tell_room(self, rank: Rank) -> None:
        """Says so if a step can compute more than there is memory for on its way to the store."""
        tokens = self._config.scheduler_config.max_num_batched_tokens
        needed = -(-tokens // rank.spec.block_size) * rank.groups.block_bytes
        room = self._settings.save_queue_bytes
        if room < needed:
            logger.warning(
                "a step of %d tokens makes %d MiB of KV and save_queue_bytes has room for %d: what "
                "is beyond that is not stored; raise it, or lower max_num_batched_tokens",
                tokens, needed >> 20, room >> 20,
            )  # fmt: skip

    def _fail(self, error: BaseException) -> None:
        """The GPU does not do as asked: the engine goes on without the store."""
        if not self._failed:
            logger.error("kvstore is not used any more by this worker: %s", error)
        self._failed = True

    # ---- Of each step ----

    def begin(self, message: StepMessage) -> None:
        mover, self._after = self._mover, None
        if mover is None:
            return
        if message.weights != self._weights:
            # What reads the old session's memory ends before that session does.
            self._loads.forbid()
            old = mover.forget()
            if old and not self._saver.submit(partial(mover.drop, old)):
                mover.drop(old)
            self._change_weights(message.weights)
        if self._failed:
            return
        try:
            self._after = mover.mark()
        except FAILURES as error:
            self._fail(error)

    def start_loads(self, message: StepMessage) -> None:
        for job in message.loads:
            self._loads.start(job, partial(self._begin_copies, self._after))

    def end_forward(self, message: StepMessage) -> None:
        """The model's work was asked of the GPU: it is timed there, its full blocks are taken."""
        mover, begin = self._mover, self._after
        if mover is None or begin is None:
            return
        try:
            if self._reports and (message.prefill or message.decode_tokens):
                self._steps.append(Step(message, begin, mover.mark()))
            for job in message.saves:
                self._take(mover, job)
        except FAILURES as error:
            self._fail(error)

    @property
    def _reports(self) -> bool:
        return self._rank is not None and self._rank.reports and self._settings.report_steps

    def results(self, message: StepMessage | None, finished: set[str]) -> Results:
        """Loads whose copies are over; a step without work waits a little for some."""
        self._loads.cancel(finished)
        self._tell_steps()
        is_idle = message is not None and message.is_idle
        results, wait = Results(), 0.0
        end = perf_seconds() + IDLE_WAIT_SECONDS
        while True:
            limit = perf_seconds() + self._settings.transfer_timeout_seconds
            for load, begun in self._loads.take(wait):
                self._running.append(Running(load, begun, limit))
            self._poll(results)
            left = end - perf_seconds()
            if results.ended or not is_idle or left <= 0 or self._loads.is_empty:
                return results
            wait = min(POLL_SECONDS, left) if self._running else left

    def close(self) -> None:
        self._loads.close()
        if self._mover is not None:
            # Behind the puts, and no longer than they may take: a GPU that hangs stops nobody.
            self._saver.submit(self._mover.close)
        super().close()

    def _tell_steps(self) -> None:
        """Tells what the GPU took for the steps that it has computed."""
        try:
            while self._steps and self._steps[0].end.done():
                message, begin, end = self._steps.popleft()
                seconds = end.seconds_since(begin)
                self._teller.submit(partial(self._report_step, message, seconds, "device"))
        except CudaError as error:
            self._steps.clear()
            self._fail(error)

    # ---- Loads ----

    def _begin_copies(self, after: Event | None, job: LoadJob) -> Begun | None:
        """Asks the GPU for a job's copies, on a thread; None if there is nothing to copy."""
        mover = self._mover
        if mover is None or after is None:
            raise StoreUnavailable("this worker's GPU is not served; the blocks are recomputed")
        space, match = self._look_up(job)
        try:
            if len(match.ranges) == 1 and match.ranges[0].start == job.first:
                rows, engine = mover.rows(job, match), mover.engine(space)
                return Begun(engine, match, engine.load(match, rows, after=after, partial=True))
        except BaseException:
            match.release()
            raise
        match.release()
        return None

    def _poll(self, results: Results) -> None:
        """Reports loads that are over."""
        before, self._running = self._running, []
        for running in before:
            count = self._loaded(running)
            if count is None:
                self._running.append(running)
                continue
            results.add(running.load.job, count)
            self._loads.ended(running.load)

    def _loaded(self, running: Running) -> int | None:
        """How many leading blocks of a load are right; None while its copies run."""
        load, begun, deadline = running
        if begun is None:
            return 0
        count = 0
        try:
            if not begun.copy.done:
                if perf_seconds() < deadline:
                    return None
                self._fence(load, begun)
            elif not load.is_cancelled:
                begun.copy.result()
                count = min(begun.match.block_count, load.job.count)
        except FAILURES as error:
            logger.info("%s computes what it was to load: %s", load.job.request_id, error)
        if not self._teller.submit(partial(_told, begun, count)):
            begun.match.release()
        return count

    def _fence(self, load: Load, begun: Begun) -> None:
        """Gives up a load whose copies the GPU has not done in time.

        What vLLM asks of its stream from now on, such as computing these blocks, comes after them.
        """
        assert self._mover is not None, "a load has begun"
        begun.copy.wait_all(self._mover.stream())
        limit = self._settings.transfer_timeout_seconds
        logger.warning(
            "the GPU did not copy the blocks of %s in %g s; it computes them",
            load.job.request_id, limit,
        )  # fmt: skip

    # ---- Saves ----

    def _take(self, mover: Mover, job: SaveJob) -> None:
        """Copies blocks aside on the GPU, as they may be another's after this step."""
        space = self._reach.attached
        if space is None or mover.taker is None:
            return
        rows = mover.groups.rows(job.block_ids, job.count)
        dropped = np.flatnonzero((rows == Groups.NULL_BLOCK).any(1))
        if len(dropped):  # a window has moved on
            rows = rows[: dropped[0]]
        taken = mover.taker.take(rows, mover.stream()) if len(rows) else None
        if taken is not None and not self._saver.submit(
            partial(self._put_taken, mover, space, job, taken)
        ):
            taken.release()

    def _put_taken(self, mover: Mover, space: Space, job: SaveJob, taken: Taken) -> None:
        assert mover.taker is not None, "blocks were taken"
        try:
            put_blocks(space, job, mover.taker.source(taken, space), len(taken))
        finally:
            taken.release()


def _told(begun: Begun, count: int) -> None:
    """Tells what a load took, and ends its lease."""
    with suppress(KVStoreError):
        if count:
            begun.engine.report(begun.copy)
    begun.match.release()
