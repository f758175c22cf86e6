"""`kvstore bench restore`: from the host tier to the caller's memory, against a plain copy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from kvstore.bench.copies import COPIES, copy_actions, fastest, prefaulted
from kvstore.bench.empty_rpc import EmptyRpc
from kvstore.bench.measure import alternate, document, medians, timed
from kvstore.bench.subject import MIB, Subject
from kvstore.replay.own_daemon import OwnDaemon, fitting_pool_bytes

BLOCKS, LARGE_BLOCKS = 32, 256
ROUNDS, LARGE_ROUNDS, VIEW_ROUNDS = 40, 10, 300
# Three prompts of 32 blocks and the large one, with two fillers between their blocks on average.
POOL_BYTES, POOL_BYTES_MIN, POOL_BLOCKS_A_BLOCK = 1536 * MIB, 512 * MIB, 5


def run(quick: bool = False) -> dict[str, Any]:
    """Lookup, restore of 1 MiB blocks and release, in turns with a copy of the same bytes."""
    pool = fitting_pool_bytes(POOL_BYTES, least=POOL_BYTES_MIN)
    large = BLOCKS if quick else min(LARGE_BLOCKS, pool // MIB // POOL_BLOCKS_A_BLOCK)
    with OwnDaemon(pool) as daemon:
        daemon.wait_prefaulted()
        subject = Subject(daemon.target, MIB)
        try:
            with EmptyRpc(daemon.directory) as empty:
                views = _measure_views(subject, empty, VIEW_ROUNDS // (10 if quick else 1))
            small = _measure_copies(subject, BLOCKS, ROUNDS // (10 if quick else 1))
            row = _measure_copies(subject, BLOCKS, ROUNDS // (10 if quick else 1), scatter=False)
            big = _measure_copies(subject, large, LARGE_ROUNDS // (5 if quick else 1))
        finally:
            subject.close()
    return _document(small, row, big, views, large)


def _measure_copies(
    subject: Subject, blocks: int, rounds: int, scatter: bool = True
) -> dict[str, Any]:
    """Blocks scattered one by one over the pool are the hardest case; in a row, the usual one."""
    tokens = subject.prompt(blocks)
    if scatter:
        subject.put_scattered(tokens, random.Random(blocks))
    else:
        subject.put(tokens, subject.payloads(tokens, prefaulted((blocks, MIB))))
    space, target = subject.space, prefaulted((blocks, MIB))
    with space.lookup(tokens) as held:
        source = [np.frombuffer(view, dtype=np.uint8) for view in space.restore(held)]
        copies = copy_actions(source, list(target))

        def restore() -> None:
            match = space.lookup(tokens)
            space.restore_into(match, target)
            match.release()

        actions = {name: timed(copy) for name, copy in copies.items()}
        samples = alternate({**actions, "restore": timed(restore)}, rounds)
        target[:] = 0
        restore()
        wrong = subject.wrong_bytes(tokens, target)
        del source, copies, actions
    return {"samples": samples, "wrong_bytes": wrong}


def _measure_views(subject: Subject, empty: EmptyRpc, rounds: int) -> dict[str, Any]:
    tokens = subject.prompt(BLOCKS)
    subject.put_scattered(tokens, random.Random(BLOCKS))
    space = subject.space

    def views() -> None:
        with space.lookup(tokens) as match:
            space.restore(match)
            match.check()

    def settled_views() -> float:
        seconds = timed(views)()
        subject.settle()
        return seconds

    actions = {"empty_rpc": timed(empty.call), "views": settled_views}
    samples = alternate(actions, rounds, warmup=20)
    return {"samples": samples, "wrong_bytes": subject.stored_wrong_bytes(tokens)}


def _document(
    small: dict[str, Any],
    row: dict[str, Any],
    big: dict[str, Any],
    views: dict[str, Any],
    large: int,
) -> dict[str, Any]:
    small_medians, big_medians = medians(small["samples"]), medians(big["samples"])
    view_medians, row_medians = medians(views["samples"]), medians(row["samples"])
    name, copy_seconds = fastest(small_medians, COPIES)
    _, big_copy_seconds = fastest(big_medians, COPIES)
    figures = {
        "ratio_to_memcpy": copy_seconds / small_medians["restore"],
        "ratio_to_memcpy_256mib": big_copy_seconds / big_medians["restore"],
        "ratio_to_empty_rpc": view_medians["views"] / view_medians["empty_rpc"],
        "ratio_to_memcpy_in_a_row": fastest(row_medians, COPIES)[1] / row_medians["restore"],
    }
    samples = {
        **small["samples"],
        **{f"{name}_in_a_row": values for name, values in row["samples"].items()},
        **{f"{name}_large": values for name, values in big["samples"].items()},
        **views["samples"],
    }
    return document(
        figures,
        samples,
        restore_bytes_per_second=BLOCKS * MIB / small_medians["restore"],
        restore_bytes_per_second_large=large * MIB / big_medians["restore"],
        memcpy_bytes_per_second=BLOCKS * MIB / copy_seconds,
        fastest_memcpy=name,
        block_bytes=MIB,
        block_counts=[BLOCKS, large],
        wrong_bytes=sum(part["wrong_bytes"] for part in (small, row, big, views)),
    )
