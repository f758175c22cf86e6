"""A real model over blocks of a real daemon, attended to where they lie, two ways."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import numpy as np
import pytest
from paged_world import daemon_with_disk, reboot, restored, sources

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")

from kvstore.engines import smollm2  # noqa: E402
from kvstore.engines.generating import decode, prefill_alone  # noqa: E402
from kvstore.engines.paged import PagedDecoder  # noqa: E402
from kvstore.engines.transformers import block_reader, spec_of  # noqa: E402

SUPPORT = Path(__file__).parent.parent / "support"
CONTEXT, NEW, GENERATED, INTERPRETED = 384, 40, 8, 64
TOLERANCE = 2e-5

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not smollm2.is_there(), reason="SmolLM2 is not there; run: make smollm2"),
]


class Known(NamedTuple):
    """A prompt of a real text, its blocks in a daemon, and what transformers makes of it."""

    model: Any
    spec: Any
    daemon: Any
    ids: Any
    logits: Any
    answer: list[int]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, tokenizer = smollm2.load()
    spec = spec_of(model, name=smollm2.NAME)
    ids = tokenizer(topics["types"], return_tensors="pt").input_ids[0, : CONTEXT + NEW]
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    prefill = prefill_alone(model, ids)
    read = block_reader(prefill.cache, spec)
    answer = decode(model, prefill, GENERATED).tokens
    with daemon_with_disk(tmp_path_factory.mktemp("smollm2"), "64MiB", "128MiB") as daemon:
        with daemon.client(put_timeout_seconds=60.0) as client:
            full = CONTEXT // spec.block_size
            assert client.attach(spec).put(ids.numpy(), read).stored == full
        yield Known(model, spec, daemon, ids, logits, answer)
    torch.set_num_threads(threads)


def assert_close(found: Any, right: Any) -> None:
    """By norm, and where the softmax would tell the difference."""
    assert float((found - right).norm()) <= TOLERANCE * float(right.norm())
    assert float((found - right).abs().max()) < 5e-3
    assert torch.equal(found.argmax(1), right.argmax(1))


def test_by_kernels_from_host(known: Known, tmp_path: Path) -> None:
    """By Triton's interpreter: logits over blocks that another process put are transformers'."""
    stop = INTERPRETED + 3
    np.save(tmp_path / "ids.npy", known.ids[:stop].numpy())
    target = tmp_path / "logits.npy"
    subprocess.run(
        [sys.executable, "-m", "paged_interpreted", known.daemon.address, tmp_path / "ids.npy",
         str(INTERPRETED), target],
        check=True, timeout=280, env=os.environ | {"PYTHONPATH": str(SUPPORT)},
    )  # fmt: skip
    assert_close(torch.from_numpy(np.load(target)), known.logits[INTERPRETED:stop])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_by_reference_from_each_tier(known: Known, tier: str) -> None:
    """Logits over restored blocks are transformers', and so is the text that follows."""
    if tier == "disk":
        reboot(known.daemon)
    with restored(known.daemon, known.spec, known.ids.numpy()) as (context, match, _):
        assert (context.tokens, sources(match)) == (CONTEXT, {tier})
        decoder = PagedDecoder(known.model, known.spec, context, room_tokens=NEW + GENERATED)
        logits = decoder.extend(known.ids[CONTEXT:])
        assert_close(logits, known.logits[CONTEXT:])
        answer = [int(logits[-1].argmax())]
        while len(answer) < GENERATED:
            answer.append(int(decoder.extend([answer[-1]])[0].argmax()))
        assert answer == known.answer
