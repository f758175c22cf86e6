"""A process that stores, looks up and checks until it is told to stop.

    writer.py ADDRESS SEED [flush | flush fast]

It says on its standard output what the daemon acknowledged: `ack FAMILY BLOCKS`, `hit BLOCKS`,
and `WRONG ...` if a single byte was not as it should be. With `flush` it is alone in a space, asks
now and then for a Flush of it, says `durable FAMILY BLOCKS` of what was stored before a Flush that
left nothing out, and goes on with new families once all are long. It ends when its input ends.
"""

from __future__ import annotations

import sys
import threading
import time
from random import Random
from typing import Any

import numpy as np
from daemons import Tagged

from kvstore.client import KVClient, KVSpec, LeaseLost, NotFound, StoreUnavailable
from kvstore.client.space import Space

# Blocks of 4 tokens and 4 KiB.
SPEC = KVSpec(
    model="small", revision="r", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32",
    block_size=4,
)  # fmt: skip
FAMILIES, BLOCKS_MAX = 12, 160
FLUSH_FAMILIES, FLUSH_BLOCKS, FLUSH_SHARE = 4, 48, 0.1
PAUSE_SECONDS, FLUSH_PAUSE_SECONDS = 0.01, 0.03


def prompt(family: int, blocks: int) -> list[int]:
    """The first blocks of a family's one long prompt."""
    return [family << 16 | i for i in range(4 * blocks)]


def spec_of(seed: int) -> KVSpec:
    """What a writer that flushes stores under: nobody else does."""
    return KVSpec(
        model=f"small-{seed}", revision="r", num_layers=1, num_kv_heads=2, head_dim=64,
        dtype="float32", block_size=4,
    )  # fmt: skip


def say(text: str) -> None:
    print(text, flush=True)


class Writer:
    """What one process does: families of prompts that grow, and are looked up."""

    def __init__(self, seed: int, flushes: bool, fast: bool) -> None:
        self.random = Random(seed)
        self.spec = spec_of(seed) if flushes else SPEC
        self.tagged = Tagged(self.spec)
        self.flushes = flushes
        self.pause = FLUSH_PAUSE_SECONDS if flushes and not fast else PAUSE_SECONDS
        self.longest = FLUSH_BLOCKS if flushes else BLOCKS_MAX
        count = FLUSH_FAMILIES if flushes else FAMILIES
        self.next_family = count
        self.lengths = {(0 if flushes else seed * count) + i: 0 for i in range(count)}
        self.told: dict[int, int] = {}
        self.held: Any = None

    def run(self, client: KVClient, stop: threading.Event) -> None:
        space = client.attach(self.spec)
        say("ready")
        while not stop.is_set():
            try:
                self.step(client, space)
            except StoreUnavailable:
                time.sleep(0.02)
            except (LeaseLost, NotFound):
                continue
            time.sleep(self.random.random() * self.pause)

    def step(self, client: KVClient, space: Space) -> None:
        if self.flushes and not self.same_daemon(space):
            self.learn(space)
        family, dice = self.random.choice(list(self.lengths)), self.random.random()
        if self.flushes and dice < FLUSH_SHARE:
            self.flush(client, space)
        elif dice < 0.7:
            self.put(space, family)
        else:
            self.check(space, family)

    def put(self, space: Space, family: int) -> None:
        first = self.lengths[family]
        blocks = min(first + self.random.randrange(1, 9), self.longest)
        tokens = prompt(family, blocks)
        data = self.tagged.blocks(tokens)[first:]
        result = space.put(tokens, data, first_block=first)
        if blocks > first and result.stored + result.present == blocks - first:
            self.lengths[family] = blocks
            say(f"ack {family} {blocks}")
        elif self.flushes and result.rejected:
            self.lengths[family] = self.find(space, family)

    def check(self, space: Space, family: int) -> None:
        """Whatever the lookup finds must be right, what was acknowledged or more."""
        tokens = prompt(family, self.longest)
        with space.lookup(tokens) as match:
            target = np.empty((match.block_count, self.spec.block_bytes), np.uint8)
            space.restore_into(match, target)
        if wrong := self.tagged.wrong(tokens, target):
            say(f"WRONG {family} {wrong} bytes")
        if len(target) < self.lengths[family] and not self.flushes:
            say(f"LOST {family} {len(target)} of {self.lengths[family]}")
        say(f"hit {len(target)}")

    # ---- What is on disk ----

    def flush(self, client: KVClient, space: Space) -> None:
        """What was there before a Flush that left nothing out, and still is, is durable."""
        stored = dict(self.lengths)
        result = client.admin.flush(space.space_id)
        if result.left_out_blocks:
            say(f"left {result.left_out_blocks}")
            return
        found = {family: min(n, self.find(space, family)) for family, n in stored.items()}
        if not self.same_daemon(space):
            return
        for family, blocks in found.items():
            if blocks > self.told.get(family, 0):
                self.told[family] = blocks
                say(f"durable {family} {blocks}")
            if blocks == self.longest:
                del self.lengths[family]
                self.lengths[self.next_family] = 0
                self.next_family += 1

    def same_daemon(self, space: Space) -> bool:
        """Whether the daemon is the one that `lengths` is about."""
        return space.space_id == self.spec_id and space.attached is self.held

    def learn(self, space: Space) -> None:
        """Another daemon: what it has may be less than what the last one had."""
        self.held = space.attached
        self.lengths = {family: self.find(space, family) for family in self.lengths}
        for family, blocks in self.lengths.items():
            if blocks < self.told.get(family, 0):
                say(f"LOST {family} {blocks} of {self.told[family]}")

    @property
    def spec_id(self) -> bytes:
        return self.tagged.space_id

    def find(self, space: Space, family: int) -> int:
        """Leading blocks of a family that the daemon has."""
        with space.lookup(prompt(family, self.longest)) as match:
            return match.matched_tokens // 4


def main() -> None:
    address, seed, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    flushes = "flush" in mode
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    # Of a busy machine nothing is asked but the right answer.
    with KVClient.connect(address, call_timeout_seconds=2.0 if flushes else 0.1) as client:
        Writer(seed, flushes, "fast" in mode).run(client, stop)


if __name__ == "__main__":
    main()
