"""Explain: a decision in full, for machines and for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvstore.core.completion import Completion
from kvstore.core.errors import NotFound
from kvstore.core.plan import PlanStep
from kvstore.policies.cost import LinkCost
from kvstore.policies.fitting import State
from kvstore.policies.index import Span
from kvstore.policies.planner import Alternative, Decision
from kvstore.store.decisions import Entry
from kvstore.store.find import find_key
from kvstore.store.parts import Parts
from kvstore.store.planning import Plan

Document = dict[str, Any]


class Explainer:
    """Answers why a request, or the last one that found a block, was served as it was."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def request(self, request_id: str) -> Document:
        """The last decision on a request; raises NotFound."""
        entry = self._parts.decisions.of_request(request_id)
        if entry is None:
            raise NotFound(f"request {request_id!r} is none of {self._kept()}; look it up again")
        return document(entry)

    def block(self, key: bytes) -> Completion[Document]:
        """The last plan by measured costs for a match that has the block with this key."""
        answer: Completion[Document] = Completion()

        def found(run: Any, i: int) -> None:
            entry = self._covering(run, i)
            if entry is None:
                answer.fail(
                    NotFound(
                        f"no plan by measured costs among {self._kept()} was for block "
                        f"{key.hex()}; pass a request id"
                    )
                )
            else:
                answer.resolve(document(entry))

        find_key(
            self._parts, key, found,
            lambda: answer.fail(NotFound(f"no block {key.hex()} is stored")),
        )  # fmt: skip
        return answer

    def _covering(self, run: Any, i: int) -> Entry | None:
        path = [Span(run, 0, i + 1)]
        while (parent := path[-1].run.parent) is not None:
            path.append(Span(parent, 0, parent.count))
        symbols = b"".join(
            bytes(span.run.symbols[: span.stop * span.run.width]) for span in reversed(path)
        )
        root = run.root
        return self._parts.decisions.covering(root.space, root.digest, symbols, run.first + i)

    def _kept(self) -> str:
        count = len(self._parts.decisions)
        return f"the last {count:,} lookups (limits.decisions_kept)"


def document(entry: Entry) -> Document:
    """Everything that is known of a decision, in plain values."""
    decision, spec = entry.decision, entry.space.spec
    found: Document = {
        "request_id": entry.request_id,
        "wall_seconds": entry.wall_seconds,
        "tenant": entry.space.tenant,
        "model": spec.model,
        "revision": spec.revision,
        "engine_build": entry.identity.engine_build,
        "device": entry.identity.device,
        "matched_tokens": entry.matched_tokens,
        "pending_tokens": entry.pending_tokens,
        "plan": {
            "kind": entry.plan.kind,
            "steps": _steps(entry.plan.steps),
            "predicted_p50_seconds": entry.plan.predicted_p50_seconds,
            "predicted_p99_seconds": entry.plan.predicted_p99_seconds,
        },
        "reason": entry.reason,
        "outcome": _outcome(entry),
    }
    if decision is not None:
        assert entry.taken is not None
        found |= _request(decision) | _costs(decision, entry.taken)
        found["alternatives"] = [_alternative(decision, other) for other in decision.alternatives]
    return found


def _request(decision: Decision) -> Document:
    """What was known of the request when it was planned."""
    situation = decision.situation
    load, late = decision.load_seconds
    return {
        "new_tokens": situation.new_tokens,
        "local_tokens": situation.local_tokens,
        "deadline_seconds": situation.deadline_seconds,
        "is_predicted_miss": decision.is_predicted_miss,
        "queued_prefill_tokens": situation.queued_prefill_tokens,
        "gpu_second_price": situation.prices.gpu_second,
        "load_p50_seconds": load,
        "load_p99_seconds": late,
        "gpu_seconds": decision.gpu_seconds,
        "segments": [
            {
                "tokens": segment.tokens, "bytes": segment.byte_count, "source": segment.source,
                "links": list(segment.links),
            }
            for segment in situation.segments
        ],
    }  # fmt: skip


def _costs(decision: Decision, taken: Plan) -> Document:
    """The models' coefficients and states."""
    p50, p99 = decision.costs
    situation = decision.situation
    call, late = p50.call._asdict(), p99.call._asdict()
    late = {f"p99_{name}": value for name, value in late.items()}
    return {
        "recompute": {**call, **late, **_state(taken.states["recompute"])},
        "links": {
            name: {
                **_link(cost, ""),
                **_link(p99.links[name], "p99_"),
                **_state(taken.states[name]),
                "queued_bytes": situation.queued_bytes.get(name, 0),
                "second_price": _second_price(situation.prices.link_byte.get(name, 0.0), cost),
            }
            for name, cost in p50.links.items()
        },
    }


def _state(state: State) -> Document:
    return {"state": state.name, "state_reason": state.reason}


def _link(cost: LinkCost, prefix: str) -> Document:
    speed = 1.0 / cost.byte_seconds if cost.byte_seconds else None
    return {
        f"{prefix}latency_seconds": cost.latency_seconds, f"{prefix}bytes_per_second": speed,
    }  # fmt: skip


def _second_price(byte_price: float, cost: LinkCost) -> float:
    """Seconds that a second of the link costs others."""
    return byte_price / cost.byte_seconds if byte_price else 0.0


def _alternative(decision: Decision, other: Alternative) -> Document:
    return {
        "kind": other.kind,
        "predicted_p50_seconds": other.p50_seconds,
        "predicted_p99_seconds": other.p99_seconds,
        "price_seconds": other.price,
        "steps": _steps(decision.steps(other.cut)),
    }


def _steps(steps: Iterable[PlanStep]) -> list[Document]:
    return [
        {"first_token": s.first_token, "token_count": s.token_count, "source": s.source}
        for s in steps
    ]


def _outcome(entry: Entry) -> Document:
    outcome = entry.outcome()
    return {
        "load_seconds": None if outcome is None else outcome.load_seconds,
        "measured_seconds": None if outcome is None else outcome.seconds,
        "regret_seconds": None if outcome is None else outcome.regret_seconds,
        "failed_blocks": entry.failed_blocks,
        "was_cut_short": entry.kept_blocks is not None,
        "kept_blocks": entry.kept_blocks,
        "cut_reason": entry.cut_reason,
    }
