"""`Workload`: a trace made ready for many simulations, whatever their policies and sizes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from kvstore.core.errors import InvalidRequest
from kvstore.core.keys import EMPTY_CHAIN, Chain, Segment
from kvstore.core.space import Space
from kvstore.core.spec import KVSpec
from kvstore.policies.oracle import NEVER
from kvstore.policies.uses import Request, prefix_digests
from kvstore.policies.worth import Worth
from kvstore.replay.formats import TraceRequest

ROOT = bytes(32)
ID_BYTES = 8


def trace_space(number: int, tenant: str, block_size: int, token_bytes: int = 1) -> Space:
    """A space for blocks of a trace: no model, but tokens and bytes a block."""
    spec = KVSpec(
        model="trace", revision="0", num_layers=1, num_kv_heads=1, head_dim=token_bytes,
        kv_factor=1, dtype="int8", block_size=block_size,
    )  # fmt: skip
    return Space(number, spec, tenant)


class Workload:
    """Requests with their chains, digests and values.

    `hints` is the accuracy of a made-up hint "this turn will be continued", drawn from the trace's
    own future and flipped with probability 1 - `hints`; None gives no hints.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        hints: float | None = None,
        seed: int = 0,
        token_bytes: int = 1,
    ) -> None:
        if not requests:
            raise InvalidRequest("the trace has no request; pass one with a line a request")
        if hints is not None and not 0 <= hints <= 1:
            raise InvalidRequest(f"the accuracy of hints is {hints}; pass 0 to 1")
        self.requests = requests
        self.block_size = requests[0].block_size
        tenants = dict.fromkeys(request.tenant for request in requests)
        self.spaces = {
            tenant: trace_space(number, tenant, self.block_size, token_bytes)
            for number, tenant in enumerate(tenants)
        }
        self.chains = [_chain(request) for request in requests]
        self.unique_blocks = len({i for request in requests for i in request.hash_ids})
        self.reference_count = sum(len(request.hash_ids) for request in requests)
        self.input_tokens = sum(request.input_length for request in requests)
        self.hints = hints
        self._seed = seed

    @cached_property
    def told(self) -> list[Request]:
        """What residency is told of each request."""
        expected = self._expectations()
        start = self.requests[0].timestamp
        return [
            Request(
                request.tenant,
                (request.timestamp - start) / 1000,
                prefix_digests(self.spaces[request.tenant], ROOT, chain),
                request.input_length,
                request.output_length,
                expect,
            )
            for request, chain, expect in zip(self.requests, self.chains, expected, strict=True)
        ]

    @cached_property
    def told_future(self) -> list[Request]:
        """The same, with each block's next use: what an offline policy is told."""
        return [
            told._replace(next_uses=uses)
            for told, uses in zip(self.told, self.next_uses, strict=True)
        ]

    @cached_property
    def next_uses(self) -> list[tuple[int, ...]]:
        """For each full block of each request, the number of the next request for it."""
        last: dict[tuple[str, int], int] = {}
        found: list[tuple[int, ...]] = []
        for number in range(len(self.requests) - 1, -1, -1):
            request = self.requests[number]
            ids = [(request.tenant, i) for i in request.hash_ids[: request.full_blocks]]
            found.append(tuple([last.get(i, NEVER) for i in ids]))
            last.update(dict.fromkeys(ids, number))
        found.reverse()
        return found

    def _expectations(self) -> list[str]:
        """The hint of each request."""
        if self.hints is None:
            return [""] * len(self.requests)
        rng, hints = random.Random(self._seed), []
        for uses in self.next_uses:
            continued = bool(uses) and uses[-1] != NEVER
            if rng.random() >= self.hints:
                continued = not continued
            hints.append("likely" if continued else "none")
        return hints

    @cached_property
    def block_seconds(self) -> np.ndarray:
        """Seconds that the first n blocks of a prompt take to recompute, their constant left out.

        Entry n is for n full blocks, with the rates that a daemon starts from.
        """
        deepest = max(len(request.hash_ids) for request in self.requests)
        first, slope = Worth().line(next(iter(self.spaces.values())))
        return np.concatenate([[0.0], np.cumsum(first + slope * np.arange(deepest))])

    @cached_property
    def prefill_seconds(self) -> np.ndarray:
        """Each request's prefill without any hit, its constant left out."""
        token, pair = Worth().rates(None)
        tokens = np.array([request.input_length for request in self.requests], np.float64)
        seconds: np.ndarray = token * tokens + pair * tokens * tokens / 2
        return seconds

    def capacity(self, fraction: float) -> int:
        """Blocks in a fraction of all that there are, those not full included."""
        return int(fraction * self.unique_blocks + 1e-9)


def _chain(request: TraceRequest) -> Chain:
    count = request.full_blocks
    if not count:
        return EMPTY_CHAIN
    ids = np.array(request.hash_ids[:count], "<i8").tobytes()
    return Chain((Segment(ids, ID_BYTES),))
