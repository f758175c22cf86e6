"""One of the clients of `kvstore bench put`: `python -m kvstore.bench.put_client TARGET N SEED`.

It obeys lines on standard input: `put` and `copy` answer with the moments they began and ended
(the clock is the machine's, so the parent can compare clients), `next` prepares another prompt,
`wrong` answers with the bytes that are wrong in what was put.
"""

from __future__ import annotations

import sys

import numpy as np

from kvstore.bench.copies import copy_actions, prefaulted, windows
from kvstore.bench.subject import MIB, Subject
from kvstore.core.clock import perf_seconds

WINDOWS = 4


class PutClient:
    """A client with one prompt of N blocks ready to be put or copied."""

    def __init__(self, target: str, blocks: int, seed: int) -> None:
        self._subject = Subject(target, MIB, seed=seed)
        self._blocks = blocks
        self._source = prefaulted((blocks, MIB))
        self._copies = copy_actions(list(self._source), *windows(blocks, WINDOWS))
        self._put: list[np.ndarray] = []
        self.next()
        self._subject.wait_mapped()

    def next(self) -> str:
        """Prepares a prompt: not along with the put before, which others may be in still."""
        self._tokens = self._subject.prompt(self._blocks)
        self._subject.payloads(self._tokens, self._source)
        return "0"

    def put(self) -> str:
        begin = perf_seconds()
        self._subject.put(self._tokens, self._source)
        end = perf_seconds()
        self._put.append(self._tokens)
        return f"{begin!r} {end!r}"

    def copy(self, name: str) -> str:
        action = self._copies[name]
        begin = perf_seconds()
        action()
        return f"{begin!r} {perf_seconds()!r}"

    def wrong(self) -> str:
        return str(sum(self._subject.stored_wrong_bytes(tokens) for tokens in self._put))

    def close(self) -> None:
        self._subject.close()


def main(target: str, blocks: str, seed: str) -> None:
    client = PutClient(target, int(blocks), int(seed))
    print("ready", flush=True)
    for line in sys.stdin:
        word, _, name = line.strip().partition(" ")
        plain = {"put": client.put, "next": client.next, "wrong": client.wrong}
        print(client.copy(name) if word == "copy" else plain[word](), flush=True)
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
