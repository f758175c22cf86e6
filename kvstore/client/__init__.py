"""What an inference engine imports: `KVClient`, and the words of its calls."""

from kvstore.client.address import TLSConfig
from kvstore.client.client import KVClient
from kvstore.client.match import Match
from kvstore.client.put import PutHandle, PutResult
from kvstore.client.space import Space
from kvstore.client.watching import BlockEvent
from kvstore.core.errors import (
    InvalidRequest,
    KVStoreError,
    LeaseLost,
    LimitReached,
    NotFound,
    PermissionDenied,
    SpecMismatch,
    StoreUnavailable,
)
from kvstore.core.plan import PlanStep, RestorePlan, ReuseHints
from kvstore.core.spec import KVSpec

__all__ = [
    "BlockEvent",
    "InvalidRequest",
    "KVClient",
    "KVSpec",
    "KVStoreError",
    "LeaseLost",
    "LimitReached",
    "Match",
    "NotFound",
    "PermissionDenied",
    "PlanStep",
    "PutHandle",
    "PutResult",
    "RestorePlan",
    "ReuseHints",
    "Space",
    "SpecMismatch",
    "StoreUnavailable",
    "TLSConfig",
]
