"""Calls of engines on GPUs that tier hbm is in."""

from __future__ import annotations

import numpy as np

from kvstore.core.completion import Completion
from kvstore.core.errors import FailedPrecondition
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server import translate
from kvstore.server.steps import mapped
from kvstore.store.hbm import HbmCopies
from kvstore.store.kvstore import KVStore
from kvstore.store.sessions import Session
from kvstore.store.staging_book import DeviceShare


class DeviceCalls:
    """Handlers, `(session, request) -> Completion of the response`."""

    def __init__(self, store: KVStore) -> None:
        self._store = store

    def attach(
        self, session: Session, request: pb.AttachDeviceRequest
    ) -> Completion[pb.AttachDeviceResponse]:
        device = translate.text("device_uuid", request.device_uuid)
        found = self._hbm().attach(session, device, request.staging_bytes)
        return mapped(found, _share_message)

    def load(
        self, session: Session, request: pb.LoadDeviceRequest
    ) -> Completion[pb.LoadDeviceResponse]:
        found = self._hbm().load(
            session, request.lease_id, request.first_block, request.block_count,
            request.staging_offset, request.staging_bytes,
            translate.text("device_uuid", request.device_uuid),
        )  # fmt: skip
        return mapped(found, _offsets_message)

    def _hbm(self) -> HbmCopies:
        hbm = self._store.parts.hbm
        if hbm is None:
            raise FailedPrecondition("this daemon has no tier hbm; give tiers.hbm a size")
        return hbm


def _share_message(share: DeviceShare) -> pb.AttachDeviceResponse:
    memory = share.memory
    return pb.AttachDeviceResponse(
        share=share.share, handle=memory.handle, offset=memory.offset, length=memory.length
    )


def _offsets_message(offsets: np.ndarray) -> pb.LoadDeviceResponse:
    return pb.LoadDeviceResponse(offsets=offsets.astype("<i8").tobytes())
