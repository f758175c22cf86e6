"""`kvstore bench disk`: restores from disk and writes to it against plain transfers.

And what one client's restores from disk do to the lookups of another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.device import DeviceFile, read_actions
from kvstore.bench.disk_lookups import measure_lookups
from kvstore.bench.measure import alternate, document, medians, timed
from kvstore.bench.subject import MIB, Subject
from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.errors import KVStoreError
from kvstore.replay.own_daemon import OwnDaemon, fitting_pool_bytes
from kvstore.replay.own_disk import disk_section, fitting_disk_bytes, own_disk

BLOCKS, BLOCKS_QUICK = 512, 48
POOL_BYTES, POOL_QUICK_BYTES = 1280 * MIB, 160 * MIB
FRESH_ROUNDS, AGAIN_ROUNDS, READ_ROUNDS = 4, 5, 7
READ_CONTESTANTS, SCREENING_ROUNDS = 3, 2
# As large as there is room for: segments have the size that they have in a large tier.
TIER_BYTES, TIER_BYTES_MIN = 64 << 30, 1 << 30
PUT_BLOCKS = 32


def run(quick: bool = False, path: Path | None = None) -> dict[str, Any]:
    """Measures a daemon with a disk tier in a temporary directory, below `path` if given."""
    pool = fitting_pool_bytes(POOL_QUICK_BYTES if quick else POOL_BYTES, POOL_QUICK_BYTES)
    with own_disk(path) as directory:
        size = fitting_disk_bytes(directory, TIER_BYTES, least=TIER_BYTES_MIN)
        blocks = BLOCKS_QUICK if quick else min(BLOCKS, int(pool * 0.4) // MIB, size // MIB // 8)
        sections = {
            # Nothing is written before Flush says so.
            "tiers.disk": disk_section(directory, size, demote_watermark=1.0),
            "limits": {
                "leased_bytes_per_session": pool, "leased_bytes_per_tenant": pool,
                "lease_ttl_seconds": 30.0,
            },
        }  # fmt: skip
        with OwnDaemon(pool, sections) as daemon, DeviceFile(directory / "plain", blocks) as device:
            daemon.wait_prefaulted()
            contest = _Contest(daemon, device, blocks)
            samples = contest.write_fresh(1 if quick else FRESH_ROUNDS)
            samples |= contest.write_again(2 if quick else AGAIN_ROUNDS)
            samples |= contest.read(2 if quick else READ_ROUNDS, 1 if quick else SCREENING_ROUNDS)
            contest.close()
            lookups = measure_lookups(daemon, pool, quick)
    return _document(samples, lookups, contest, size)


class _Contest:
    """The daemon's disk tier and a plain file beside it, in turns."""

    def __init__(self, daemon: OwnDaemon, device: DeviceFile, blocks: int) -> None:
        self._daemon, self._device, self.blocks = daemon, device, blocks
        self._subject = Subject(daemon.target, MIB)
        self._rows = np.empty((PUT_BLOCKS, MIB), dtype=np.uint8)
        self._tokens = self._subject.prompt(0)
        self.wrong_bytes = 0

    def close(self) -> None:
        self._subject.close()

    def write_fresh(self, rounds: int) -> dict[str, list[float]]:
        """Into space that the file system gave out but nobody has written: a tier that grows."""
        self._put()
        actions = {
            "flush_fresh": self._flush,
            "device_write_fresh": timed(self._device.write_fresh),
        }

        def next_round() -> None:
            self._put()
            self._device.prepare_fresh()

        samples = alternate(actions, rounds, warmup=1, on_round=next_round)
        self._device.write_fresh()
        return samples

    def write_again(self, rounds: int) -> dict[str, list[float]]:
        """Into space that was written before: a tier that has its size."""
        self._renew()
        actions = {"flush_again": self._flush, "device_write_again": timed(self._device.write)}
        samples = alternate(actions, rounds, warmup=1, on_round=self._renew)
        self._flush()
        return samples

    def _renew(self) -> None:
        """Drops everything, and puts other blocks into the slots that come free."""
        self._subject.client.admin.clear(all=True)
        self._put()
        sleep(0.3)  # the daemon makes the removals durable by itself

    def _put(self) -> None:
        """A new prompt, in host only."""
        subject, size = self._subject, self._subject.block_size
        self._tokens = subject.prompt(self.blocks)
        for at in range(0, self.blocks, PUT_BLOCKS):
            upto = self._tokens[: min(at + PUT_BLOCKS, self.blocks) * size]
            subject.put(upto, subject.payloads(upto, self._rows, at), first_block=at)

    def _flush(self) -> float:
        start = perf_seconds()
        answer = self._subject.client.admin.flush()
        seconds = perf_seconds() - start
        if answer.left_out_blocks:
            raise KVStoreError(f"a flush left {answer.left_out_blocks} blocks out: {answer}")
        return seconds

    def read(self, rounds: int, screening_rounds: int) -> dict[str, list[float]]:
        """What was written last, from a daemon that has nothing in host; the best plain readers."""
        readers = {name: timed(read) for name, read in read_actions(self._device).items()}
        screened = medians(alternate(readers, screening_rounds, warmup=1))
        best = sorted(readers, key=screened.__getitem__)[:READ_CONTESTANTS]
        actions = {**{name: readers[name] for name in best}, "restore": self._restore}
        samples = alternate(actions, rounds, warmup=1)
        return samples

    def _restore(self) -> float:
        self._subject.close()
        self._daemon.stop(free=True)
        self._daemon.start()
        self._daemon.wait_prefaulted()
        self._subject = subject = Subject(self._daemon.target, MIB)
        subject.wait_mapped()
        space = subject.space
        start = perf_seconds()
        match = space.lookup(self._tokens)
        views = space.restore(match)
        seconds = perf_seconds() - start
        with match:
            if {step.source for step in match.plan.steps} != {"disk"} or len(views) != self.blocks:
                raise KVStoreError(f"the blocks did not come from disk alone: {match.plan}")
            self.wrong_bytes += subject.wrong_bytes(self._tokens, views)
            match.check()
        return seconds


def _document(
    samples: dict[str, list[float]], lookups: dict[str, Any], contest: _Contest, tier_bytes: int
) -> dict[str, Any]:
    middle, total = medians(samples), contest.blocks * MIB
    reader = min((n for n in middle if n.startswith("device_read_")), key=middle.__getitem__)
    figures = {
        "ratio_to_device_read": middle[reader] / middle["restore"],
        "ratio_to_device_write": middle["device_write_again"] / middle["flush_again"],
        "ratio_to_device_write_fresh": middle["device_write_fresh"] / middle["flush_fresh"],
        "lookup_p99_ratio_under_disk_load": lookups["p99_ratio"],
    }
    return document(
        figures,
        {**samples, **lookups.pop("samples")},
        restore_bytes_per_second=total / middle["restore"],
        device_read_bytes_per_second=total / middle[reader],
        flush_bytes_per_second=total / middle["flush_again"],
        device_write_bytes_per_second=total / middle["device_write_again"],
        flush_fresh_bytes_per_second=total / middle["flush_fresh"],
        device_write_fresh_bytes_per_second=total / middle["device_write_fresh"],
        fastest_device_read=reader,
        lookups=lookups,
        block_bytes=MIB,
        block_count=contest.blocks,
        tier_bytes=tier_bytes,
        wrong_bytes=contest.wrong_bytes,
    )
