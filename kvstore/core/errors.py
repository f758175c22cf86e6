"""Every error that leaves a part of kvstore, with the gRPC status it becomes.

KVStoreError
├── InvalidRequest         INVALID_ARGUMENT     names the field
│   └── SpecError          INVALID_ARGUMENT     a KVSpec field is wrong
├── FailedPrecondition     FAILED_PRECONDITION  the call does not fit what is set up
│   └── SpecMismatch       FAILED_PRECONDITION  bytes of another layout, size or epoch
├── NotFound               NOT_FOUND            unknown session, space or reservation
│   └── LeaseLost          NOT_FOUND            the lease ended; the bytes may be others now
├── Unauthenticated        UNAUTHENTICATED      no session token, or a wrong one
├── PermissionDenied       PERMISSION_DENIED    the role does not allow the call
├── LimitReached           RESOURCE_EXHAUSTED   a configured limit, which it names
├── Draining               UNAVAILABLE          the daemon is leaving
├── NotImplementedYet      UNIMPLEMENTED        a part this version does not have
├── StoreUnavailable       (client only)        daemon gone, frozen, or the circuit open
├── ConfigError            (exit 2)             a configuration key is wrong
├── AlreadyRunning         (exit 2)             another daemon holds the directory or socket
└── TierError              (inside)             a tier could not do it; the tier degrades
    ├── CorruptBlock       (a miss)             bytes do not match their checksum
    └── TierFull           (a partial grant)    no slot to be had now
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of all errors of kvstore; the text is one sentence naming the thing and the fix."""

    code = "INTERNAL"


class InvalidRequest(KVStoreError, ValueError):
    code = "INVALID_ARGUMENT"


class SpecError(InvalidRequest):
    pass


class FailedPrecondition(KVStoreError):
    code = "FAILED_PRECONDITION"


class SpecMismatch(FailedPrecondition):
    pass


class NotFound(KVStoreError):
    code = "NOT_FOUND"


class LeaseLost(NotFound):
    pass


class Unauthenticated(KVStoreError):
    code = "UNAUTHENTICATED"


class PermissionDenied(KVStoreError):
    code = "PERMISSION_DENIED"


class LimitReached(KVStoreError):
    code = "RESOURCE_EXHAUSTED"


class Draining(KVStoreError):
    code = "UNAVAILABLE"


class NotImplementedYet(KVStoreError):
    code = "UNIMPLEMENTED"


class StoreUnavailable(KVStoreError):
    code = "UNAVAILABLE"


class ConfigError(KVStoreError):
    pass


class AlreadyRunning(KVStoreError):
    pass


class TierError(KVStoreError):
    pass


class CorruptBlock(TierError):
    pass


class TierFull(TierError):
    pass
