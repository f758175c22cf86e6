"""What a vLLM request says of its reuse, and what it asks of the store.

Callers pass `kv_transfer_params={"kvstore": {…}}` with `session`, `turn`, `expect_reuse` (none,
likely, certain), `expect_reuse_seconds`, `priority`, `no_store`, `pending_tool_calls`,
`deadline_seconds`.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import msgspec

from kvstore.core.plan import ReuseHints

logger = logging.getLogger(__name__)

EXPECTATIONS = {"": 0, "none": 1, "likely": 2, "certain": 3}


class Wishes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request's `kv_transfer_params["kvstore"]`."""

    session: str = ""
    turn: int = 0
    expect_reuse: Literal["", "none", "likely", "certain"] = ""
    expect_reuse_seconds: float = 0.0
    priority: int = 0
    no_store: bool = False
    pending_tool_calls: bool = False
    deadline_seconds: float | None = None
    prompt_tokens: int = 0  # of a hand-over: how much the prefill side has stored

    def hints(self, session_id: str | None) -> ReuseHints:
        """The part of them that is told with lookups, puts and ends."""
        return ReuseHints(
            session=self.session or session_id or "",
            turn=self.turn,
            expect_reuse=EXPECTATIONS[self.expect_reuse],
            expect_reuse_seconds=self.expect_reuse_seconds,
            priority=self.priority,
            no_store=self.no_store,
        )


NO_WISHES = Wishes()


def wishes_of(request: Any) -> Wishes:
    """A request's wishes; those that make no sense are left out, with a line in the log."""
    params = request.kv_transfer_params
    own = params.get("kvstore") if isinstance(params, dict) else None
    if own is None:
        return NO_WISHES
    try:
        return msgspec.convert(own, Wishes)
    except msgspec.ValidationError as error:
        logger.warning("kv_transfer_params of %s are ignored: %s", request.request_id, error)
        return NO_WISHES


def is_handed_over(request: Any) -> bool:
    """Whether another engine computes this prompt's prefix, or has just done so."""
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("do_remote_prefill"))


def hand_over_params(request: Any) -> dict[str, Any] | None:
    """What the engine that decodes a prefilled prompt is to be told, if one is to."""
    params = request.kv_transfer_params
    if not (isinstance(params, dict) and params.get("do_remote_decode")):
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kvstore": {"prompt_tokens": request.num_prompt_tokens},
    }


def finish_words(request: Any, tool_call_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """Arguments of `Space.finish_request` that vLLM knows of."""
    reason = request.get_finished_reason()
    wishes, output = wishes_of(request), request.output_token_ids
    calls = bool(set(tool_call_token_ids) & set(output)) if tool_call_token_ids else False
    return {
        "output_tokens": len(output),
        "finish_reason": reason.name.lower() if reason is not None else "",
        "pending_tool_calls": wishes.pending_tool_calls or calls,
        "hints": wishes.hints(request.session_id),
    }
