"""`kvstore bench lookup`: lookups over the local lane against an empty gRPC call.

Blocks of 16 tokens; 10^4 and 10^6 of them in the index. Every lookup takes a lease, which is
released outside the measured time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from kvstore.bench.empty_rpc import EmptyRpc
from kvstore.bench.fill import PAYLOAD_BYTES, Filler, fitting_blocks, pool_bytes
from kvstore.bench.measure import Action, alternate, document, medians, timed
from kvstore.bench.scrape import loop_stalls, stall_quantile
from kvstore.bench.subject import Subject
from kvstore.core.clock import perf_seconds, sleep
from kvstore.replay.own_daemon import OwnDaemon, free_address

SMALL_BLOCKS, LARGE_BLOCKS = 10_000, 1_000_000
SHORT, LONG, FEW_RUNS = 16, 1000, 4
ROUNDS, LONG_TOKENS, LONG_ROUNDS = 400, 1_000_000, 100
EXTRA_BLOCKS = 80_000

PROBE_SECONDS = 0.02  # the daemon looks at its loop every 10 ms


def run(quick: bool = False) -> dict[str, Any]:
    """Measures on two daemons at once, in turns: one with 10^4 blocks, one with 10^6."""
    small_blocks, large_blocks = (2000, 5000) if quick else (SMALL_BLOCKS, LARGE_BLOCKS)
    rounds, long_tokens = (20, 50_000) if quick else (ROUNDS, LONG_TOKENS)
    large_blocks = fitting_blocks(large_blocks)
    with ExitStack() as stack:
        small, small_daemon = stack.enter_context(_subject(small_blocks + EXTRA_BLOCKS))
        large, _ = stack.enter_context(_subject(large_blocks))
        empty = stack.enter_context(EmptyRpc(small_daemon.directory))
        small_fill, large_fill = Filler(small), Filler(large)
        small_fill.fill(small_blocks)
        started = perf_seconds()
        large_fill.fill(large_blocks)
        fill_seconds = perf_seconds() - started
        actions = {
            "empty_rpc": timed(empty.call),
            "lookup_16": _looker(small, small_fill.sample(64, SHORT)),
            "lookup_16_large_index": _looker(large, large_fill.sample(64, SHORT)),
            "lookup_1000": _looker(small, [put_in_runs(small, FEW_RUNS)]),
            "lookup_1000_branched": _looker(small, [put_in_runs(small, LONG)]),
        }
        samples = alternate(actions, rounds, warmup=20)
        samples["lookup_1000000_tokens"], stall = _long_lookups(
            small, small_daemon, long_tokens, 3 if quick else LONG_ROUNDS
        )
    return _document(samples, stall, small_blocks, large_blocks, large_blocks / fill_seconds)


@contextmanager
def _subject(blocks: int) -> Iterator[tuple[Subject, OwnDaemon]]:
    size = pool_bytes(blocks)
    sections = {
        "server": {"metrics": free_address()},
        "index": {"max_blocks": blocks + EXTRA_BLOCKS},
        # One lookup of the long prompt leases most of the pool.
        "limits": {"leased_bytes_per_session": size, "leased_bytes_per_tenant": size},
    }
    with OwnDaemon(size, sections) as daemon:
        subject = Subject(daemon.target, PAYLOAD_BYTES)
        try:
            yield subject, daemon
        finally:
            subject.close()


def put_in_runs(subject: Subject, runs: int) -> np.ndarray:
    """Puts a prompt of 1,000 blocks and branches that cut it into `runs` runs."""
    size = subject.block_size
    tokens = subject.prompt(LONG)
    rows = np.empty((LONG, subject.block_bytes), dtype=np.uint8)
    subject.put(tokens, subject.payloads(tokens, rows))
    for run_number in range(1, runs):
        at = run_number * LONG // runs
        branch = np.concatenate([tokens[: at * size], subject.prompt(1)])
        subject.put(branch, subject.payloads(branch, rows, at), first_block=at)
    return tokens


def _looker(subject: Subject, prompts: Sequence[np.ndarray]) -> Action:
    """Times lookups of these prompts, one after the other; each must find all of it."""
    turn = itertools.cycle(prompts)
    space = subject.space

    def look_up() -> float:
        tokens = next(turn)
        start = perf_seconds()
        match = space.lookup(tokens)
        seconds = perf_seconds() - start
        assert match.matched_tokens == len(tokens), "a prompt of the benchmark is not stored"
        match.release()
        subject.settle()
        return seconds

    return look_up


def _long_lookups(
    subject: Subject, daemon: OwnDaemon, token_count: int, rounds: int
) -> tuple[list[float], float]:
    """Lookups of a very long prompt, found and not found; p99 of the loop's stalls meanwhile."""
    blocks = token_count // subject.block_size
    tokens = subject.prompt(blocks)
    rows = np.empty((1000, subject.block_bytes), dtype=np.uint8)
    for at in range(0, blocks, len(rows)):
        upto = tokens[: min(at + len(rows), blocks) * subject.block_size]
        subject.put(upto, subject.payloads(upto, rows, at), first_block=at)
    foreign = subject.prompt(blocks)
    found = _looker(subject, [tokens])
    before = loop_stalls(daemon.metrics_address)
    seconds = []
    for _ in range(rounds):
        seconds.append(found())
        subject.space.lookup(foreign).release()
    sleep(PROBE_SECONDS)
    return seconds, stall_quantile(before, loop_stalls(daemon.metrics_address), 0.99)


def _document(
    samples: dict[str, list[float]],
    stall: float,
    small_blocks: int,
    large_blocks: int,
    fill_rate: float,
) -> dict[str, Any]:
    middle = medians(samples)
    empty = middle["empty_rpc"]
    figures = {
        "ratio_to_empty_rpc": middle["lookup_16"] / empty,
        "ratio_to_empty_rpc_1000": middle["lookup_1000"] / empty,
        "ratio_to_empty_rpc_1000_branched": middle["lookup_1000_branched"] / empty,
        "ratio_large_index": middle["lookup_16_large_index"] / middle["lookup_16"],
        "loop_stall_p99_seconds": stall,
    }
    return document(
        figures,
        samples,
        empty_rpc_seconds=empty,
        small_index_blocks=small_blocks,
        large_index_blocks=large_blocks,
        fill_blocks_per_second=fill_rate,
        block_size=16,
    )
