"""Engines of a hand-over, each in a process of its own, forked from one that has torch loaded.

    handover_engine.py ADDRESS

Reads orders, lines of JSON: {"id": ..., "do": "prefill" or "decode", "seed": ..., "tokens": ...,
"pause": ..., "wait": ..., "quiet": ...}. Each is done by a new process with a client of its own,
which says lines of JSON with the order's id: its pid, then `at` how many tokens each forward call
begins, then what came of it. It ends when its input ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import msgspec
import torch
from tiny_llama import tiny_llama

from kvstore.client import KVClient
from kvstore.engines.generating import decode
from kvstore.engines.handover import Ticket, wait_for_prefix
from kvstore.engines.transformers import cache_argument, prefill_with_store, spec_of

BLOCK_TOKENS, CHUNK_TOKENS, OUTPUT_TOKENS = 16, 32, 8
STAGING_BYTES = 64 << 10  # of sixteen blocks: four are committed at a time


def prompt(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).tolist()


def say(order: dict[str, Any], **what: Any) -> None:
    line = json.dumps({"id": order["id"], **what}) + "\n"
    os.write(1, line.encode())  # whole lines, whoever else writes


def prefill(model: Any, space: Any, order: dict[str, Any]) -> None:
    ids, pause = prompt(order["tokens"], order["seed"]), order["pause"]

    def slow(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        say(order, at=options[cache_argument(model)].get_seq_length())
        time.sleep(pause)

    model.register_forward_pre_hook(slow, with_kwargs=True)
    done = prefill_with_store(model, ids, space, chunk_tokens=CHUNK_TOKENS, announce=True)
    ticket = msgspec.to_builtins(Ticket.of(space, done.put, len(ids)))
    say(order, ticket=ticket, problem=done.problem, computed=done.computed_tokens)
    time.sleep(order.get("linger", 0))


def go_on(model: Any, space: Any, order: dict[str, Any]) -> None:
    ids = prompt(order["tokens"], order["seed"])
    ticket = msgspec.convert(order["ticket"], Ticket) if "ticket" in order else None
    awaited = wait_for_prefix(
        space, ids, deadline_seconds=order["wait"], quiet_seconds=order["quiet"], ticket=ticket
    )
    done = prefill_with_store(model, ids, space, store=False)
    answer = decode(model, done, OUTPUT_TOKENS)
    say(
        order, awaited=awaited._asdict(), restored=done.restored_tokens,
        computed=done.computed_tokens, problem=done.problem, tokens=answer.tokens,
    )  # fmt: skip


def work(model: Any, address: str, order: dict[str, Any]) -> None:
    say(order, pid=os.getpid())
    with KVClient.connect(address, staging_bytes=STAGING_BYTES, call_timeout_seconds=2) as client:
        space = client.attach(spec_of(model, name="tiny", block_size=BLOCK_TOKENS))
        (prefill if order["do"] == "prefill" else go_on)(model, space, order)


def main() -> None:
    torch.set_num_threads(1)
    model = tiny_llama()
    spec_of(model)  # the fingerprint is the same for all
    say({"id": 0}, ready=True)
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                work(model, sys.argv[1], json.loads(line))
            except BaseException as error:
                say(json.loads(line), error=repr(error))
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
