"""`Journal`: every input of index and residency, and every action, as lines of a file.

The store is given stand-ins for both that write a call down before they pass it on; without a
journal there are none, and nothing is slower. `kvstore.replay.journal` reads it again.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import xxhash

from kvstore.core.keys import Chain
from kvstore.core.space import Space
from kvstore.policies import inputs
from kvstore.policies.actions import action_line
from kvstore.policies.index import Anchor, Grafted, PrefixIndex, Root, Run, Span, Staged, Walk
from kvstore.policies.residency import Residency
from kvstore.policies.uses import Use

RUNS_KEPT = 1 << 16  # before names of dead ones are looked for
SINGLE_WORDS = (int, str, bool, type(None))

# Takes a line; False once it takes no more.
Write = Callable[[bytes], bool]


class Journal:
    """Writes lines with `write` until that takes no more; then `ended` says why.

    Symbols are kept as digests: tokens are not in it, but who guesses a prompt can tell from it
    that it was there.
    """

    def __init__(self, write: Write) -> None:
        self.ended = ""
        self._write = write
        self._encode = msgspec.json.Encoder().encode
        self._index: PrefixIndex | None = None
        self._spaces: dict[int, Space] = {}
        self._runs: dict[Run, int] = {}
        self._runs_named, self._runs_limit = 0, RUNS_KEPT
        self._anchors: dict[Anchor, int] = {}
        self._anchors_named = self._generators = 0
        self._widths: dict[int, int] = {}

    def follow(self, index: PrefixIndex, residency: Residency) -> tuple[PrefixIndex, Residency]:
        """Stand-ins for a pair that nothing has happened to yet: the store must use these."""
        assert not index.block_count
        assert not residency.request_count
        self._index = index
        self._put({
            "journal": inputs.FORMAT, "tiers": index.tier_count, "max_blocks": index.max_blocks,
            "policy": residency.policy_name,
        })  # fmt: skip
        residency.on_action = lambda action: self._put([inputs.ACTION, action_line(action)])
        return (
            cast("PrefixIndex", JournaledIndex(self, index)),
            cast("Residency", JournaledResidency(self, residency)),
        )

    def close(self) -> None:
        """The store's life ends: what is left is written down, to be compared."""
        if self._index is not None:
            self._put([inputs.END, self._index.block_count, self._index.run_count])

    # ---- Lines ----

    def note(self, *words: Any, **named: Any) -> None:
        """Writes an input down; must be called before it is carried out."""
        if self.ended:
            return
        try:
            line = [self._value(word) for word in words]
            line += [[inputs.NAMED, name, self._value(value)] for name, value in named.items()]
        except TypeError as error:
            # A daemon does not fail because of its journal.
            self._end(str(error))
            return
        self._put(line)

    def _put(self, line: Any) -> None:
        if not self.ended and not self._write(self._encode(line)):
            self._end("no more lines were taken")

    def _end(self, reason: str) -> None:
        self.ended = reason
        self._runs.clear()
        self._anchors.clear()

    def open_generator(self, name: str, *words: Any, **named: Any) -> int:
        self._generators += 1
        self.note(inputs.OPEN, self._generators, name, *words, **named)
        return self._generators

    def anchored(self, anchor: Anchor | None) -> None:
        """An input made this anchor: it has the next number."""
        if anchor is not None and not self.ended:
            self._anchors_named += 1
            self._anchors[anchor] = self._anchors_named

    def knows(self, anchor: Anchor) -> bool:
        """Whether an anchor was not let go yet."""
        return anchor in self._anchors

    def let_go(self, anchor: Anchor) -> None:
        self._anchors.pop(anchor, None)

    def grafted(self, space: Space, graft: Grafted) -> None:
        """Writes down what was found at the start, as the runs that were made of it."""
        if not graft.runs or self.ended:
            return
        tiers, shards = cast("PrefixIndex", self._index).tier_count, space.shard_count
        for each in graft.runs:
            run = each.run
            above = self._above(run)
            grid = np.frombuffer(run.places, np.int64).reshape(-1, tiers, shards)
            there = _text(np.packbits(grid >= 0).tobytes())
            self._put([inputs.GRAFT, above, self._symbols(run.symbols, run.width), there])
            self._name(run)
        self.note(inputs.ADOPT, space)

    # ---- Values ----

    def _value(self, value: Any) -> Any:
        if isinstance(value, SINGLE_WORDS):
            return value
        if isinstance(value, float):
            # JSON has no infinity.
            return value if math.isfinite(value) else [inputs.FLOAT, str(value)]
        if isinstance(value, np.integer):
            return int(value)
        if isinstance(value, bytes):
            return [inputs.BYTES, _text(value)]
        if isinstance(value, Run):
            return [inputs.THE_RUN, self._run(value)]
        for kind, encode in self._kinds():
            if isinstance(value, kind):
                return encode(value)
        raise TypeError(f"the journal has no form for a {type(value).__name__}")

    def _kinds(self) -> tuple[tuple[type, Callable[[Any], Any]], ...]:
        """Forms of the values that are not as frequent; a Span comes before other tuples."""
        return (
            (Space, lambda space: [inputs.THE_SPACE, self._space(space)]),
            (Anchor, lambda anchor: [inputs.THE_ANCHOR, self._anchors.get(anchor, 0)]),
            (Use, lambda use: [inputs.THE_USE, use.number]),
            (Root, self._root),
            (Walk, lambda walk: [inputs.WALK, self._root(walk.root), *self._chain(walk.chain)]),
            (Span, lambda span: [inputs.SPAN, self._run(span.run), span.start, span.stop]),
            (np.ndarray, lambda grid: [inputs.GRID, *grid.shape]),
            (tuple, self._tuple),
            (list, lambda places: [inputs.PLACES, len(places)]),
        )

    def _tuple(self, value: Any) -> Any:
        name = type(value).__name__
        if name == "tuple":
            return [inputs.TUPLE, "", *map(self._value, value)]
        if name not in inputs.TUPLES:
            raise TypeError(f"the journal has no form for a {name}; name it in policies/inputs.py")
        return [inputs.TUPLE, name, *map(self._value, value)]

    def _space(self, space: Space) -> int:
        if space.number not in self._spaces:
            self._spaces[space.number] = space
            spec = msgspec.to_builtins(space.spec)
            self._put([inputs.SPACE, space.number, spec, space.tenant, space.pool])
        return space.number

    def _root(self, root: Root) -> list[Any]:
        return [inputs.THE_ROOT, self._space(root.space), _text(root.digest)]

    def _chain(self, chain: Chain) -> list[Any]:
        """Segments, one after the other: the number of a width, digests of the symbols."""
        return [self._symbols(*segment) for segment in chain.segments]

    def _symbols(self, symbols: bytes, width: int) -> list[Any]:
        number = self._widths.setdefault(width, len(self._widths))
        digest = xxhash.xxh3_128_digest
        digests = [digest(symbols[i : i + width]) for i in range(0, len(symbols), width)]
        return [number, _text(b"".join(digests))]

    # ---- Runs ----

    def _run(self, run: Run) -> int:
        """The number of a run; on its first appearance the way there from a known one comes first.

        Its first symbol says which child it is.
        """
        number = self._runs.get(run)
        if number is not None:
            return number
        if not run.alive:
            self.note(inputs.DEAD_RUN, run.root.space)
            return self._name(run)
        new = [run]
        while (above := new[-1].parent) is not None and above.count and above not in self._runs:
            new.append(above)
        for each in reversed(new):
            self._put([inputs.RUN, self._above(each), self._symbols(each.symbol(0), each.width)])
            self._name(each)
        return self._runs[run]

    def _above(self, run: Run) -> Any:
        """What a run lies under: the number of its parent, which is known, or a root."""
        above = run.parent
        if above is None or not above.count:
            return self._root(run.root)
        return self._runs[above]

    def _name(self, run: Run) -> int:
        self._runs_named += 1
        self._runs[run] = self._runs_named
        if len(self._runs) > self._runs_limit:
            self._forget_dead(run)
        return self._runs_named

    def _forget_dead(self, but: Run) -> None:
        dead = [run for run in self._runs if not run.alive and run is not but]
        self._put([inputs.FORGET, [self._runs.pop(run) for run in dead]])
        self._runs_limit = max(RUNS_KEPT, 2 * len(self._runs))


class _StandIn:
    """Writes calls that are inputs down, and passes everything on."""

    whose = ""
    plain = frozenset[str]()
    """Calls of which nothing is to be said but their values."""

    def __init__(self, journal: Journal, behind: Any) -> None:
        self.__dict__.update(_journal=journal, _behind=behind)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._behind, name)
        if name in self.plain:
            return partial(_noted, self._journal, self.whose, name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is set past the journal; make it an input")


class JournaledIndex(_StandIn):
    """A `PrefixIndex` whose changes are written down."""

    whose, plain = inputs.INDEX, inputs.INDEX_INPUTS

    def stage(self, walk: Walk, chain: Chain, *words: Any) -> Staged:
        self._journal.note(inputs.INDEX, "stage", walk, *words)
        staged: Staged = self._behind.stage(walk, chain, *words)
        self._journal.anchored(staged.anchor)
        return staged

    def anchor(self, run: Run, depth: int, owner: int) -> Anchor:
        self._journal.note(inputs.INDEX, "anchor", run, depth, owner)
        anchor: Anchor = self._behind.anchor(run, depth, owner)
        self._journal.anchored(anchor)
        return anchor

    def unanchor(self, anchor: Anchor) -> None:
        if self._journal.knows(anchor):
            self._journal.note(inputs.INDEX, "unanchor", anchor)
            self._journal.let_go(anchor)
        self._behind.unanchor(anchor)

    def graft_columns(self, space: Space, *words: Any) -> Grafted:
        """What was found is known only after it; what residency makes of it follows the input."""
        listener, self._behind.listener = self._behind.listener, _Late()
        try:
            graft: Grafted = self._behind.graft_columns(space, *words)
        finally:
            late, self._behind.listener = self._behind.listener, listener
        self._journal.grafted(space, graft)
        late.tell(listener)
        return graft


class _Late:
    """A listener that keeps what it hears and tells another one later."""

    def __init__(self) -> None:
        self._heard: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *words: self._heard.append((name, words))

    def tell(self, listener: Any) -> None:
        for name, words in self._heard:
            getattr(listener, name)(*words)


class JournaledResidency(_StandIn):
    """A `Residency` whose inputs are written down."""

    whose, plain = inputs.RESIDENCY, inputs.RESIDENCY_INPUTS

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name in inputs.RESIDENCY_GENERATORS:
            return partial(_generated, self._journal, name, found)
        return found

    def access(self, path: Any) -> Any:
        """Of a path only its READY end matters."""
        end = next((span for span in reversed(path) if span[0].ready > span[1]), None)
        if end is not None:
            self._journal.note(inputs.RESIDENCY, "access", Span(*end))
        return self._behind.access(path)


def _noted(
    journal: Journal, whose: str, name: str, call: Callable[..., Any], *words: Any, **named: Any
) -> Any:
    journal.note(whose, name, *words, **named)
    return call(*words, **named)


def _generated(
    journal: Journal, name: str, call: Callable[..., Iterator[Any]], *words: Any, **named: Any
) -> Iterator[Any]:
    """The actions of a call's generator; each time that it is asked is an input."""
    number = journal.open_generator(name, *words, **named)
    actions = call(*words, **named)
    try:
        while True:
            journal.note(inputs.NEXT, number)
            try:
                action = next(actions)
            except StopIteration:
                return
            yield action
    finally:
        journal.note(inputs.CLOSE, number)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
