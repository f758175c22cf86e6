"""Fuzzing: mutated bytes, and a corpus that grows by whatever gives an answer not seen before."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable

NUMBERS = re.compile(r"0x[0-9a-f]+|[0-9]+|'[^']*'|b?\"[^\"]*\"")
KEPT_MAX = 256
LONGEST = 1 << 14


def mutate(rng: random.Random, data: bytes) -> bytes:
    """`data` with a few bytes flipped, cut, repeated, or put in."""
    mutant = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(mutant) + 1)
        match rng.randrange(4):
            case 0 if at < len(mutant):
                mutant[at] ^= 1 << rng.randrange(8)
            case 1:
                del mutant[at : at + rng.randrange(1, 9)]
            case 2:
                mutant[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                mutant[at:at] = rng.choice((b"\xff" * 9 + b"\x01", bytes(10), mutant[:at][-8:]))
    return bytes(mutant[:LONGEST])


class Corpus:
    """Inputs to mutate: the seeds, and mutants whose answer was of a new kind.

    An answer's kind is its words without numbers and names, so that a mutant that gets further
    than those before it is gone on from.
    """

    def __init__(self, seeds: Iterable[bytes]) -> None:
        self.seeds = list(seeds)
        self.grown: list[bytes] = []
        self.kinds: set[str] = set()

    def draw(self, rng: random.Random) -> bytes:
        """A mutant: of a seed, or of one that was kept."""
        from_grown = self.grown and rng.random() < 0.5
        return mutate(rng, rng.choice(self.grown if from_grown else self.seeds))

    def saw(self, mutant: bytes, answer: str) -> None:
        kind = NUMBERS.sub("", answer)[:200]
        if kind not in self.kinds and len(self.kinds) < KEPT_MAX:
            self.kinds.add(kind)
            self.grown.append(mutant)


def try_decoder(
    rng: random.Random,
    corpus: Corpus,
    decode: Callable[[bytes], object],
    refusals: tuple,
    cases: int,
) -> list[str]:
    """Decodes mutants; answers with those that raised what is no refusal."""
    problems = []
    for _ in range(cases):
        mutant = corpus.draw(rng)
        try:
            answer = type(decode(mutant)).__name__
        except refusals as error:
            answer = f"{type(error).__name__}: {error}"
        except Exception as error:
            problems.append(f"{mutant.hex()}: {error!r}")
            continue
        corpus.saw(mutant, answer)
    return problems
