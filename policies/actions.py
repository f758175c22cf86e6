"""What residency decides, and what it was told: the log that a replay is compared by."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvstore.policies.index import Run


class Event(NamedTuple):
    """Something residency was told, with what a replay needs to tell it again."""

    name: str
    values: tuple[Any, ...]


class Admit(NamedTuple):
    """Blocks [start, stop) of `run` are READY, in `tier` at first."""

    run: Run
    start: int
    stop: int
    tier: int


class Promote(NamedTuple):
    """Copy blocks [start, stop) of `run` to a faster tier."""

    run: Run
    start: int
    stop: int
    source: int
    target: int


class Demote(NamedTuple):
    """Copy blocks [start, stop) of `run` to a slower tier; a later Drop frees the source."""

    run: Run
    start: int
    stop: int
    source: int
    target: int


class Drop(NamedTuple):
    """Free the copies in `tier` of the blocks of `run` from `keep` on; `reason` says for what."""

    run: Run
    keep: int
    tier: int
    reason: str


Action = Admit | Promote | Demote | Drop


def action_line(action: Action) -> str:
    """One line that is the same for the same action in a live run and in its replay.

    Made when the action is, before it is carried out: what it speaks of moves on after.
    """
    run = action.run
    start = action.keep if isinstance(action, Drop) else action.start
    stop = run.ready if isinstance(action, Drop) else action.stop
    where = f"{run.root.space.number}:{run.root.digest[:4].hex()}"
    blocks = f"[{run.first + start}, {run.first + stop})"
    verb = type(action).__name__.lower()
    if isinstance(action, Admit):
        rest = f"tier {action.tier}"
    elif isinstance(action, Drop):
        rest = f"tier {action.tier} for {action.reason}"
    else:
        rest = f"tier {action.source} to {action.target}"
    return f"{verb} {where} {blocks} {rest}"
