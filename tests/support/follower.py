"""`Follower`: what a router makes of the event log: which blocks are readable, and nothing else."""

from __future__ import annotations

from typing import Any

from kvstore.events import EventLog, KVEvent


class Follower:
    """The READY keys of each (space, medium), from events alone."""

    def __init__(self, log: EventLog, tenant: str | None = None, start: int = 1) -> None:
        self.keys: dict[tuple[bytes, str], set[bytes]] = {}
        self.parents: dict[bytes, bytes] = {}
        self.last = start - 1
        log.subscribe(tenant, start, self.hear)

    def hear(self, event: KVEvent) -> None:
        assert event.sequence > self.last
        self.last = event.sequence
        known = self.keys.setdefault((event.space_id, event.medium), set())
        keys = [event.keys[i : i + 16] for i in range(0, len(event.keys), 16)]
        assert len(set(keys)) == len(keys)
        if event.kind == "stored":
            assert not known & set(keys), "a block was stored twice"
            assert len(event.symbols) == len(keys) * 4 * event.block_size
            for parent, key in zip([event.parent_key, *keys], keys, strict=False):
                self.parents[key] = parent
            known.update(keys)
        elif event.kind == "removed":
            assert known >= set(keys), "a block was removed that was not there"
            known.difference_update(keys)
        else:
            known.clear()

    def of(self, engine: Any) -> set[bytes]:
        return self.keys.get((engine.space.id, "host"), set())

    def readable(self) -> dict[tuple[bytes, str], set[bytes]]:
        return {where: keys for where, keys in self.keys.items() if keys}


def ready_keys(parts: Any) -> dict[tuple[bytes, str], set[bytes]]:
    """What is READY in truth, by space and medium, from the headers in the tiers."""
    found: dict[tuple[bytes, str], set[bytes]] = {}
    for run in parts.index.runs():
        for number, tier in enumerate(parts.tiers):
            for place in parts.index.places([(run, 0, run.ready)], number, 0).tolist():
                if place >= 0:
                    where = (run.root.space.id, parts.tier_names[number])
                    found.setdefault(where, set()).add(tier.header(place).key)
    return found
