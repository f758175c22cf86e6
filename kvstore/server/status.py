"""Errors as they go over the wire: a gRPC status name and one sentence, never a traceback."""

from __future__ import annotations

import logging
from itertools import count

from kvstore.core.errors import KVStoreError

_log = logging.getLogger("kvstore.server")
_incidents = count(1)


def status_of(error: BaseException, method: str) -> tuple[str, str]:
    """(status name, sentence) of what went wrong in `method`.

    What is not meant for a caller is logged under a number, and the caller gets the number.
    """
    if isinstance(error, KVStoreError) and error.code != "INTERNAL":
        return error.code, str(error)
    incident = next(_incidents)
    _log.error("%s failed (incident %d)", method, incident, exc_info=error)
    return "INTERNAL", f"{method} failed inside the daemon; see incident {incident} in its log"
