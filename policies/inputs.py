"""Inputs: the calls by which a store changes index and residency, as values that can be kept.

What these objects decide follows from their inputs alone, so whoever repeats them in their order,
on new objects, gets the same actions. `kvstore.store.journal` writes inputs down,
`kvstore.replay.journal` repeats them. Both know runs by numbers that they give out in one order.

An input is a list of a word and values. Values are JSON's, or lists that begin with a tag.
"""

from __future__ import annotations

from typing import Any

from kvstore.policies.uses import Hint, Request

FORMAT = 1

# Calls of PrefixIndex that change it, but for `graft_columns`, whose outcome is kept. Not among
# them are those that only simulations use.
INDEX_INPUTS = frozenset({
    "stage", "commit", "commit_span", "unstage", "publish", "anchor", "unanchor", "reanchor",
    "drop", "remove", "remove_root", "remove_space", "split", "begin_move", "end_move",
    "give_up_move", "set_place", "set_places", "clear_place", "clear_places",
})  # fmt: skip

RESIDENCY_INPUTS = frozenset({
    "request", "serve", "extend", "finish", "access", "set_cost", "set_rates", "set_restore",
    "set_prices", "set_quota", "set_policy", "enter_runs", "demote_above", "copy_lost",
})  # fmt: skip

# These answer with a generator that the store asks for one action after the other, and changes
# the index in between.
RESIDENCY_GENERATORS = frozenset({"make_room", "demotions"})

# Words that an input begins with, besides those of calls.
INDEX, RESIDENCY = "index", "residency"
SPACE, RUN, DEAD_RUN, FORGET = "space", "run", "dead", "forget"
GRAFT, ADOPT = "graft", "adopt"
OPEN, NEXT, CLOSE = "open", "next", "close"
# What came of inputs, to be compared.
ACTION, END = "action", "end"

# Tags of values.
THE_SPACE, THE_RUN, THE_ROOT, THE_ANCHOR, THE_USE = "s", "r", "o", "a", "u"
BYTES, PLACES, GRID, SPAN, WALK, TUPLE, NAMED, FLOAT = "b", "p", "g", "n", "w", "t", "k", "f"

# Named tuples that may be a value.
TUPLES: dict[str, Any] = {"Request": Request, "Hint": Hint}

# A symbol is kept as a digest of so many bytes and a number that stands for its width: what the
# index does depends on which symbols are equal, and which are equally wide.
SYMBOL_BYTES = 16


def symbols_again(digests: bytes, width: int) -> bytes:
    """Symbols that are equal where the ones behind `digests` are; `width` is the width's number."""
    if not width:
        return digests
    fill = bytes(width)
    parts = (digests[i : i + SYMBOL_BYTES] + fill for i in range(0, len(digests), SYMBOL_BYTES))
    return b"".join(parts)
