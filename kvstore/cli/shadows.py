"""What the shadows show, as rows of `kvstore status` and `kvstore top`."""

from __future__ import annotations

from typing import Any

COLUMNS = ("what if", "token hit ratio", "saved a second", "against now")
OF_COPIES = "of it in hbm"


def columns(status: dict[str, Any]) -> tuple[str, ...]:
    """Names of the columns; where there are copies on GPUs, hits on these have one."""
    return (*COLUMNS[:2], OF_COPIES, *COLUMNS[2:]) if _has_copies(status) else COLUMNS


def rows(status: dict[str, Any]) -> list[list[str]]:
    """A row for each policy and capacity, the configured one as it is first."""
    shadows, with_copies = status["shadows"], _has_copies(status)
    now = shadows[0]["saved_seconds_per_second"] if shadows else 0.0
    return [_row(shadow, now, number == 0, with_copies) for number, shadow in enumerate(shadows)]


def _has_copies(status: dict[str, Any]) -> bool:
    return "hbm" in status.get("tiers", ())


def _row(shadow: dict[str, Any], now: float, is_now: bool, with_copies: bool) -> list[str]:
    saved = shadow["saved_seconds_per_second"]
    against = "" if is_now or not now else f"{saved / now - 1:+.1%}"
    near = [f"{shadow['hbm_token_hit_ratio']:.1%}"] if with_copies else []
    hits = f"{shadow['token_hit_ratio']:.1%}"
    return [_name(shadow, is_now), hits, *near, f"{saved:.3g} s", against]


def _name(shadow: dict[str, Any], is_now: bool) -> str:
    if is_now:
        return f"{shadow['policy']}, as it is"
    if shadow["capacity_ratio"] == 1:
        return str(shadow["policy"])
    return f"{shadow['tier']} x {shadow['capacity_ratio']:g}"


def summary(status: dict[str, Any]) -> str:
    """What the figures are of, and what they come to."""
    sample = (
        f"of the last {status['shadow_request_count']:,} requests followed, "
        f"{status['shadow_share']:.2%} of the conversations"
    )
    return f"{status['what_if']} ({sample})" if status["what_if"] else sample


def policy_line(status: dict[str, Any]) -> str:
    """The policy that acts, and the configured one where it is another."""
    if not status["policy_reason"]:
        return str(status["policy"])
    return (
        f"{status['policy']} for {status['configured_policy']}, because {status['policy_reason']}"
    )
