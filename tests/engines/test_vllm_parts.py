"""Parts of the vLLM connector one by one: settings, identity, pages, loads, what is certain."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_desk import Request

from kvstore.core.errors import SpecError, StoreUnavailable
from kvstore.core.spec import BLOCK_SIZE_MAX
from kvstore.engines.files import digest_of_files
from kvstore.engines.vllm.asking import Answer, Asked
from kvstore.engines.vllm.identity import (
    STORE_BLOCK_BYTES_MIN,
    _hash_algorithm,
    adapter_of,
    blocks_per_group,
    extra_digest,
    revision_of,
)
from kvstore.engines.vllm.loads import Loads, Results
from kvstore.engines.vllm.messages import LoadJob, Prompt
from kvstore.engines.vllm.pages import Groups, Pages
from kvstore.engines.vllm.scheduler import certain_tokens
from kvstore.engines.vllm.settings import check_version, settings_of
from kvstore.engines.vllm.worker import Buffers

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def transfer(policy: str = "recompute", **extra: Any) -> Any:
    return SimpleNamespace(kv_load_failure_policy=policy, kv_connector_extra_config=extra)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transfer("fail"), "set it to 'recompute' in --kv-transfer-config"),
        (transfer(adress="unix:///x"), "there are address, tenant"),
        (transfer(key_mode="hash"), "pass 'tokens' or 'external'"),
        (transfer(call_timeout_seconds=0), "pass seconds above 0"),
        (transfer(save_queue_bytes=-1), "pass 0 or more"),
        (transfer(retry_seconds="soon"), "Expected `float`"),
    ],
)
def test_wrong_settings_are_refused_with_the_fix(config: Any, words: str) -> None:
    """An engine does not start with a setting that would be ignored or fail requests later."""
    with pytest.raises(SpecError, match=words):
        settings_of(config)


def test_a_vllm_with_another_interface_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Versions before the tried one are refused, later ones get a warning."""
    with pytest.raises(SpecError, match="kvstore's connector needs 0"):
        check_version("0.31.1")
    check_version("0.32.0+cpu")
    assert not caplog.records
    check_version("1.0")
    assert "was tried with vLLM 0.32" in caplog.text


@given(page=st.integers(1, 1 << 22), block=st.sampled_from([16, 32, 128, 1024]))
def test_store_blocks_are_large_enough_to_be_worth_a_call(page: int, block: int) -> None:
    """Small engine blocks are grouped to 256 KiB, as far as a block may have tokens."""
    count = blocks_per_group(page, block, 0)
    assert count * block <= BLOCK_SIZE_MAX
    assert count == 1 or count // 2 * page < STORE_BLOCK_BYTES_MIN
    assert count * page >= STORE_BLOCK_BYTES_MIN or 2 * count * block > BLOCK_SIZE_MAX


def test_a_wished_block_size_fits_the_engine_s() -> None:
    """Blocks that are no multiple of vLLM's are refused."""
    assert blocks_per_group(1, 16, 256) == 16
    for wrong in (100, 8, 2 * BLOCK_SIZE_MAX):
        with pytest.raises(SpecError, match="pass a multiple of vLLM's block size 16"):
            blocks_per_group(1, 16, wrong)


def test_a_revision_is_a_commit_or_the_weights_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are told apart by commit, by a snapshot's path, or by every byte of their files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert revision_of(SimpleNamespace(model="m", revision=COMMIT)) == COMMIT
    place = f"/hub/models--m/snapshots/{COMMIT}"
    assert revision_of(SimpleNamespace(model=place, revision=None)) == COMMIT
    for name, byte in (("a", b"\1"), ("b", b"\2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"\0" * 1000 + byte)
        (tmp_path / name / "readme").write_bytes(name.encode())
    one, other = (
        revision_of(SimpleNamespace(model=str(tmp_path / n), revision="main")) for n in "ab"
    )
    assert one != other
    with pytest.raises(SpecError, match='add their commit or digest as "revision"'):
        revision_of(SimpleNamespace(model="nobody/knows", revision="main"))


def test_digests_are_kept_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is read once; one that was written over, of the same length, is read again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"\0" * 100)
    first = digest_of_files([str(path)])
    monkeypatch.setattr("kvstore.engines.files._read", lambda path: "read again")
    assert digest_of_files([str(path)]) == first
    path.write_bytes(b"\1" * 100)
    assert digest_of_files([str(path)]) != first
    (tmp_path / "cache" / "kvstore" / "digests.json").write_text("{nonsense")
    assert digest_of_files([str(path)]) != first


def test_adapters_and_extra_keys_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same name for other adapter weights, and a text like an image's hash, are others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())
    found = {adapter_of(SimpleNamespace(lora_name="x", lora_path=str(tmp_path / n))) for n in "ab"}
    assert len(found) == 2
    assert adapter_of(SimpleNamespace(lora_name="x", lora_path="hub/x")) == "x:hub/x"
    assert extra_digest((("mm", b"a", 1),)) != extra_digest((("mm", "a", 1),))
    assert extra_digest((("mm", "a", 1),)) != extra_digest((("mm", "a", 2),))


def test_hashes_seeded_at_random_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's fast hashes differ in every process unless their seed is set."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def config(name: str) -> Any:
        return SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=name))

    assert _hash_algorithm(config("sha256_cbor")) == "vllm-sha256_cbor/seed=default"
    with pytest.raises(SpecError, match="set PYTHONHASHSEED"):
        _hash_algorithm(config("xxhash"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert _hash_algorithm(config("xxhash")) == "vllm-xxhash/seed=7"


@pytest.mark.parametrize("evenly", [True, False])
def test_pages_are_copied_whole_and_nothing_else(evenly: bool) -> None:
    """A block's pages of every layer come back where they were, wherever the layers lie."""
    if evenly:
        whole = torch.randint(0, 99, (3, 8, 2, 16), dtype=torch.int32)
        caches = {f"layers.{n}.attn": whole[n] for n in (2, 0, 1)}
    else:
        caches = {
            f"layers.{n}.attn": torch.randint(0, 99, (8, 2, 8 * (n + 1)), dtype=torch.int32)
            for n in range(3)
        }
    pages = Pages(caches, 8)
    assert pages.layers == (0, 1, 2)
    before = {name: cache.clone() for name, cache in caches.items()}
    kept = np.empty(pages.block_bytes, np.uint8)
    pages.read(5, kept)
    for n, cache in enumerate(caches[f"layers.{i}.attn"] for i in range(3)):
        part = cache[5].contiguous().view(torch.uint8).reshape(-1).numpy()
        start = sum(caches[f"layers.{i}.attn"][0].numel() * 4 for i in range(n))
        assert np.array_equal(kept[start : start + len(part)], part)
    pages.write(2, kept)
    for name, cache in caches.items():
        assert torch.equal(cache[2], before[name][5])
        others = [n for n in range(8) if n != 2]
        assert torch.equal(cache[others], before[name][others])


def test_layers_that_share_a_cache_have_one_page() -> None:
    """A model whose layers share KV stores it once."""
    cache = torch.zeros(4, 2, 8)
    pages = Pages({"layers.0.attn": cache, "layers.1.attn": cache}, 4)
    assert pages.block_bytes == 2 * 8 * 4


def test_caches_that_cannot_be_moved_are_refused() -> None:
    """GPU memory and blocks in pieces are refused with the reason."""
    with pytest.raises(SpecError, match="is on meta"):
        Pages({"layers.0.attn": torch.zeros(4, 8, device="meta")}, 4)
    with pytest.raises(SpecError, match="needs 5 blocks of one piece"):
        Pages({"layers.0.attn": torch.zeros(4, 8)}, 5)
    with pytest.raises(SpecError, match="needs 4 blocks of one piece"):
        Pages({"layers.0.attn": torch.zeros(8, 4, 4).transpose(0, 1)}, 4)


def test_windows_that_moved_on_are_left_out() -> None:
    """A dropped block of a sliding window is neither written nor stored as if it were there."""
    caches = [torch.randint(0, 99, (6, 8), dtype=torch.int32) for _ in range(2)]
    groups = Groups([Pages({"layers.0.a": cache}, 6) for cache in caches], 2)
    kept = np.empty(groups.block_bytes, np.uint8)
    assert not groups.read([[1, 2], [0, 3]], kept)
    assert groups.read([[1, 2], [4, 3]], kept)
    before = caches[1].clone()
    groups.write([[3, 5], [0, 5]], kept)
    assert torch.equal(caches[0][[3, 5]], caches[0][[1, 2]])
    assert torch.equal(caches[1][5], before[3])
    assert torch.equal(caches[1][:5], before[:5])


@given(
    prompt=st.integers(1, 50), generated=st.integers(0, 50), drafts=st.integers(0, 4),
    in_flight=st.integers(0, 5), data=st.data(),
)  # fmt: skip
def test_what_is_certain_was_computed_from_known_tokens(
    prompt: int, generated: int, drafts: int, in_flight: int, data: st.DataObject
) -> None:
    """A token whose KV counts as final is known, and not one that a draft could have been."""
    request = Request("r", list(range(prompt + generated)), prompt)
    request.num_in_flight_tokens = in_flight
    computed = data.draw(st.integers(0, prompt + generated + in_flight))
    scheduled = data.draw(st.integers(drafts + 1, drafts + 60))
    certain = certain_tokens(request, computed + scheduled, drafts)
    assert certain <= min(request.num_tokens, computed + scheduled - drafts)
    if generated and (drafts or in_flight):
        assert certain < request.num_tokens


def job(count: int, ids: tuple[int, ...], request: str = "r") -> LoadJob:
    return LoadJob(request, Prompt(), 0, 0, count, (ids,))


def test_a_load_that_ends_short_names_the_blocks_it_lacks() -> None:
    """What was not loaded of a request is named, but for blocks that the engine has itself."""
    results = Results()
    results.add(job(3, (5, 6, 7, 8, 9, 10)), 1)
    results.add(job(2, (11, 12), "whole"), 2)
    results.add(job(2, (0, 13), "nothing"), 0)
    assert results.ended == {"r", "whole", "nothing"}
    assert results.failed == {"r", "nothing"}
    assert results.failed_blocks == {7, 8, 9, 10, 13}


def test_every_load_is_taken_once() -> None:
    """However its fetching ends, a load is heard of; one that is closed away, too."""
    loads, taken = Loads(), []
    loads.start(job(1, (1,)), lambda job: None)
    loads.start(job(1, (2,), "away"), _unavailable)
    loads.start(job(1, (3,), "bug"), lambda job: 1 // 0)
    while len(taken) < 3:
        taken += loads.take(5.0)
    assert {load.job.request_id for load, _ in taken} == {"r", "away", "bug"}
    assert all(fetched is None for _, fetched in taken)
    loads.close()
    loads.start(job(1, (4,), "late"), lambda job: None)
    assert [load.job.request_id for load, _ in loads.take(0.0)] == ["late"]


def _unavailable(job: LoadJob) -> None:
    raise StoreUnavailable("gone")


def test_a_request_s_end_overtakes_its_load() -> None:
    """A load is known to be cancelled while it is fetched, and until the last word on it."""
    loads, began, go_on = Loads(), threading.Event(), threading.Event()

    def fetch(job: LoadJob) -> None:
        began.set()
        go_on.wait(5.0)

    loads.start(job(1, (4,)), fetch)
    assert began.wait(5.0)
    loads.cancel({"r", "unknown"})
    go_on.set()
    ((load, _),) = loads.take(5.0)
    assert load.is_cancelled
    loads.ended(load)
    loads.start(job(1, (5,)), lambda job: None)
    ((again, _),) = loads.take(5.0)
    assert not again.is_cancelled
    loads.close()


def test_memory_for_saves_has_a_limit() -> None:
    """No more than the limit is on its way; what came back is used again."""
    buffers = Buffers(100)
    one, other = buffers.take(50), buffers.take(50)
    assert buffers.take(50) is None
    assert one is not None
    buffers.give_back([one])
    assert buffers.take(50) is one
    assert other is not one


def test_a_lookup_that_is_late_ends_its_lease() -> None:
    """A prompt waits for its lookup no longer than the limit; what comes later is released."""
    released = []
    future: Future[Answer] = Future()
    asked = Asked((8, 0), future)
    assert asked.answer(10.0) is None
    late = asked.answer(0.0)
    assert late is not None
    assert late.problem == "the daemon did not answer in time"
    assert future.cancelled()
    running: Future[Answer] = Future()
    running.set_running_or_notify_cancel()
    asked = Asked((8, 0), running)
    assert asked.answer(0.0) is not None
    running.set_result(Answer([SimpleNamespace(release=lambda: released.append(2))]))
    assert released == [2]
