"""Opens the directory of a disk tier in a process of its own, and reads every block of it.

    python read_disk.py DIRECTORY CAPACITY LENGTH

The last line of standard output is a JSON object: numbers of the blocks that are right, how many
are not readable, and the notes of the start. A wrong byte is an assertion that fails.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from disk_world import is_right, put, recovered

from kvstore.tiers.disk import DiskTier


def main(path: Path, capacity: int, length: int) -> None:
    tier = DiskTier(path, capacity)
    found = recovered(tier)
    right = [i for i, place in found.items() if is_right(tier, place, i, length)]
    tier.check_integrity()
    # What was opened has to take blocks, too.
    more = put(tier, [70_001, 70_002], length)
    assert all(is_right(tier, place, i, length) for i, place in more.items())
    notes = tier.notes
    tier.close()
    print(json.dumps({"right": sorted(right), "bad": len(found) - len(right), "notes": notes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
