"""A client that restores from disk: `python -m kvstore.bench.disk_load TARGET BLOCKS PROMPTS`.

It puts so many prompts of so many blocks of 1 MiB, more than the host tier holds together, and has
them written. For each line `SECONDS` on standard input it restores one after the other, round and
round, so that each has left the host tier when its turn comes; it answers with the blocks that
came back and the ones of these that came from disk.
"""

from __future__ import annotations

import sys

import numpy as np

from kvstore.bench.subject import MIB, Subject
from kvstore.core.clock import perf_seconds

SEED = 77


class DiskLoad:
    """Prompts on disk, restored in turn."""

    def __init__(self, target: str, blocks: int, prompts: int) -> None:
        self._subject = Subject(target, MIB, seed=SEED)
        self._blocks = blocks
        self._prompts = [self._subject.prompt(blocks) for _ in range(prompts)]
        self._turn = 0
        rows = np.empty((blocks, MIB), dtype=np.uint8)
        for tokens in self._prompts:
            self._subject.put(tokens, self._subject.payloads(tokens, rows))
            self._subject.client.admin.flush()
        self._subject.wait_mapped()

    def run(self, seconds: float) -> str:
        end, came, from_disk = perf_seconds() + seconds, 0, 0
        space = self._subject.space
        while perf_seconds() < end:
            tokens = self._prompts[self._turn % len(self._prompts)]
            self._turn += 1
            with space.lookup(tokens) as match:
                came += len(space.restore(match))
                from_disk += sum(
                    step.token_count // self._subject.block_size
                    for step in match.plan.steps
                    if step.source == "disk"
                )
        return f"{came} {from_disk}"

    def close(self) -> None:
        self._subject.close()


def main(target: str, blocks: str, prompts: str) -> None:
    load = DiskLoad(target, int(blocks), int(prompts))
    print("ready", flush=True)
    for line in sys.stdin:
        print(load.run(float(line)), flush=True)
    load.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
