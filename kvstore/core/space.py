"""`Space`: one KVSpec of one tenant, as the owner thread keeps it."""

from __future__ import annotations

from kvstore.core.block import slot_bytes
from kvstore.core.keys import EXTRA_DIGEST_BYTES
from kvstore.core.spec import KVSpec, space_id


class Space:
    """A space's identity and what changes about it: its epoch.

    `block_bytes` is the payload of one shard's block, `slot_bytes` what it takes in a tier.
    Commits and records carry the epoch they belong to; an older one never counts. While it is
    `closing` (a clear is under way) nothing of it is found and nothing is taken in. Until it is
    `recorded`, that is written down, no block of it goes to disk: nobody would know it again.
    `clear_count` tells answers of before a clear or a new epoch from those after it.
    """

    __slots__ = (
        "block_bytes", "clear_count", "closing", "epoch", "id", "number", "pool", "recorded",
        "shard_count", "slot_bytes", "spec", "tenant",
    )  # fmt: skip

    def __init__(self, number: int, spec: KVSpec, tenant: str, pool: str = "", epoch: int = 0):
        self.id = space_id(spec, tenant)
        self.number = number
        self.spec = spec
        self.tenant = tenant
        self.pool = pool
        self.epoch = epoch
        self.closing = False
        self.clear_count = 0
        self.recorded = True
        self.shard_count = spec.shard_count
        self.block_bytes = spec.block_bytes
        self.slot_bytes = slot_bytes(spec.block_bytes)

    def close(self) -> None:
        """From now on nothing of it is found, until it is open again and empty."""
        self.closing = True
        self.clear_count += 1

    @property
    def symbol_bytes_max(self) -> int:
        """The widest symbol a block of this space can have: tokens with a digest, or a hash."""
        return self.spec.symbol_bytes + EXTRA_DIGEST_BYTES

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.spec.block_size

    def __repr__(self) -> str:
        return f"Space({self.number}, {self.spec.model!r}, tenant={self.tenant!r})"
