"""Live replay: a trace against a daemon through the public client, every restored byte checked.

              board (mapped file): next request, progress, lives of the daemon
parent ----+--- worker 0 --- KVClient ---+
           +--- worker 1 --- KVClient ---+--- daemon
           +--- ...                    --+
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.errors import InvalidRequest, KVStoreError
from kvstore.core.sizes import format_bytes
from kvstore.replay.board import Board
from kvstore.replay.formats import load_trace
from kvstore.replay.tally import Tally, report
from kvstore.replay.worker import Job, id_ordinals

POLL_SECONDS = 0.05
CLIENTS_MAX = 64
BUFFER_BYTES_MAX = 1 << 30


class ReplayError(KVStoreError):
    """A replay that could not be carried through."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How a trace is replayed; `speed` 0 is as fast as possible, 1 is the trace's own pace."""

    clients: int = 4
    bytes_per_token: int = 64
    speed: float = 0.0
    seed: int = 0
    limit: int = 0
    call_timeout_seconds: float = 1.0


class LiveReplay:
    """A replay under way: its client processes and what they report."""

    def __init__(
        self, trace: str | Path, target: str, directory: str | Path, options: ReplayOptions
    ) -> None:
        if not 1 <= options.clients <= CLIENTS_MAX:
            raise InvalidRequest(f"clients is {options.clients}; pass 1 to {CLIENTS_MAX}")
        if options.bytes_per_token < 1 or options.speed < 0:
            raise InvalidRequest("bytes_per_token must be 1 or more and speed 0 or more")
        self._options, self._directory = options, Path(directory)
        requests = load_trace(trace, options.limit)
        self.request_count = len(requests)
        self.input_tokens = sum(r.input_length for r in requests)
        self.block_bytes = requests[0].block_size * options.bytes_per_token
        _check_buffer(max(r.full_blocks for r in requests) * self.block_bytes)
        board = self._directory / "board"
        self.board = Board(board, options.clients, len(id_ordinals(requests)), create=True)
        self._job = Job(
            trace=str(Path(trace).absolute()),
            target=target,
            board=str(board.absolute()),
            result="",
            client=0,
            clients=options.clients,
            model=f"replay/{Path(trace).name.partition('.')[0]}",
            block_bytes=self.block_bytes,
            limit=options.limit,
            seed=options.seed,
            speed=options.speed,
            call_timeout_seconds=options.call_timeout_seconds,
        )
        self._workers: list[_Worker] = []

    def __enter__(self) -> LiveReplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, on_progress: Callable[[dict[str, int]], None] | None = None) -> dict[str, Any]:
        """Replays all requests; `on_progress` hears the totals about 20 times a second."""
        for client in range(self._options.clients):
            name = self._directory.absolute() / f"worker-{client}"
            job = msgspec.structs.replace(self._job, client=client, result=f"{name}.json")
            self._workers.append(_Worker(job, Path(f"{name}.log")))
        for worker in self._workers:
            worker.expect_ready()
        start = perf_seconds()
        for worker in self._workers:
            worker.go()
        while any(worker.running for worker in self._workers):
            if on_progress is not None:
                on_progress(self.board.totals())
            sleep(POLL_SECONDS)
        seconds = perf_seconds() - start
        tallies = [worker.result() for worker in self._workers]
        if on_progress is not None:
            on_progress(self.board.totals())
        return {
            **report(tallies, seconds),
            "block_bytes": self.block_bytes,
            "bytes_per_token": self._options.bytes_per_token,
        }

    def close(self) -> None:
        """Ends what still runs."""
        self.board.stop()
        for worker in self._workers:
            worker.close()
        self.board.close()


def _check_buffer(needed: int) -> None:
    if needed > BUFFER_BYTES_MAX:
        raise InvalidRequest(
            f"the longest request needs {format_bytes(needed)} of payload for each client; "
            f"lower --bytes-per-token until it is at most {format_bytes(BUFFER_BYTES_MAX)}"
        )


class _Worker:
    """A client process; its errors are in its log, the last line of which is quoted."""

    def __init__(self, job: Job, log: Path) -> None:
        self._job, self._log = job, log
        with open(log, "wb") as errors:
            # Its own session: Ctrl-C goes to the parent, which ends its workers in order.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.replay.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                cwd="/",
            )
        self._say(msgspec.json.encode(job))

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None

    def expect_ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != b"ready":
            raise self._failed()

    def go(self) -> None:
        self._say(b"go")

    @property
    def running(self) -> bool:
        if self._process.poll() is not None and self._process.returncode:
            raise self._failed()
        return self._process.poll() is None

    def result(self) -> Tally:
        return msgspec.json.decode(Path(self._job.result).read_bytes(), type=Tally)

    def _failed(self) -> ReplayError:
        self.close()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return ReplayError(f"a client of the replay failed: {lines[-1] if lines else 'no reason'}")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            if not stream.closed:
                _close_quietly(stream)


def _close_quietly(stream: Any) -> None:
    with contextlib.suppress(OSError):
        stream.close()
