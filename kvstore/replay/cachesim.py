"""`CacheSimulation`: a trace through the daemon's own index, residency and policies; no bytes.

Definitions: each id is one block, the last of a request covers what remains; only full blocks are
stored. A request matches its leading run, its blocks are leased, all are stored, then the tiers
are evicted to their capacities. Saved seconds are those of the hit blocks out of all blocks, the
constant of a prefill left out. Hit tokens are out of all input tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvstore.core.clock import perf_seconds
from kvstore.core.errors import InvalidRequest
from kvstore.core.prices import Prices
from kvstore.policies.ghost import Ghost, Hit
from kvstore.policies.ghost_disk import DISK
from kvstore.policies.ghost_hbm import Copies, HbmTier
from kvstore.policies.index import PrefixIndex
from kvstore.policies.residency import Residency
from kvstore.replay.cachesim_workload import ROOT, Workload

# A block of 512 tokens of 128 KiB from one NVMe drive of 6 GB/s, after 100 us.
DISK_BLOCK_SECONDS = 0.011285


class CacheResult(NamedTuple):
    """What a simulation came to. Ratios are 0 to 1; `tier_tokens` has hit tokens by tier.

    Those of host are without `hbm_tokens`, which had copies on a GPU.

    `passed_blocks` were due for the disk and not worth a write.
    """

    policy: str
    capacity_blocks: tuple[int, ...]
    hit_blocks: int
    token_hit_ratio: float
    saved_seconds: float
    saved_ratio: float
    tier_tokens: tuple[int, ...]
    written_blocks: int
    passed_blocks: int
    seconds: float
    references_per_second: float
    hbm_tokens: int = 0
    promoted_blocks: int = 0


class CacheSimulation:
    """One cache under one policy, told of one request after the other.

    `capacities` are the blocks of host and, if there is one, of disk, from where a block is back in
    `disk_seconds` and where `disk_daily_bytes` may be written, 0 without a limit. With `prices`
    only what is worth it is, without all that is due. With `copies` there is a tier hbm; every hit
    is a load, as if no plan computed it anew.
    """

    def __init__(
        self,
        workload: Workload,
        policy: str,
        capacities: tuple[int, ...],
        disk_seconds: float = DISK_BLOCK_SECONDS,
        disk_daily_bytes: float = 0.0,
        prices: Prices | None = None,
        copies: Copies | None = None,
    ) -> None:
        if not 1 <= len(capacities) <= 2 or min(capacities) < 0:
            raise InvalidRequest(f"capacities is {capacities}; pass blocks of host, or host, disk")
        self.workload = workload
        self.capacities = capacities
        slot_bytes = next(iter(workload.spaces.values())).slot_bytes
        host_bytes, *rest = [blocks * slot_bytes for blocks in capacities]
        disk_bytes = rest[0] if rest else None
        hbm = [] if copies is None else [HbmTier(copies)]
        self._ghost = Ghost(policy, {"": host_bytes}, disk_bytes, disk_daily_bytes, hbm=hbm)
        if self.disk:
            self.residency.set_restore(DISK, disk_seconds, 0.0)
        if disk_bytes is not None and prices is not None:
            self.residency.set_prices(prices.gpu_second, prices.written_byte, disk_bytes)
        self.hits: list[Hit] = []
        self._told = workload.told_future if policy == "oracle" else workload.told

    @property
    def disk(self) -> bool:
        """Whether there is a disk tier."""
        return len(self.capacities) > 1

    @property
    def residency(self) -> Residency:
        return self._ghost.residency

    @property
    def index(self) -> PrefixIndex:
        return self._ghost.index

    def request(self, number: int) -> Hit:
        """Carries one request of the trace out, whole; they come in their order."""
        told, chain = self._told[number], self.workload.chains[number]
        self.residency.request(told)
        hit = Hit(0)
        if chain.segments:
            space = self.workload.spaces[told.tenant]
            hit = self._ghost.serve(space, ROOT, chain, told.seconds)
        self.hits.append(hit)
        return hit

    def run(self) -> CacheResult:
        """All requests, then the result."""
        start = perf_seconds()
        for number in range(len(self.hits), len(self._told)):
            self.request(number)
        return self.result(perf_seconds() - start)

    def result(self, seconds: float) -> CacheResult:
        """What the requests so far came to, `seconds` spent on them."""
        workload, done = self.workload, len(self.hits)
        blocks = np.array([hit.blocks for hit in self.hits], np.int64)
        on_disk = int(sum(hit.disk_blocks for hit in self.hits))
        saved = float(workload.block_seconds[blocks].sum())
        hit_blocks, size = int(blocks.sum()), workload.block_size
        references = sum(len(request.hash_ids) for request in workload.requests[:done])
        tokens = sum(request.input_length for request in workload.requests[:done])
        on_gpu = int(sum(hit.hbm_blocks for hit in self.hits))
        in_host = hit_blocks - on_disk - on_gpu
        by_tier = (in_host, on_disk) if self.disk else (in_host,)
        return CacheResult(
            policy=self.residency.policy_name,
            capacity_blocks=self.capacities,
            hit_blocks=hit_blocks,
            token_hit_ratio=hit_blocks * size / max(1, tokens),
            saved_seconds=saved,
            saved_ratio=saved / max(1e-12, float(workload.prefill_seconds[:done].sum())),
            tier_tokens=tuple(size * n for n in by_tier),
            hbm_tokens=size * on_gpu,
            promoted_blocks=sum(tier.promoted_blocks for tier in self._ghost.hbm),
            written_blocks=self._ghost.written_blocks,
            passed_blocks=self.residency.passed_blocks,
            seconds=seconds,
            references_per_second=references / max(1e-9, seconds),
        )
