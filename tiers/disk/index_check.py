"""Reads an index in a process of its own: a damaged one may end that process by a signal.

    python -m kvstore.tiers.disk.index_check DIRECTORY MAP_BYTES STORE_ID

Exit status 0 says that every structure and every entry of it is sound.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lmdb.verify

from kvstore.tiers.disk.directory import INDEX
from kvstore.tiers.disk.index import DiskIndex
from kvstore.tiers.disk.io import FileIO
from kvstore.tiers.disk.loading import read


def main(arguments: list[str]) -> int:
    path, map_bytes, store_id = Path(arguments[0]), int(arguments[1]), bytes.fromhex(arguments[2])
    try:
        if lmdb.verify.verify(str(path / INDEX)):  # type: ignore[no-untyped-call]
            return 1
    except lmdb.verify.VerifyError:
        return 1
    index = DiskIndex(path / INDEX, map_bytes, store_id, FileIO())
    loaded = read(index)
    index.close()
    return 0 if loaded is not None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
