"""Journals: what a live daemon's decisions followed from, decided once more and compared.

Each line is an input of index and residency, or an action that came of those before it. The inputs
are carried out on new objects, which decide by themselves; their actions must be the same, in the
same order.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zstandard

from kvstore.core.errors import InvalidRequest, KVStoreError
from kvstore.core.keys import Chain, Segment
from kvstore.core.space import Space
from kvstore.core.spec import KVSpec
from kvstore.policies import inputs
from kvstore.policies.actions import action_line
from kvstore.policies.index import Anchor, PrefixIndex, Root, Run, Span, Walk
from kvstore.policies.index.cells import count_resident
from kvstore.policies.index.run import find_child
from kvstore.policies.residency import Residency
from kvstore.policies.uses import Use
from kvstore.replay.formats import open_trace

LINE_BYTES_MAX = 64 << 20


class JournalError(InvalidRequest):
    """A journal that cannot be read; the text names file, line and fault."""


class Difference(NamedTuple):
    """The first action that is not the same; empty where one side has none."""

    line: int
    recorded: str
    replayed: str

    def __str__(self) -> str:
        if not self.replayed:
            return f"line {self.line}: the daemon did {self.recorded!r}, the replay nothing"
        if not self.recorded:
            return f"line {self.line}: the daemon did nothing, the replay {self.replayed!r}"
        return f"line {self.line}: the daemon did {self.recorded!r}, the replay {self.replayed!r}"


class JournalResult(NamedTuple):
    """What a replay came to. `is_whole`: the journal goes on to the end of the daemon's life."""

    inputs: int
    actions: dict[str, int]
    difference: Difference | None
    is_whole: bool

    @property
    def action_count(self) -> int:
        return sum(self.actions.values())


def read_journal(path: str | Path) -> Iterator[Any]:
    """Lines of a journal as they are written; one that was cut off at its end is left out."""
    decoder = msgspec.json.Decoder()
    with open_trace(path) as stream:
        number = 0
        while True:
            try:
                line = stream.readline(LINE_BYTES_MAX)
            except (OSError, EOFError, zstandard.ZstdError):
                return
            if not line.endswith(b"\n"):
                return
            number += 1
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise JournalError(f"{path}, line {number}: no valid JSON ({error})") from None


def check_journal(path: str | Path, policy: str | None = None) -> JournalResult:
    """Replays a journal; raises JournalError where the file is none. See `replay`."""
    return replay(read_journal(path), policy, str(path))


def replay(lines: Iterable[Any], policy: str | None = None, name: str = "journal") -> JournalResult:
    """Carries a journal's inputs out and compares what is decided, up to the first difference.

    With `policy` the replay starts with another policy than the daemon did: a what-if that
    diverges as soon as the two decide differently.
    """
    lines = iter(lines)
    head = next(lines, None)
    if not isinstance(head, dict) or head.get("journal") != inputs.FORMAT:
        raise JournalError(
            f"{name} is no journal of this version; make one with `kvstore serve --journal`"
        )
    player, input_count, actions, is_whole = Player(head, policy), 0, dict[str, int](), False

    def result(difference: Difference | None) -> JournalResult:
        return JournalResult(input_count, actions, difference, is_whole)

    number = 1
    for number, line in enumerate(lines, start=2):
        word = line[0] if isinstance(line, list) and line else ""
        if word == inputs.ACTION:
            done = player.actions.popleft() if player.actions else ""
            if done != line[1]:
                return result(Difference(number, line[1], done))
            verb = done.partition(" ")[0]
            actions[verb] = actions.get(verb, 0) + 1
            continue
        if player.actions:
            return result(Difference(number, "", player.actions[0]))
        if word == inputs.END:
            is_whole = True
            left, there = f"end with blocks, runs {line[1:]}", f"end with blocks, runs {player.end}"
            return result(None if left == there else Difference(number, left, there))
        try:
            input_count += player.play(line)
        except (AssertionError, LookupError, TypeError, ValueError, AttributeError) as error:
            fault = f"{type(error).__name__} {error}".strip()
            return result(Difference(number, f"an input {word!r}", f"it is impossible: {fault}"))
    # What the last input led to may have been cut off.
    return result(None)


class Player:
    """Carries inputs out on an index and a residency of its own; `actions` are what came of it."""

    def __init__(self, head: dict[str, Any], policy: str | None = None) -> None:
        self.residency = Residency(policy or head["policy"])
        self.index = PrefixIndex(head["tiers"], self.residency, head["max_blocks"])
        self.residency.attach(self.index)
        self.actions: deque[str] = deque()
        self.residency.on_action = lambda action: self.actions.append(action_line(action))
        self._spaces: dict[int, Space] = {}
        self._runs: dict[int, Run] = {}
        self._anchors: dict[int, Anchor] = {}
        self._runs_named = self._anchors_named = 0
        self._uses: dict[int, Use] = {}
        self._generators: dict[int, Any] = {}
        self._grafted: list[Run] = []
        self._grafted_roots: dict[tuple[int, str], Root] = {}

    @property
    def end(self) -> list[int]:
        return [self.index.block_count, self.index.run_count]

    def play(self, line: list[Any]) -> int:
        """Carries one line out; answers with 1 if it is a call, 0 if it gives something a name."""
        word, words = line[0], line[1:]
        if word == inputs.INDEX:
            self._call_index(*words)
        elif word == inputs.RESIDENCY:
            self._call_residency(*words)
        elif word in (inputs.OPEN, inputs.NEXT, inputs.CLOSE):
            self._generate(word, *words)
        elif word == inputs.ADOPT:
            self.index.adopt(self._value(words[0]), self._grafted)
            self._grafted, self._grafted_roots = [], {}
        else:
            self._name(word, *words)
            return 0
        return 1

    # ---- Calls ----

    def _call_index(self, name: str, *words: Any) -> None:
        if name not in inputs.INDEX_INPUTS:
            raise ValueError(f"no call {name!r}")
        values, named = self._values(words)
        if name == "stage":
            walk: Walk = values[0]
            self._anchored(self.index.stage(walk, walk.chain, *values[1:]).anchor)
        elif name == "anchor":
            self._anchored(self.index.anchor(*values))
        else:
            getattr(self.index, name)(*values, **named)
            if name == "unanchor":
                self._anchors.pop(words[0][1], None)

    def _anchored(self, anchor: Anchor | None) -> None:
        if anchor is not None:
            self._anchors_named += 1
            self._anchors[self._anchors_named] = anchor

    def _call_residency(self, name: str, *words: Any) -> None:
        if name not in inputs.RESIDENCY_INPUTS:
            raise ValueError(f"no call {name!r}")
        values, named = self._values(words)
        if name == "access":
            values = [[values[0]]]
        try:
            answer = getattr(self.residency, name)(*values, **named)
        except KVStoreError:
            return  # It was refused in the daemon, too.
        if name == "request":
            self._uses[answer.number] = answer

    def _generate(self, word: str, number: int, name: str = "", *words: Any) -> None:
        if word == inputs.OPEN:
            if name not in inputs.RESIDENCY_GENERATORS:
                raise ValueError(f"no call {name!r}")
            values, named = self._values(words)
            self._generators[number] = getattr(self.residency, name)(*values, **named)
        elif word == inputs.NEXT:
            next(self._generators[number], None)
        else:
            self._generators.pop(number).close()

    # ---- Names ----

    def _name(self, word: str, *words: Any) -> None:
        if word == inputs.SPACE:
            number, spec, tenant, pool = words
            self._spaces[number] = Space(number, msgspec.convert(spec, KVSpec), tenant, pool)
        elif word == inputs.RUN:
            self._named(self._child(*words))
        elif word == inputs.DEAD_RUN:
            root = self._root(self._spaces[words[0][1]], bytes(32))
            dead = Run(root, root.head, 0, b"", 0)
            dead.ready = -1
            self._named(dead)
        elif word == inputs.GRAFT:
            self._graft(*words)
        elif word == inputs.FORGET:
            for number in words[0]:
                del self._runs[number]
        else:
            raise ValueError(f"no word {word!r}")

    def _named(self, run: Run) -> None:
        self._runs_named += 1
        self._runs[self._runs_named] = run

    def _child(self, above: Any, symbol: list[Any]) -> Run:
        """The run below another one, or a root, that begins with a symbol."""
        parent = self._parent(above)
        raw = _symbols(*symbol)
        assert parent.children is not None, "a run has nothing below it"
        child = find_child(parent.children, len(raw), raw)
        assert child is not None, "there is no such run"
        return child

    def _parent(self, above: Any) -> Run:
        if isinstance(above, int):
            return self._runs[above]
        root: Root = self._value(above)
        return root.head

    def _graft(self, above: Any, symbols: list[Any], there: str) -> None:
        """A run that was found at the start; its places are as good as any others."""
        parent, raw = self._grafted_parent(above), _symbols(*symbols)
        width = inputs.SYMBOL_BYTES + symbols[0]
        run = Run(parent.root, parent, parent.first + parent.count, raw, width)
        tiers, shards = self.index.tier_count, parent.root.space.shard_count
        cells = run.count * tiers * shards
        bits = np.unpackbits(np.frombuffer(base64.b64decode(there), np.uint8), count=cells)
        run.places = np.where(bits, 0, -1).astype(np.int64).tobytes()
        run.ready, run.resident = run.count, count_resident(run.places, tiers, shards)
        self._grafted.append(run)
        self._named(run)

    def _grafted_parent(self, above: Any) -> Run:
        """The index knows a root only once something lies below it."""
        if isinstance(above, int):
            return self._runs[above]
        key = (above[1], above[2])
        if key not in self._grafted_roots:
            self._grafted_roots[key] = self._value(above)
        return self._grafted_roots[key].head

    # ---- Values ----

    def _values(self, words: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Values by position, and those by name."""
        values, named = [], {}
        for word in words:
            if isinstance(word, list) and word[0] == inputs.NAMED:
                named[word[1]] = self._value(word[2])
            else:
                values.append(self._value(word))
        return values, named

    def _value(self, word: Any) -> Any:
        if not isinstance(word, list):
            return word
        tag, *rest = word
        if tag == inputs.THE_RUN:
            return self._runs[rest[0]]
        if tag == inputs.THE_ANCHOR:
            return self._anchors[rest[0]]
        if tag == inputs.THE_USE:
            return self._uses[rest[0]]
        if tag == inputs.THE_SPACE:
            return self._spaces[rest[0]]
        if tag == inputs.THE_ROOT:
            return self._root(self._spaces[rest[0]], base64.b64decode(rest[1]))
        if tag == inputs.WALK:
            return self._walk(*rest)
        if tag == inputs.SPAN:
            return Span(self._runs[rest[0]], *rest[1:])
        return _plain(tag, rest, self._value)

    def _root(self, space: Space, digest: bytes) -> Root:
        return self.index.root(space, digest)

    def _walk(self, root: list[Any], *segments: list[Any]) -> Walk:
        parts = [Segment(_symbols(*part), inputs.SYMBOL_BYTES + part[0]) for part in segments]
        return self.index.walk(self._value(root), Chain(tuple(parts)))


def _plain(tag: str, rest: list[Any], value: Any) -> Any:
    """Values that stand for themselves. Places are not kept: the first will do as well."""
    if tag == inputs.BYTES:
        return base64.b64decode(rest[0])
    if tag == inputs.PLACES:
        return [0] * rest[0]
    if tag == inputs.GRID:
        return np.zeros(rest, np.int64)
    if tag == inputs.FLOAT:
        return float(rest[0])
    if tag == inputs.TUPLE:
        values = [value(each) for each in rest[1:]]
        return inputs.TUPLES[rest[0]](*values) if rest[0] else tuple(values)
    raise ValueError(f"no value {tag!r}")


def _symbols(width: int, digests: str) -> bytes:
    return inputs.symbols_again(base64.b64decode(digests), width)
