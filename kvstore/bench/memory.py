"""`kvstore bench memory`: bytes of the daemon's own memory that an indexed block takes."""

from __future__ import annotations

from typing import Any

from kvstore.bench.fill import (
    PAYLOAD_BYTES,
    PROMPT_BLOCKS,
    Filler,
    fitting_blocks,
    pool_bytes,
)
from kvstore.bench.measure import document
from kvstore.bench.scrape import anonymous_bytes
from kvstore.bench.subject import Subject
from kvstore.core.clock import perf_seconds
from kvstore.replay.own_daemon import OwnDaemon

BLOCKS, STEPS = 1_000_000, 4
SHORT_RUN_BLOCKS, SHORT_RUN = 100_000, 16


def run(quick: bool = False) -> dict[str, Any]:
    """Puts 10^6 blocks of 16 tokens and divides the growth of the daemon's RssAnon by them.

    Prompts are a thousand blocks long and half of them branch off an earlier one. A second
    daemon, with prompts that add 16 blocks to an earlier one, says what short runs cost.
    """
    blocks = fitting_blocks(20_000 if quick else BLOCKS)
    short_blocks = fitting_blocks(10_000 if quick else SHORT_RUN_BLOCKS)
    long_runs = _measure(blocks, PROMPT_BLOCKS)
    short_runs = _measure(short_blocks, SHORT_RUN)
    return document(
        {
            "rss_bytes_per_block": long_runs["rss_bytes_per_block"],
            "rss_bytes_per_block_short_runs": short_runs["rss_bytes_per_block"],
        },
        {},
        long_runs=long_runs,
        short_runs=short_runs,
        put_blocks_per_second=long_runs["put_blocks_per_second"],
        block_size=16,
    )


def _measure(blocks: int, prompt_blocks: int) -> dict[str, Any]:
    """Memory is read once the session, its staging and everything of a first put is there."""
    sections = {"index": {"max_blocks": blocks + 10_000}}
    with OwnDaemon(pool_bytes(blocks), sections) as daemon:
        subject = Subject(daemon.target, PAYLOAD_BYTES)
        filler = Filler(subject, new_blocks=prompt_blocks)
        filler.fill(2000)
        first_blocks, first_bytes = filler.block_count, anonymous_bytes(daemon.pid)
        readings, start = [(first_blocks, first_bytes)], perf_seconds()
        for step in range(1, STEPS + 1):
            filler.fill(blocks * step // STEPS)
            readings.append((filler.block_count, anonymous_bytes(daemon.pid)))
        seconds = perf_seconds() - start
        stored = daemon.status()["block_count"]
        subject.close()
    last_blocks, last_bytes = readings[-1]
    return {
        "rss_bytes_per_block": (last_bytes - first_bytes) / (last_blocks - first_blocks),
        "block_count": stored,
        "rss_anon_bytes": [size for _, size in readings],
        "rss_anon_block_counts": [count for count, _ in readings],
        "put_blocks_per_second": (last_blocks - first_blocks) / seconds,
    }
