"""Explain in words: what `kvstore explain` prints of a decision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvstore.core.sizes import format_bytes

Document = dict[str, Any]


def explained(document: Document) -> str:
    """A decision's document as lines for people."""
    rows = [*_answer(document), *_outcome(document)]
    if "recompute" in document:
        rows += [*_circumstances(document), *_models(document), *_alternatives(document)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}".rstrip() for name, text in rows)


Rows = Iterator[tuple[str, str]]


def _answer(document: Document) -> Rows:
    plan = document["plan"]
    yield "request", document["request_id"] or "(without an id)"
    build = " ".join(filter(None, (document["engine_build"], document["device"])))
    model = f"{document['model']} {document['revision']}, tenant {document['tenant']}"
    yield "of", f"{model}, {build}" if build else model
    yield "matched", f"{document['matched_tokens']:,} tokens"
    if document["pending_tokens"]:
        yield "", f"{document['pending_tokens']:,} more were being written"
    yield "plan", f"{_kind(plan)}: {_steps(plan['steps'])}" if plan["steps"] else _kind(plan)
    if plan["predicted_p50_seconds"] is not None:
        yield "predicted", _prediction(plan)
    yield "reason", document["reason"]


def _outcome(document: Document) -> Rows:
    outcome = document["outcome"]
    if outcome["was_cut_short"]:
        kept = outcome["kept_blocks"]
        what = f"cut short after {kept:,} blocks" if kept else "given up"
        yield "outcome", f"{what}: {outcome['cut_reason']}"
    elif outcome["failed_blocks"]:
        yield "outcome", f"{outcome['failed_blocks']:,} blocks could not be had"
    if outcome["measured_seconds"] is not None:
        loads = ""
        if outcome["load_seconds"]:
            predicted = _ms(document["load_p50_seconds"])
            loads = f"loads took {_ms(outcome['load_seconds'])} (predicted {predicted}), so "
        yield (
            "" if outcome["was_cut_short"] else "outcome",
            (
                f"{loads}the first token took {_ms(outcome['measured_seconds'])}; regret "
                f"{_ms(outcome['regret_seconds'])}"
            ),
        )
    elif not outcome["failed_blocks"]:
        yield "outcome", "not measured"


def _circumstances(document: Document) -> Rows:
    local, new = document["local_tokens"], document["new_tokens"]
    yield "prompt", f"{local:,} tokens in the engine, {new:,} new"
    for segment in document["segments"]:
        over = " and ".join(segment["links"]) or "no link that is measured"
        size = format_bytes(segment["bytes"])
        yield "", f"{segment['tokens']:,} tokens ({size}) in {segment['source']}, over {over}"
    if document["deadline_seconds"] is not None:
        verdict = "no plan meets it" if document["is_predicted_miss"] else "met"
        yield "deadline", f"{_ms(document['deadline_seconds'])}, {verdict}"
    if document["gpu_second_price"] or document["queued_prefill_tokens"]:
        yield (
            "engine",
            (
                f"{document['queued_prefill_tokens']:,} tokens wait; a second of it costs others "
                f"{document['gpu_second_price']:.3g} s"
            ),
        )


def _models(document: Document) -> Rows:
    model = document["recompute"]
    yield (
        "recompute",
        (
            f"{_ms(model['call_seconds'])} a call, {model['token_seconds'] * 1e6:.3g} us a token, "
            f"{model['pair_seconds'] * 1e9:.3g} ns a pair; {_state(model)}"
        ),
    )
    for name, link in document["links"].items():
        yield (
            name,
            (
                f"{_ms(link['latency_seconds'])} and {_speed(link['bytes_per_second'])}, "
                f"99 %: {_ms(link['p99_latency_seconds'])} and "
                f"{_speed(link['p99_bytes_per_second'])}; "
                f"{format_bytes(link['queued_bytes'])} ahead{_priced(link)}; {_state(link)}"
            ),
        )


def _priced(link: Document) -> str:
    price = link["second_price"]
    return f", a second of it costs others {price:.3g} s" if price else ""


def _alternatives(document: Document) -> Rows:
    for number, other in enumerate(document["alternatives"][1:]):
        price = other["price_seconds"]
        rest = f", and {_ms(price)} for what it costs others" if price else ""
        text = f"{_kind(other)} {_prediction(other)}{rest}: {_steps(other['steps'])}"
        yield "" if number else "instead of", text


def _kind(plan: Document) -> str:
    return str(plan["kind"]).replace("_", " ")


def _prediction(plan: Document) -> str:
    return f"{_ms(plan['predicted_p50_seconds'])} (99 %: {_ms(plan['predicted_p99_seconds'])})"


def _steps(steps: Iterable[Document]) -> str:
    return ", ".join(f"{step['token_count']:,} {_source(step)}" for step in steps)


def _source(step: Document) -> str:
    return "recomputed" if step["source"] == "recompute" else f"from {step['source']}"


def _state(model: Document) -> str:
    return f"{model['state']}, {model['state_reason']}"


def _speed(bytes_per_second: float | None) -> str:
    return "no bytes' time" if bytes_per_second is None else f"{bytes_per_second / 1e9:.3g} GB/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
