"""`kvstore bench watch`: what a monitoring system's scrape takes of a daemon with many spaces."""

from __future__ import annotations

import urllib.request
from typing import Any

import msgspec

from kvstore.bench.measure import alternate, document, medians, timed
from kvstore.bench.scrape import SCRAPE_SECONDS
from kvstore.bench.subject import bench_spec
from kvstore.client import KVClient, ReuseHints
from kvstore.replay.own_daemon import OwnDaemon, free_address

SPACES, ENGINES = 100, 50  # a daemon measures the costs of 64 engines at most
ROUNDS, QUICK_ROUNDS = 200, 20
BLOCK_BYTES, BLOCK_SIZE, BLOCKS = 4096, 16, 4
POOL_BYTES = 64 << 20
STEPS = 12  # so many that the daemon has a cost model of a space to tell of


def run(quick: bool = False) -> dict[str, Any]:
    """Seconds of GET /metrics and GET /live after 100 spaces of 50 models were used."""
    address = free_address()
    with OwnDaemon(POOL_BYTES, {"server": {"metrics": address}}) as daemon:
        with KVClient.connect(daemon.target, client_name="bench") as client:
            for number in range(SPACES):
                _use(client, number)
            actions = {
                "scrape": timed(lambda: _get(address, "metrics")),
                "live": timed(lambda: _get(address, "live")),
            }
            samples = alternate(actions, QUICK_ROUNDS if quick else ROUNDS)
        body = _get(address, "metrics")
    middle, ordered = medians(samples), sorted(samples["scrape"])
    return document(
        {
            "scrape_seconds": middle["scrape"],
            "scrape_p99_seconds": ordered[int(0.99 * (len(ordered) - 1))],
        },
        samples,
        space_count=SPACES,
        series_count=sum(not line.startswith(b"#") for line in body.splitlines()),
        body_bytes=len(body),
    )


def _use(client: KVClient, number: int) -> None:
    """Attaches a space, stores a prompt in it, finds it again and tells of steps."""
    model, layout = f"bench-{number % ENGINES}", f"bench-{number // ENGINES}"
    spec = bench_spec(BLOCK_BYTES, BLOCK_SIZE)
    space = client.attach(msgspec.structs.replace(spec, model=model, layout=layout))
    tokens = [number * 1000 + n for n in range(BLOCKS * BLOCK_SIZE)]
    space.put(tokens, [bytes([number % 256]) * BLOCK_BYTES] * BLOCKS)
    hints = ReuseHints(expect_reuse=1)
    with space.lookup([*tokens, 1], request_id=f"request-{number}", hints=hints):
        pass
    for step in range(STEPS):
        new = 128 << step % 4
        space.report_step(1e-3 + new * 1e-5, [(new, 0)])
    space.finish_request(f"request-{number}", 10, hints=hints)


def _get(address: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/{path}", timeout=SCRAPE_SECONDS) as answer:
        body: bytes = answer.read()
    return body
