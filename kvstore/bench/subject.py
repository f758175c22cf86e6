"""What all benchmarks of the store share: the spec, prompts and payloads that are put."""

from __future__ import annotations

import random
import resource
from typing import Any

import numpy as np

from kvstore.client import KVClient
from kvstore.core.clock import sleep
from kvstore.core.errors import KVStoreError
from kvstore.core.spec import KVSpec, space_id
from kvstore.replay.payload import PayloadMaker, prompt_keys

MIB = 1 << 20
CALL_TIMEOUT_SECONDS, PUT_TIMEOUT_SECONDS = 10.0, 60.0
VOCABULARY = 128_000
MAPPED_ROUND_SECONDS, MAPPED_ROUNDS_MAX = 0.2, 100


def bench_spec(block_bytes: int, block_size: int = 16) -> KVSpec:
    return KVSpec(
        model="bench",
        revision="1",
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        dtype="uint8",
        block_size=block_size,
        layout="bench-payload",
        block_bytes=block_bytes,
    )


class Subject:
    """A client attached to the daemon under test, with prompts whose payloads can be checked."""

    def __init__(self, target: str, block_bytes: int, block_size: int = 16, seed: int = 0) -> None:
        self.block_bytes, self.block_size = block_bytes, block_size
        self.verified_bytes = 0
        self.client = KVClient.connect(
            target, call_timeout_seconds=CALL_TIMEOUT_SECONDS,
            put_timeout_seconds=PUT_TIMEOUT_SECONDS,
        )  # fmt: skip
        spec = bench_spec(block_bytes, block_size)
        self.space = self.client.attach(spec, tenant="default")
        self.space_id = space_id(spec, "default")
        self._maker = PayloadMaker(self.space_id, 0, block_bytes)
        self._rng = random.Random(seed)
        self._unknown = np.full(block_size, 2**32 - 1, dtype=np.uint32)

    def prompt(self, block_count: int) -> np.ndarray:
        """Tokens of a prompt that nobody has put."""
        raw = self._rng.randbytes(4 * block_count * self.block_size)
        return np.frombuffer(raw, dtype="<u4") % np.uint32(VOCABULARY)

    def keys(self, tokens: np.ndarray) -> list[bytes]:
        return prompt_keys(self.space_id, tokens, self.block_size)

    def payloads(self, tokens: np.ndarray, out: np.ndarray, first_block: int = 0) -> np.ndarray:
        """The payloads of a prompt's blocks from `first_block` on, written to rows of `out`."""
        keys = self.keys(tokens)[first_block:]
        for row, key in zip(out, keys, strict=False):
            self._maker.write(key, row)
        return out[: len(keys)]

    def put(self, tokens: np.ndarray, blocks: Any, first_block: int = 0) -> None:
        """A put that must store everything."""
        result = self.space.put(tokens, blocks, first_block=first_block)
        wanted = len(tokens) // self.block_size - first_block
        if result.stored + result.present != wanted:
            raise KVStoreError(f"a put of {wanted} blocks answered {result}")

    def put_scattered(self, tokens: np.ndarray, rng: random.Random) -> None:
        """Puts a prompt one block at a time with other prompts' blocks in between."""
        row = np.empty((4, self.block_bytes), dtype=np.uint8)
        for block in range(len(tokens) // self.block_size):
            upto = tokens[: (block + 1) * self.block_size]
            self.put(upto, self.payloads(upto, row, block), first_block=block)
            filler = self.prompt(rng.randint(1, 3))
            self.put(filler, self.payloads(filler, row))

    def wrong_bytes(self, tokens: np.ndarray, rows: Any) -> int:
        """Bytes of `rows` that are not the payloads of the prompt's blocks."""
        keys = self.keys(tokens)
        return sum(self._maker.wrong_bytes(k, row) for k, row in zip(keys, rows, strict=True))

    def stored_wrong_bytes(self, tokens: np.ndarray) -> int:
        """Restores a prompt in place and checks it; blocks that were evicted are no error."""
        with self.space.lookup(tokens) as match:
            found = tokens[: match.matched_tokens]
            wrong = self.wrong_bytes(found, self.space.restore(match))
            self.verified_bytes += len(found) // self.block_size * self.block_bytes
            match.check()
            return wrong

    def wait_mapped(self) -> None:
        """Waits until the client's thread has brought the pool into this process's page tables."""
        faults, now = -1, 0
        for _ in range(MAPPED_ROUNDS_MAX):
            faults, now = now, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            if now == faults:
                return
            sleep(MAPPED_ROUND_SECONDS)

    def settle(self) -> None:
        """Waits until the daemon has done what it was told without an answer, such as releases."""
        self.space.lookup(self._unknown)

    def close(self) -> None:
        self.client.close()
