"""Settings of the connector: what may stand in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec

from kvstore.core.errors import SpecError

logger = logging.getLogger(__name__)

POLICY = "recompute"
GPU = "untested"  # what `gpu` has to be: whoever sets it has read that it has not been run on one
TRIED = (0, 32)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`; seconds and bytes in plain numbers. Unknown names are refused.

    `revision` is the weights' commit or digest, found out where it can be; `key_mode` is `tokens`
    (blocks named by their token ids) or `external` (by vLLM's own block hashes). `gpu` lets
    the connector move blocks of a GPU, which has not been run on one.
    """

    address: str = ""
    tenant: str = "default"
    model: str = ""
    revision: str = ""
    key_mode: str = "tokens"
    block_tokens: int = 0
    call_timeout_seconds: float = 0.1
    transfer_timeout_seconds: float = 5.0
    retry_seconds: float = 5.0
    save_queue_bytes: int = 256 << 20
    hand_over_seconds: float = 2.0
    tool_call_token_ids: tuple[int, ...] = ()
    report_steps: bool = True
    gpu: str = ""


def check_version(version: str) -> None:
    """Raises SpecError for a vLLM whose connector interface is another; warns of untried ones."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < TRIED:
        raise SpecError(
            f"this is vLLM {version}; kvstore's connector needs {TRIED[0]}.{TRIED[1]} or newer"
        )
    if found > TRIED:
        logger.warning("kvstore's connector was tried with vLLM 0.32; this is %s", version)


def settings_of(transfer_config: Any) -> Settings:
    """The settings of a `KVTransferConfig`; raises SpecError with the fix."""
    try:
        settings = msgspec.convert(transfer_config.kv_connector_extra_config or {}, Settings)
    except msgspec.ValidationError as error:
        names = ", ".join(Settings.__struct_fields__)
        raise SpecError(f"kv_connector_extra_config: {error}; there are {names}") from None
    if settings.key_mode not in ("tokens", "external"):
        raise SpecError(f"key_mode is {settings.key_mode!r}; pass 'tokens' or 'external'")
    if settings.gpu not in ("", GPU):
        raise SpecError(f"gpu is {settings.gpu!r}; leave it out, or pass {GPU!r}")
    for name in ("call_timeout_seconds", "transfer_timeout_seconds", "retry_seconds"):
        if not 0 < getattr(settings, name) < 3600:
            raise SpecError(f"{name} is {getattr(settings, name)}; pass seconds above 0")
    if settings.save_queue_bytes < 0 or settings.hand_over_seconds < 0:
        raise SpecError("save_queue_bytes and hand_over_seconds cannot be negative; pass 0 or more")
    if transfer_config.kv_load_failure_policy != POLICY:
        raise SpecError(
            f"kv_load_failure_policy is {transfer_config.kv_load_failure_policy!r}, with which a "
            f"request fails when the daemon dies; set it to {POLICY!r} in --kv-transfer-config"
        )
    return settings
