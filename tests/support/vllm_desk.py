"""Both sides of the vLLM connector without vLLM: its requests, steps and caches as plain objects.

What vLLM itself does with the connector is tried in tests/engines/with_vllm, where it is installed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from daemons import DaemonProcess

from kvstore.core.spec import KVSpec
from kvstore.engines.vllm.engine import Rank
from kvstore.engines.vllm.messages import SpecMessage
from kvstore.engines.vllm.pages import Groups, Pages
from kvstore.engines.vllm.scheduler import SchedulerSide
from kvstore.engines.vllm.settings import Settings
from kvstore.engines.vllm.worker import WorkerSide

BLOCK, LAYERS, PAGE, BLOCKS = 4, 3, 256, 32
GROUP_SPEC = type("FullAttentionSpec", (), {"block_size": BLOCK})


@dataclass
class Request:
    """What the connector reads of vLLM's request."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    session_id: str | None = None
    skip_reading_prefix_cache: bool = False
    num_in_flight_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def get_finished_reason(self) -> Any:
        return SimpleNamespace(name="STOP")


def spec(name: str = "m", **changes: Any) -> KVSpec:
    values: dict[str, Any] = {
        "model": name, "revision": "r", "num_layers": LAYERS, "num_kv_heads": 1, "head_dim": 8,
        "dtype": "float32", "block_size": BLOCK, "layout": "vllm/0/test", "pp_size": 1,
        "block_bytes": LAYERS * PAGE,
    }  # fmt: skip
    return KVSpec(**{**values, **changes})


class Desk:
    """One engine: a scheduler side, and a worker side with a cache of its own for each stage."""

    def __init__(self, daemon: DaemonProcess, *specs: KVSpec, **settings: Any) -> None:
        settings = {"address": daemon.address, "retry_seconds": 0.1, **settings}
        self.settings = Settings(**settings)
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id=f"desk-{id(self)}"),
            parallel_config=SimpleNamespace(data_parallel_index=0),
            device_config=SimpleNamespace(device_type="cpu"),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
            cache_config=SimpleNamespace(hash_block_size=BLOCK),
            kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        )
        caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=GROUP_SPEC())])
        self.specs = specs or (spec(),)
        self.scheduler = SchedulerSide(config, self.settings, caches)
        self.storage: list[torch.Tensor] = []
        self.workers = [self.worker(stage, config, caches) for stage in range(len(self.specs))]
        messages = {
            (stage, 0): self._spec_message(worker) for stage, worker in enumerate(self.workers)
        }
        self.scheduler.learn_specs(messages)

    def worker(self, stage: int, config: Any, caches: Any) -> WorkerSide:
        """The worker side of a stage, and its cache."""
        self.storage.append(torch.zeros(LAYERS, BLOCKS, PAGE, dtype=torch.uint8))
        worker, each = WorkerSide(config, self.settings, caches), self.specs[stage]
        layers = {f"layers.{n}.attn": self.storage[stage][n] for n in range(LAYERS)}
        groups = Groups([Pages(layers, BLOCKS)], each.block_size // BLOCK)
        worker.use(Rank(each, groups, 0, len(self.specs), stage == 0, BLOCK))
        return worker

    @staticmethod
    def _spec_message(worker: WorkerSide) -> SpecMessage:
        message = worker.spec_message()
        assert message is not None
        return message

    def fill(self, blocks: list[int]) -> None:
        """Gives engine blocks bytes of their own in every stage."""
        for stage, storage in enumerate(self.storage):
            for block in blocks:
                storage[:, block] = torch.randint(0, 256, (LAYERS, PAGE), dtype=torch.uint8)
                storage[0, block, 0] = stage + 1

    def ask(self, request: Request, computed: int = 0, seconds: float = 5.0) -> tuple[Any, bool]:
        """The answer to a lookup, asked for again while it is not known."""
        end = time.monotonic() + seconds
        while (said := self.scheduler.matched_tokens(request, computed))[0] is None:
            assert time.monotonic() < end, "no answer"
        return said

    def step(
        self,
        work: Sequence[tuple[Request, int, int]] = (),
        table: dict[str, Any] | None = None,
        drafts: dict[str, list[int]] | None = None,
    ) -> Any:
        """One step that computes (request, computed tokens, new tokens); answers with results."""
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum(count for _, _, count in work),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, num_computed_tokens=done)
                for r, done, _ in work
            ],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={r.request_id: count for r, _, count in work},
            scheduled_spec_decode_tokens=drafts or {},
            kv_connector_block_state=SimpleNamespace(
                resolve_block_ids=lambda name: _groups((table or {})[name])
            ),
        )
        message = self.scheduler.message(output)
        results = []
        for worker in self.workers:
            worker.begin(message)
            worker.start_loads(message)
            worker.end_forward(message)
            results.append(worker.results(message, set()))
        self.message = message
        return results

    def load(self, request: Request, computed: int, count: int, blocks: list[int]) -> set[int]:
        """Loads `count` tokens into engine blocks; answers with the blocks that failed."""
        self.scheduler.allocated(request, (blocks,), count)
        waiting, failed = len(self.workers), set()
        for _ in range(2000):
            for results in self.step():
                waiting -= len(results.ended)
                failed |= results.failed_blocks
            if not waiting:
                self.scheduler.loads_ended({request.request_id}, failed, set())
                return failed
        raise AssertionError("a load never ended")

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()


def _groups(blocks: list[int] | tuple[list[int], ...]) -> tuple[list[int], ...]:
    return blocks if isinstance(blocks, tuple) else (blocks,)


def tokens(seed: int, count: int) -> list[int]:
    return [seed * 10_000 + n for n in range(count)]
