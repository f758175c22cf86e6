"""`KVStoreConnector`: vLLM's interface, handed on to the side that this process is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import vllm  # type: ignore[import-not-found]
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # type: ignore[import-not-found]

from kvstore.engines.vllm.events import as_vllm
from kvstore.engines.vllm.loads import Results
from kvstore.engines.vllm.messages import SpecMessage, StepMessage
from kvstore.engines.vllm.scheduler import SchedulerSide
from kvstore.engines.vllm.settings import check_version, settings_of
from kvstore.engines.vllm.worker import worker_side

KVConnectorMetadata.register(StepMessage)
KVConnectorHandshakeMetadata.register(SpecMessage)

SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps vLLM's KV blocks in a kvstore daemon: restores what is worth it, stores what is new.

    Whatever goes wrong with the daemon costs a recompute; wrong settings raise SpecError when the
    engine starts. vLLM builds one for the scheduler and one for each worker.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_version(vllm.__version__)
        settings = settings_of(self._kv_transfer_config)
        self._scheduler: Any = None
        self._worker: Any = None
        self._results = Results()
        self._is_single = len(kv_cache_config.kv_cache_groups) == 1
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, settings, kv_cache_config)
        else:
            side = worker_side(vllm_config, settings)
            self._worker = side(vllm_config, settings, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a save that is dropped is a later miss."""
        return False

    # ---- Worker side ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> SpecMessage | None:
        message: SpecMessage | None = self._worker.spec_message()
        return message

    def bind_connector_metadata(self, connector_metadata: StepMessage) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads end before a request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing yet: blocks are kept whole, once the step is computed."""

    def wait_for_save(self) -> None:
        self._worker.end_forward(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        message = self._connector_metadata
        self._results = results = self._worker.results(message, finished_req_ids)
        failed = set() if self._is_single else results.failed
        return KVConnectorTransferResults(
            finished_recving=set(results.ended), failed_recving=set(failed)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        # Ids are of one block pool only where there is one group; vLLM takes no others.
        return self._results.failed_blocks if self._is_single else set()

    # ---- Scheduler side ----

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], SpecMessage]
    ) -> None:
        self._scheduler.learn_specs(metadata)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool]
        answer = self._scheduler.matched_tokens(request, num_computed_tokens)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        found = self._scheduler.hit_sources(request, num_external_tokens)
        other = CacheHitSource.EXTERNAL_UNSPECIFIED
        return {SOURCES.get(tier, other): count for tier, count in found.items()}

    def build_connector_meta(self, scheduler_output: Any) -> StepMessage:
        message: StepMessage = self._scheduler.message(scheduler_output)
        return message

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.loads_ended(
            set(connector_output.finished_recving or ()),
            set(connector_output.invalid_block_ids or ()),
            set(connector_output.failed_recving or ()),
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Saves copy blocks out within their step, so none has to be kept for them.
        return False, self._scheduler.finished(request)

    def reset_cache(self) -> bool:
        """New weights: the engine attaches under a version of its own; others' blocks stay."""
        self._scheduler.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        """What came to or left the store, with `key_mode` external; hashes mean nothing else."""
        return [as_vllm(event) for event in self._scheduler.take_events()]

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()
