"""Lookups of blocks in host, with and without another client that restores from disk meanwhile."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import TracebackType
from typing import Any

import numpy as np

from kvstore.bench.fill import PAYLOAD_BYTES, Filler
from kvstore.bench.measure import alternate, medians
from kvstore.bench.subject import MIB, Subject
from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.errors import KVStoreError
from kvstore.replay.own_daemon import OwnDaemon

HOT_BLOCKS, HOT_PROMPTS, PROMPT_BLOCKS = 10_000, 64, 16
LOAD_BLOCKS = 32
WINDOWS, WINDOW_SECONDS = 6, 2.0
LEAD_SECONDS = 0.2  # the other client is at work before the first lookup and after the last


def measure_lookups(daemon: OwnDaemon, pool_bytes: int, quick: bool) -> dict[str, Any]:
    """p99 of a lookup in windows with and without the other client, in turns."""
    subject = Subject(daemon.target, PAYLOAD_BYTES)
    seconds = 0.3 if quick else WINDOW_SECONDS
    # What it goes round in is half as much again as the host tier holds.
    prompts = max(2, int(1.5 * pool_bytes) // (LOAD_BLOCKS * MIB))
    try:
        filler = Filler(subject)
        filler.fill(HOT_BLOCKS)
        subject.client.admin.flush()
        with Load(daemon.target, prompts) as load:
            looker = _Looker(subject, filler.sample(HOT_PROMPTS, PROMPT_BLOCKS))
            looker.hold()
            actions = {
                "lookup_p99": lambda: looker.window(seconds),
                "lookup_p99_under_load": lambda: load.window(looker, seconds),
            }
            samples = alternate(actions, 2 if quick else WINDOWS, warmup=1)
    finally:
        subject.close()
    middle = medians(samples)
    return {
        "p99_ratio": middle["lookup_p99_under_load"] / middle["lookup_p99"],
        "p50_seconds": looker.median(loaded=False),
        "p50_under_load_seconds": looker.median(loaded=True),
        "restored_bytes_per_second": load.restored_blocks * MIB / max(load.seconds, 1e-9),
        "from_disk_ratio": load.from_disk_blocks / max(load.restored_blocks, 1),
        "samples": samples,
    }


class _Looker:
    """Looks prompts up one after the other; each must be in host, all of it."""

    def __init__(self, subject: Subject, prompts: list[np.ndarray]) -> None:
        self._subject, self._prompts = subject, prompts
        self._turn = itertools.cycle(prompts)
        self._held: list[Any] = []
        self._medians: dict[bool, list[float]] = {False: [], True: []}

    def median(self, loaded: bool) -> float:
        return float(np.median(self._medians[loaded]))

    def hold(self) -> None:
        """Has the prompts in host, and leased: the other client's blocks drive nothing out."""
        for tokens in self._prompts:
            match = self._subject.space.lookup(tokens)
            self._subject.space.restore(match)
            self._held.append(match)

    def window(self, seconds: float, loaded: bool = False) -> float:
        """99 % of the lookups of so many seconds take no longer than the answer."""
        taken, end = [], perf_seconds() + seconds
        while (start := perf_seconds()) < end:
            tokens = next(self._turn)
            match = self._subject.space.lookup(tokens)
            taken.append(perf_seconds() - start)
            found = {step.source: step.token_count for step in match.plan.steps}
            match.release()
            if found != {"host": len(tokens)}:
                raise KVStoreError(f"a prompt of the benchmark is not in host: {match.plan}")
        self._medians[loaded].append(float(np.median(taken)))
        return float(np.percentile(taken, 99))


class Load:
    """The other client's process."""

    def __init__(self, target: str, prompts: int) -> None:
        self.restored_blocks = self.from_disk_blocks = 0
        self.seconds = 0.0
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "kvstore.bench.disk_load", target, str(LOAD_BLOCKS),
                str(prompts),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip
        self._answer()

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def window(self, looker: _Looker, seconds: float) -> float:
        """A window of lookups while the other client restores from disk."""
        assert self._process.stdin is not None
        length = seconds + 2 * LEAD_SECONDS
        self._process.stdin.write(f"{length}\n")
        self._process.stdin.flush()
        sleep(LEAD_SECONDS)
        late = looker.window(seconds, loaded=True)
        restored, from_disk = map(int, self._answer().split())
        self.restored_blocks += restored
        self.from_disk_blocks += from_disk
        self.seconds += length
        return late

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KVStoreError("a client of the benchmark ended; its error is above")
        return line
