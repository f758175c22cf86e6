"""A vLLM engine in a process of its own, told what to do in lines of JSON.

Run by vLLM's interpreter: `python vllm_host.py`; the first line holds `model`, `settings` (None for
plain vLLM) and `options`, each further one a call.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not ours
    first = json.loads(sys.stdin.readline())
    from kvstore.engines.vllm.driving import Ask, Drive, set_environment, transfer_config

    set_environment()
    settings = first["settings"]
    transfer = None if settings is None else transfer_config(first["role"], **settings)
    try:
        drive = Drive(first["model"], transfer, **first["options"])
    except Exception as error:
        say(out, {"error": _chain(error)})
        return
    count_preemptions(scheduler_of(drive))
    say(out, {"ready": True})
    for line in sys.stdin:
        call = json.loads(line)
        say(out, answer(drive, call, Ask))
    drive.close()


def answer(drive: Any, call: dict[str, Any], kind: Any) -> dict[str, Any]:
    """What a call gives: `run` with asks, or the name of another method of Drive."""
    if call["call"] == "run":
        asks = [kind(**ask) for ask in call["asks"]]
        return {"outcomes": [asdict(outcome) for outcome in drive.run(asks)]}
    if call["call"] == "state":
        scheduler = scheduler_of(drive)
        return {
            "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "requests": len(scheduler.requests),
            "preemptions": scheduler.preemptions,
        }
    return {"result": getattr(drive, call["call"])()}


def scheduler_of(drive: Any) -> Any:
    return drive.engine.engine_core.engine_core.scheduler


def count_preemptions(scheduler: Any) -> None:
    """vLLM tells nobody how often it preempted."""
    preempt, scheduler.preemptions = scheduler._preempt_request, 0

    def counted(*args: Any, **kwargs: Any) -> None:
        scheduler.preemptions += 1
        preempt(*args, **kwargs)

    scheduler._preempt_request = counted


def _chain(error: BaseException | None) -> str:
    """The messages of an error and of those that it came from."""
    parts = []
    while error is not None:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(parts)


def say(out: Any, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
