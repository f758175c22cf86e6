"""Readings of a daemon under test: its loop's stalls from /metrics, its memory from /proc."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

SCRAPE_SECONDS = 10.0
STALL_METRIC = "kvstore_loop_stall_seconds"


def loop_stalls(address: str) -> dict[float, float]:
    """Observations of the owner thread's stalls so far, cumulative, by upper bound in seconds."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=SCRAPE_SECONDS) as answer:
        text = answer.read().decode()
    rows = re.findall(rf'^{STALL_METRIC}_bucket{{le="([^"]+)"}} (\S+)$', text, re.MULTILINE)
    return {float(bound): float(count) for bound, count in rows}


def stall_quantile(before: dict[float, float], after: dict[float, float], quantile: float) -> float:
    """Upper bound of the bucket that holds the quantile of what came between two readings."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in sorted(after.items())}
    total = max(counts.values(), default=0.0)
    assert total, f"no {STALL_METRIC} was observed between the readings"
    return next(bound for bound, count in counts.items() if count >= quantile * total)


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process: memory that is its own and not a file's or a pool's."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024
