"""`kvstore bench put`: from the caller's memory to READY in the host tier, against a plain copy."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from kvstore.bench.copies import COPIES, copy_actions, fastest, prefaulted, windows
from kvstore.bench.measure import Action, alternate, document, medians, timed
from kvstore.bench.subject import MIB, Subject
from kvstore.core.errors import KVStoreError
from kvstore.replay.own_daemon import OwnDaemon, fitting_pool_bytes

BLOCKS, CLIENTS = 32, 8
ROUNDS, CLIENT_ROUNDS, WARMUP = 24, 7, 1
WINDOWS = 16
POOL_BYTES, POOL_BYTES_MIN = 4096 * MIB, 1024 * MIB


def run(quick: bool = False) -> dict[str, Any]:
    """Puts of 1 MiB blocks, one client and eight, in turns with copies of the same bytes.

    The pool has room for all of it, unless the machine is small: then eviction is part of the
    figure, and the answer says so.
    """
    blocks = 4 if quick else BLOCKS
    rounds, client_rounds = (3, 2) if quick else (ROUNDS, CLIENT_ROUNDS)
    puts = rounds + WARMUP + CLIENTS * (client_rounds + WARMUP)
    pool = fitting_pool_bytes(POOL_BYTES, least=POOL_BYTES_MIN)
    evicts = puts * blocks * MIB > pool * 0.9
    with OwnDaemon(pool) as daemon:
        daemon.wait_prefaulted()
        one = _measure_one(daemon.target, blocks, rounds)
        many = _measure_many(daemon.target, blocks, client_rounds)
    return {**_document(one, many, blocks), "evicts": evicts}


def _measure_one(target: str, blocks: int, rounds: int) -> dict[str, Any]:
    subject = Subject(target, MIB)
    subject.wait_mapped()
    source = prefaulted((blocks, MIB))
    prompts: list[np.ndarray] = []

    def prepare() -> None:
        prompts.append(subject.prompt(blocks))
        subject.payloads(prompts[-1], source)

    prepare()
    copies = copy_actions(list(source), *windows(blocks, WINDOWS))
    actions = {name: timed(copy) for name, copy in copies.items()}
    actions["put"] = timed(lambda: subject.put(prompts[-1], source))
    samples = alternate(actions, rounds, WARMUP, on_round=prepare)
    wrong = sum(subject.stored_wrong_bytes(tokens) for tokens in prompts[:-1])
    subject.close()
    return {"samples": samples, "wrong_bytes": wrong}


def _measure_many(target: str, blocks: int, rounds: int) -> dict[str, Any]:
    with Crowd(target, blocks) as crowd:
        actions: dict[str, Action] = {name: partial(crowd.round, f"copy {name}") for name in COPIES}
        actions["put"] = partial(crowd.round, "put")

        def next_round() -> None:
            crowd.ask("next")

        samples = alternate(actions, rounds, WARMUP, on_round=next_round)
        wrong = sum(int(answer) for answer in crowd.ask("wrong"))
    return {"samples": samples, "wrong_bytes": wrong}


class Crowd:
    """Eight client processes that do the same thing at the same time."""

    def __init__(self, target: str, blocks: int) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "kvstore.bench.put_client", target, str(blocks), str(i)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd="/",
            )
            for i in range(1, CLIENTS + 1)
        ]

    def __enter__(self) -> Crowd:
        try:
            self._read()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, command: str) -> list[str]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(command + "\n")
            process.stdin.flush()
        return self._read()

    def round(self, command: str) -> float:
        """Seconds from the first client's beginning to the last one's end."""
        times = [[float(t) for t in answer.split()] for answer in self.ask(command)]
        return max(end for _, end in times) - min(begin for begin, _ in times)

    def _read(self) -> list[str]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line:
                raise KVStoreError("a client of the benchmark ended; its error is above")
            answers.append(line)
        return answers

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()
            process.wait()


def _document(one: dict[str, Any], many: dict[str, Any], blocks: int) -> dict[str, Any]:
    one_medians, many_medians = medians(one["samples"]), medians(many["samples"])
    name, copy_seconds = fastest(one_medians, COPIES)
    _, crowd_copy_seconds = fastest(many_medians, COPIES)
    figures = {
        "ratio_to_memcpy": copy_seconds / one_medians["put"],
        "ratio_to_memcpy_8_clients": crowd_copy_seconds / many_medians["put"],
    }
    total = blocks * MIB
    samples = {
        **one["samples"],
        **{f"{name}_8_clients": values for name, values in many["samples"].items()},
    }
    return document(
        figures,
        samples,
        put_bytes_per_second=total / one_medians["put"],
        put_bytes_per_second_8_clients=CLIENTS * total / many_medians["put"],
        memcpy_bytes_per_second=total / copy_seconds,
        memcpy_bytes_per_second_8_clients=CLIENTS * total / crowd_copy_seconds,
        fastest_memcpy=name,
        block_bytes=MIB,
        block_count=blocks,
        wrong_bytes=one["wrong_bytes"] + many["wrong_bytes"],
    )
