"""A process that stores, looks up and checks until it is told to stop: `writer.py ADDRESS SEED`.

It says on its standard output what the daemon acknowledged: `ack FAMILY BLOCKS`, `hit BLOCKS`,
and `WRONG ...` if a single byte was not as it should be. It ends when its input ends.
"""

from __future__ import annotations

import sys
import threading
import time
from random import Random

import numpy as np
from daemons import Tagged

from kvstore.client import KVClient, KVSpec, LeaseLost, NotFound, StoreUnavailable

# Blocks of 4 tokens and 4 KiB.
SPEC = KVSpec(
    model="small", revision="r", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32",
    block_size=4,
)  # fmt: skip
FAMILIES, BLOCKS_MAX = 12, 160


def prompt(family: int, blocks: int) -> list[int]:
    """The first blocks of a family's one long prompt."""
    return [family << 16 | i for i in range(4 * blocks)]


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    address, seed = sys.argv[1], int(sys.argv[2])
    random, tagged = Random(seed), Tagged(SPEC)
    lengths = {seed * FAMILIES + i: 0 for i in range(FAMILIES)}
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    with KVClient.connect(address) as client:
        space = client.attach(SPEC)
        say("ready")
        while not stop.is_set():
            family = random.choice(list(lengths))
            try:
                if random.random() < 0.7:
                    put(space, tagged, random, lengths, family)
                else:
                    check(space, tagged, family, lengths[family])
            except StoreUnavailable:
                time.sleep(0.02)
            except (LeaseLost, NotFound):
                continue
            time.sleep(random.random() * 0.01)


def put(space, tagged, random, lengths, family) -> None:  # type: ignore[no-untyped-def]
    first = lengths[family]
    blocks = min(first + random.randrange(1, 9), BLOCKS_MAX)
    tokens = prompt(family, blocks)
    data = tagged.blocks(tokens)[first:]
    result = space.put(tokens, data, first_block=first)
    if blocks > first and result.stored + result.present == blocks - first:
        lengths[family] = blocks
        say(f"ack {family} {blocks}")


def check(space, tagged, family, acked) -> None:  # type: ignore[no-untyped-def]
    """Whatever the lookup finds must be right, what was acknowledged or more."""
    tokens = prompt(family, BLOCKS_MAX)
    with space.lookup(tokens) as match:
        target = np.empty((match.block_count, SPEC.block_bytes), np.uint8)
        space.restore_into(match, target)
    if wrong := tagged.wrong(tokens, target):
        say(f"WRONG {family} {wrong} bytes")
    if len(target) < acked:
        say(f"LOST {family} {len(target)} of {acked}")
    say(f"hit {len(target)}")


if __name__ == "__main__":
    main()
