"""The prefix index: which blocks there are, under which prefix, and where they lie."""

from kvstore.policies.index.graft import Grafted, GraftedRun
from kvstore.policies.index.listener import IndexListener, SilentListener
from kvstore.policies.index.prefix_index import PrefixIndex
from kvstore.policies.index.run import (
    COMMITTED,
    MAX_RUN_BLOCKS,
    NONE,
    RESERVED,
    Anchor,
    Removed,
    Root,
    Run,
    Span,
    children_of,
)
from kvstore.policies.index.staging import StageAnswer, Staged
from kvstore.policies.index.walk import Walk

__all__ = [
    "COMMITTED",
    "MAX_RUN_BLOCKS",
    "NONE",
    "RESERVED",
    "Anchor",
    "Grafted",
    "GraftedRun",
    "IndexListener",
    "PrefixIndex",
    "Removed",
    "Root",
    "Run",
    "SilentListener",
    "Span",
    "StageAnswer",
    "Staged",
    "Walk",
    "children_of",
]
