"""vLLM's KV caches on a GPU as bytes: pieces, the stage, layouts; on a driver without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import fake_driver
from vllm_desk import BLOCKS, LAYERS
from vllm_gpu_desk import KINDS, PAGE, FakeGround, block_bytes

from kvstore.client.gpu import Device
from kvstore.client.gpu.memory import block_copies
from kvstore.core.errors import InvalidRequest, SpecError
from kvstore.engines.vllm.device_pages import DeviceGroups, DevicePages, OpaqueMemory, order_of
from kvstore.engines.vllm.engine import _check_scales
from kvstore.engines.vllm.pages import Groups, Pages

SLOTS = 4


@pytest.fixture
def ground() -> Iterator[FakeGround]:
    made = FakeGround(Device(driver=fake_driver()))
    yield made
    made.close()


def groups_of(ground: FakeGround, kind: str, count: int, each: int) -> tuple[Any, DeviceGroups]:
    """Caches full of numbers, and their pages."""
    caches = [ground.caches(kind, LAYERS * n) for n in range(count)]
    for n, cache in enumerate(c for group in caches for c in group.values()):
        values = torch.randint(-9999, 9999, tuple(cache.shape), dtype=torch.int16)
        cache.view(torch.int16).copy_(values.add_(n))
    return caches, DeviceGroups([DevicePages(group, BLOCKS) for group in caches], each)


def right(caches: Any, row: np.ndarray, each: int) -> np.ndarray:
    """A store block's bytes, each element found by its own address."""
    parts = [
        block_bytes(cache, block)
        for n, group in enumerate(caches)
        for block in row[n * each : (n + 1) * each].tolist()
        for cache in group.values()
    ]
    return np.concatenate(parts)


def by_pieces(memory: OpaqueMemory, rows: np.ndarray, blocks: np.ndarray, out: bool) -> None:
    """Copies between pages and blocks [n, bytes] by the pieces that the memory names."""
    begins = np.array([row.ctypes.data for row in blocks], np.uint64)
    copies = block_copies(memory.parts(rows, range(1)), begins, to_blocks=out)
    for target, source, length in zip(*(c.tolist() for c in copies), strict=True):
        ctypes.memmove(target, source, length)


def by_stage(
    ground: FakeGround, memory: OpaqueMemory, stage: Any, rows: np.ndarray, blocks: np.ndarray,
    out: bool,
) -> None:  # fmt: skip
    slots = np.array([2, 0, 3][: len(rows)], np.int32)
    stream = ground.device.stream()
    if out:
        memory.gather(rows, slots, stream)
        blocks[:] = stage[slots, : blocks.shape[1]]
        return
    stage[slots, : blocks.shape[1]] = torch.from_numpy(blocks)
    memory.scatter(slots, rows, range(1), stream)


@pytest.mark.parametrize("way", ["pieces", "stage"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_s_bytes_are_those_of_its_memory(
    ground: FakeGround, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the layout and the way, a block is its bytes in memory order, and comes back so."""
    monkeypatch.setattr("kvstore.engines.vllm.device_pages.CHUNK_BYTES", 4 * PAGE * LAYERS)
    each = 2
    caches, groups = groups_of(ground, kind, 2, each)
    stage = ground.memory(SLOTS, -(-groups.block_bytes // 128) * 128)
    memory = OpaqueMemory(groups, stage)
    ids = [[[3, 9], [4, 8], [11, 10]], [[21, 20], [5, 30], [31, 1]]]
    rows = groups.rows([np.ravel(group).tolist() for group in ids], 3)

    def copy(rows: np.ndarray, blocks: np.ndarray, out: bool) -> None:
        if way == "pieces":
            by_pieces(memory, rows, blocks, out)
        else:
            by_stage(ground, memory, stage, rows, blocks, out)

    wanted = np.array([right(caches, row, each) for row in rows])
    found = np.zeros((3, groups.block_bytes), np.uint8)
    copy(rows, found, True)
    assert np.array_equal(found, wanted)
    others = np.array([[12, 13, 14, 15], [16, 17, 0, 18], [0, 0, 0, 19]], np.int32)
    touched = {0: {12, 13, 16, 17}, 1: {14, 15, 18, 19}}
    every = [(layer, block) for layer in range(LAYERS) for block in range(BLOCKS)]
    layers = [list(group.values()) for group in caches]
    before = [{at: block_bytes(group[at[0]], at[1]) for at in every} for group in layers]
    copy(others, found, False)
    width = groups.block_bytes // 4
    for row, source in zip(others.tolist(), found, strict=True):
        for place, block in enumerate(row):
            if block:
                part = source[place * width : (place + 1) * width]
                own = np.concatenate([block_bytes(c, block) for c in layers[place // 2]])
                assert np.array_equal(own, part)
    for n, group in enumerate(layers):
        for (layer, block), data in before[n].items():
            if block not in touched[n]:
                assert np.array_equal(block_bytes(group[layer], block), data), (n, layer, block)


@pytest.mark.parametrize("way", ["pieces", "stage"])
def test_layers_of_different_sizes_are_one_block(ground: FakeGround, way: str) -> None:
    """Pages of other lengths, and such as no wide word fits, keep every byte."""
    sizes = (24, 10, 7, 16)
    caches = {f"layers.{n}.attn": ground.memory(BLOCKS, size) for n, size in enumerate(sizes)}
    for cache in caches.values():
        cache.copy_(torch.randint(0, 256, tuple(cache.shape), dtype=torch.uint8))
    groups = DeviceGroups([DevicePages(caches, BLOCKS)], 2)
    stage = ground.memory(SLOTS, 128)
    memory, rows = OpaqueMemory(groups, stage), groups.rows([[3, 4, 9, 30]], 2)
    found = np.zeros((2, 2 * sum(sizes)), np.uint8)
    copy: Any = by_pieces if way == "pieces" else partial(by_stage, ground)
    given = (memory, rows, found) if way == "pieces" else (memory, stage, rows, found)
    copy(*given, True)
    for row, data in zip(rows.tolist(), found, strict=True):
        wanted = [cache[block].numpy() for block in row for cache in caches.values()]
        assert np.array_equal(data, np.concatenate(wanted))
    before = found.copy()
    for cache in caches.values():
        cache[[3, 4, 9, 30]] = 0
    copy(*given, False)
    found[:] = 0
    copy(*given, True)
    assert np.array_equal(found, before)


def test_a_dense_cache_has_the_bytes_that_processors_would_store(ground: FakeGround) -> None:
    """Where a block is dense and in its axes' own order, both ways store the same bytes."""
    caches, groups = groups_of(ground, "packed", 1, 2)
    host = Groups([Pages(caches[0], BLOCKS)], 2)
    kept, found = np.empty(host.block_bytes, np.uint8), np.empty((1, host.block_bytes), np.uint8)
    assert host.read([[7, 5]], kept)
    by_pieces(OpaqueMemory(groups), groups.rows([[7, 5]], 1), found, True)
    assert np.array_equal(found[0], kept)


def test_pieces_are_as_long_as_the_layout_allows(ground: FakeGround) -> None:
    """Layers that lie side by side are one piece; K and V apart are two, heads one each."""
    lengths = {
        "packed": [PAGE] * 3, "nhd": [PAGE] * 3, "split": [PAGE] * 3, "padded": [PAGE] * 3,
        "kv-first": [PAGE // 2] * 6, "heads-outer": [PAGE // 2] * 6, "cross-layer": [3 * PAGE],
        "cross-nhd": [3 * PAGE], "cross-heads": [PAGE // 2] * 6,
    }  # fmt: skip
    for kind, wanted in lengths.items():
        pages = DevicePages(ground.caches(kind), BLOCKS)
        assert [piece.length for piece in pages.pieces] == wanted, kind
        assert (pages.layers, pages.block_bytes) == ((0, 1, 2), LAYERS * PAGE)
    shared = ground.caches("packed")
    shared["layers.7.attn"] = shared["layers.0.attn"]
    assert DevicePages(shared, BLOCKS).block_bytes == LAYERS * PAGE


def test_layouts_are_told_apart() -> None:
    """Two orders of the same axes have two names, so neither reads what the other stored."""
    names = set()
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (0, 3, 1, 2)):
        cache = torch.empty([(BLOCKS, 2, 4, 16)[axis] for axis in order])
        names.add(order_of(cache.permute(tuple(np.argsort(order).tolist())), BLOCKS))
    names |= {order_of(torch.empty(2, BLOCKS, 4, 16), BLOCKS)}
    names |= {order_of(torch.empty(2 * BLOCKS, 2, 2, 16), BLOCKS)}
    assert names == {"2x4x16:012", "2x4x16:102", "2x4x16:201", "2x2x16:012"}


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (torch.zeros(5, BLOCKS, 8), "needs 32 blocks in its first axis"),
        (torch.zeros(BLOCKS + 1, 8), "needs 32 blocks in its first axis"),
        (torch.zeros(BLOCKS, 256)[:, ::2], "128 pieces of 4 bytes"),
        (torch.zeros(1, 8).expand(BLOCKS, 8), "none over another"),
        (torch.zeros(BLOCKS, 8, 1).expand(BLOCKS, 8, 2), "none over another"),
        (torch.zeros(2048).as_strided((BLOCKS, 4, 8), (64, 4, 1)), "none over another"),
    ],
)
def test_caches_that_cannot_be_told_are_refused(cache: torch.Tensor, words: str) -> None:
    """Axes that may mean something else, tokens that lie apart, memory that overlaps itself."""
    with pytest.raises(SpecError, match=words):
        DevicePages({"layers.0.attn": cache}, BLOCKS)
    with pytest.raises(SpecError, match="needs 2 blocks"):
        DevicePages({"layers.0.attn": torch.zeros(2, 2, 8)}, 2)


def test_blocks_that_vllm_does_not_have_are_refused(ground: FakeGround) -> None:
    """A block id beyond the cache is an error, not an address."""
    _, groups = groups_of(ground, "packed", 1, 1)
    for wrong in (BLOCKS, -1):
        with pytest.raises(InvalidRequest, match="of 32; nothing is copied"):
            groups.rows([[1, wrong]], 2)
    assert groups.rows([[]], 0).shape == (0, 1)


def test_scales_of_an_engine_s_own_are_refused() -> None:
    """With scales that an engine measured itself, its bytes mean nothing to another."""
    config = SimpleNamespace(cache_config=SimpleNamespace(calculate_kv_scales=True))
    with pytest.raises(SpecError, match="use scales of the checkpoint"):
        _check_scales(config)
    _check_scales(SimpleNamespace(cache_config=SimpleNamespace()))
