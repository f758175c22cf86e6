"""A vLLM engine told what to do in lines of JSON: `python -m kvstore.engines.vllm.host`.

The first line holds `model`, `settings` (null for plain vLLM), `role` and `options`, each further
one a call; every line is answered with one. `kvstore.engines.vllm.process` is the other end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, TextIO

from kvstore.engines.vllm.driving import Ask, Drive, set_environment, transfer_config


def serve(lines: Iterable[str], out: TextIO) -> None:
    """Starts the engine that the first line asks for, and answers the others."""
    calls = iter(lines)
    first = json.loads(next(calls))
    set_environment()
    try:
        settings = first["settings"]
        transfer = None if settings is None else transfer_config(first["role"], **settings)
        host = Host(Drive(first["model"], transfer, **first["options"]))
    except Exception as error:
        _say(out, {"error": _chain(error)})
        return
    _say(out, {"result": True})
    for line in calls:
        call = json.loads(line)
        _say(out, {"result": host.answer(call["call"], call)})
    host.drive.close()


class Host:
    """The calls: `run` with prompts, `state`, or a method of Drive without arguments."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self._scheduler = drive.engine.engine_core.engine_core.scheduler
        self._preemptions = 0
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        """vLLM tells nobody how often it preempted."""
        preempt = self._scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self._preemptions += 1
            preempt(*args, **kwargs)

        self._scheduler._preempt_request = counted

    def answer(self, name: str, call: dict[str, Any]) -> Any:
        if name == "run":
            asks = [Ask(**ask) for ask in call["asks"]]
            return [asdict(outcome) for outcome in self.drive.run(asks)]
        if name == "state":
            return {
                "free_blocks": self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                "requests": len(self._scheduler.requests),
                "preemptions": self._preemptions,
            }
        return getattr(self.drive, name)()


def _chain(error: BaseException | None) -> str:
    """The messages of an error and of those that it came from."""
    parts = []
    while error is not None:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(parts)


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not ours
    serve(sys.stdin, answers)
