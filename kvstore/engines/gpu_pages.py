"""`TorchPages`: an engine's paged KV in torch tensors, as `kvstore.client.gpu` loads and saves it.

pool = EnginePool.vllm(caches)
memory = TorchPages(pool, layout)
gpu = GpuSide(Device(memory.device_uuid))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.client.gpu import Parts, Stage, Stream
from kvstore.core.errors import InvalidRequest
from kvstore.engines.torch_streams import device_uuid, on_stream

if TYPE_CHECKING:
    from kvstore.kernels.engine_pool import EnginePool
    from kvstore.kernels.formats import BlockLayout

STAGE_BYTES = 192 << 20
"""Two halves of 64 MiB for loads and two of 32 MiB for saves."""
STAGE_ALIGN = 128


class TorchPages:
    """Pages of an `EnginePool` that hold blocks of `layout`, and a stage beside them.

    The stage is `stage_bytes` of the pool's device, and at least three blocks; or `stage`, uint8
    [slots, block_bytes or more] of the caller's. Where a page's K, or V, of a layer is one piece
    and in the block's own order, pieces can be copied without it.
    Tensors in host memory do as well, slowly: to try things out without a GPU.
    """

    def __init__(
        self, pool: EnginePool, layout: BlockLayout, stage_bytes: int = STAGE_BYTES,
        stage: Any = None, backend: str | None = None,
    ) -> None:  # fmt: skip
        import torch

        from kvstore.kernels.formats import DTYPE_BYTES

        try:
            pool.check_layout(layout)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        self._torch, self._pool, self._layout, self._backend = torch, pool, layout, backend
        self.layer_count, self.layer_bytes = layout.num_layers, layout.layer_bytes
        stride = -(-layout.block_bytes // STAGE_ALIGN) * STAGE_ALIGN
        slots = max(3, stage_bytes // stride)
        if stage is None:
            stage = torch.empty((slots, stride), dtype=torch.uint8, device=pool.device)
        self._blocks = stage.zero_()  # saves store a format's padding, too, which nobody writes
        self.stage: Stage | None = Stage(stage.data_ptr(), len(stage), stage.stride(0))
        self._page_bytes = layout.payload_bytes // pool.pages_per_block(layout)
        self._step = pool.first.stride(0) * DTYPE_BYTES[layout.dtype]
        self._has_pieces = layout.kv_format == "raw" and _in_order(pool, layout)

    @property
    def device_uuid(self) -> str:
        """The GPU's name, as `Device` takes it."""
        return device_uuid(self._pool.device)

    def parts(self, pages: np.ndarray, layers: range) -> Parts | None:
        if not self._has_pieces:
            return None
        layout, pages = self._layout, _rows(pages).astype(np.uint64)
        factor, count = layout.kv_factor, pages.shape[1]
        tensors = self._pool.tensors[layers.start * factor : layers.stop * factor]
        begins = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        at = pages[:, None, :] * np.uint64(self._step) + begins[None, :, None]
        layer = np.arange(layers.start, layers.stop, dtype=np.uint64) * np.uint64(self.layer_bytes)
        kv = np.arange(factor, dtype=np.uint64) * np.uint64(layout.payload_bytes)
        page = np.arange(count, dtype=np.uint64) * np.uint64(self._page_bytes)
        offsets = layer[:, None, None] + kv[None, :, None] + page[None, None, :]
        return Parts(at.reshape(len(pages), -1), offsets.ravel(), self._page_bytes)

    def scatter(self, slots: np.ndarray, pages: np.ndarray, layers: range, stream: Stream) -> None:
        from kvstore.kernels.block_copy import scatter_blocks

        with self._on(stream):
            scatter_blocks(
                self._blocks, self._pool, self._there(_rows(pages)), self._layout,
                slots=self._there(slots), layers=layers, backend=self._backend,
            )  # fmt: skip

    def gather(self, pages: np.ndarray, slots: np.ndarray, stream: Stream) -> None:
        from kvstore.kernels.block_copy import gather_blocks

        with self._on(stream):
            gather_blocks(
                self._pool, self._there(_rows(pages)), self._blocks, self._layout,
                slots=self._there(slots), backend=self._backend,
            )  # fmt: skip

    def _on(self, stream: Stream) -> Any:
        """torch's work in here is the stream's."""
        return on_stream(self._pool.device, stream)

    def _there(self, numbers: np.ndarray) -> Any:
        tensor = self._torch.from_numpy(np.ascontiguousarray(numbers, np.int32))
        return tensor.to(self._pool.device, non_blocking=True)


def _rows(pages: np.ndarray) -> np.ndarray:
    return pages if pages.ndim == 2 else pages[:, None]


def _in_order(pool: EnginePool, layout: BlockLayout) -> bool:
    """Whether a page is one piece whose rows lie as a block's do."""
    tokens, heads, width = pool.first.shape[1:]
    strides = tuple(pool.first.stride()[1:])
    if layout.order == "NHD":
        return strides == (heads * width, width, 1) or (heads == 1 and strides[::2] == (width, 1))
    whole = tokens == layout.block_size or heads == 1
    return bool(whole and strides == (width, tokens * width, 1))
