"""Why a disk tier takes no blocks at present, if so: set by whatever failed, cleared by a probe."""

from __future__ import annotations

import errno

from kvstore.core.errors import TierError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Health:
    """One sentence or none; `read_only` stays until the next start."""

    def __init__(self, name: str, path: str) -> None:
        self._name, self._path = name, path
        self.problem = ""
        self.read_only = False

    def failed(self, doing: str, error: BaseException) -> TierError:
        """Notes that something failed; the error to raise for it."""
        if isinstance(error, OSError):
            fix = "free some space" if error.errno in NO_SPACE else "check the disk"
            text = f"tier {self._name} failed to {doing} in {self._path} ({error.strerror}); {fix}"
        else:
            text = f"tier {self._name} failed to {doing}: {error}"
        if not self.read_only:
            self.problem = text
        return TierError(text)

    def give_up(self, reason: str) -> None:
        """Reads only from now on."""
        self.read_only = True
        self.problem = f"tier {self._name} is read-only: {reason}; restart the daemon"
