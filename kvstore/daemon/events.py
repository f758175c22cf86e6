"""Starts the publisher of KV events where the configuration asks for one."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kvstore.core.config import Config
from kvstore.core.errors import ConfigError
from kvstore.events import EventLog
from kvstore.metrics import Metrics
from kvstore.store.kvstore import KVStore

if TYPE_CHECKING:
    from kvstore.event_publisher import EventPublisher

PARENTS_KNOWN = 4096


def publish_events(
    config: Config, log: EventLog, store: KVStore, metrics: Metrics
) -> EventPublisher | None:
    """The publisher, listening from now on; None where `events.publish` is empty."""
    section, parts = config.events, store.parts
    if not section.publish:
        return None
    try:
        from kvstore.event_publisher import Endpoints, EventPublisher
    except ImportError as error:
        raise ConfigError(
            "events.publish needs pyzmq; run `pip install kvstore-daemon[events]` or set it to ''"
        ) from error

    @lru_cache(PARENTS_KNOWN)
    def is_root(space_id: bytes, key: bytes) -> bool:
        space = parts.spaces.get(space_id)
        return space is not None and any(root.key == key for root in parts.index.roots(space))

    def model_of(space_id: bytes) -> str:
        space = parts.spaces.get(space_id)
        return space.spec.model if space is not None else ""

    endpoints = Endpoints(
        section.publish, section.replay, section.topic, section.form, section.tenants
    )
    return EventPublisher(
        log, endpoints, model_of, is_root, config.limits.events_kept, metrics.events_dropped
    )
