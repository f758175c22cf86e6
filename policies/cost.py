"""Cost models: seconds to recompute tokens, and seconds to move bytes over a link, as measured.

Recompute: one forward call over n new tokens on p cached ones takes a + b n + c n (p + n/2)
seconds, b for the work of each token and c for each pair of a query and a key. Path: a transfer
over a link takes L + (Q + V)/B seconds, V its bytes and Q the bytes queued ahead of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.policies.fitting import RecursiveFit, Span, State

RECOMPUTE_FORGETTING, PATH_FORGETTING = 0.99, 0.98
# Fewer cached tokens than this cost nothing that could be told from the rest of a call.
CACHED_TOKENS_FLOOR = 256
TOKENS_MAX, BYTES_MAX = 1 << 36, 1 << 60
P50, P99 = 0.50, 0.99
OVERDUE_RATIO = 3.0
# Transfers of no more bytes, with those queued ahead, are short; and how large one is that has the
# short ones' quantiles exactly.
SHORT_BYTES, SHORT_USUAL_BYTES = 16 << 20, 2 << 20
KIND_SAMPLES_MIN = 20


class CallCost(NamedTuple):
    """Seconds of a forward call: a for the call, b for a token, c for a (query, key) pair."""

    call_seconds: float
    token_seconds: float
    pair_seconds: float

    def seconds(self, new_tokens: int, cached_tokens: int, chunk_tokens: int = 0) -> float:
        """t(n, p), 0 without new tokens; in calls of `chunk_tokens` if that is not 0.

        Chunks sum up: attention pairs each token with all before it, however it is cut.
        """
        if new_tokens <= 0:
            return 0.0
        calls = -(-new_tokens // chunk_tokens) if chunk_tokens else 1
        return self.call_seconds * calls + self.block_value(cached_tokens, new_tokens)

    def block_value(self, cached_tokens: int, tokens: int) -> float:
        """Seconds that `tokens` at depth `cached_tokens` add to a prompt: b s + c s (p + s/2).

        Over a whole prompt the values of its blocks sum to t(N, 0) - a.
        """
        pairs = tokens * (cached_tokens + tokens / 2)
        return self.token_seconds * tokens + self.pair_seconds * pairs

    def times(self, factor: float) -> CallCost:
        return CallCost(*(value * factor for value in self))


class LinkCost(NamedTuple):
    """Seconds of a link: L for a transfer, 1/B for a byte."""

    latency_seconds: float
    byte_seconds: float

    @classmethod
    def of(cls, latency_seconds: float, bytes_per_second: float) -> LinkCost:
        return cls(latency_seconds, 1.0 / bytes_per_second)

    def seconds(self, byte_count: int, queued_bytes: int = 0) -> float:
        """T = L + (Q + V)/B."""
        return self.latency_seconds + (queued_bytes + byte_count) * self.byte_seconds

    def times(self, factor: float) -> LinkCost:
        return LinkCost(self.latency_seconds * factor, self.byte_seconds * factor)


def chain_fixed_seconds(links: Sequence[LinkCost], byte_count: int, chunk_bytes: int) -> float:
    """What links in a row add to the seconds of the slowest of them.

    They are pipelined: T = sum L + (Q + V) / min B + chunk / max B. The slowest one sets the pace;
    each other one adds the time of one chunk.
    """
    fill = sorted([link.byte_seconds for link in links])[:-1]
    chunk = min(chunk_bytes, byte_count)
    return sum([link.latency_seconds for link in links]) + chunk * sum(fill)


class RecomputePrior(NamedTuple):
    """What a model is believed to cost before anything is measured.

    The default is the roofline of an 8-billion-parameter model on one H100 (assumed: 500 TFLOP/s
    in matrix products, 400 in attention, 10 ms a call, 128 KiB of KV a token from HBM at 3.3 TB/s).
    """

    cost: CallCost = CallCost(10e-3, 32e-6, 1.3e-9)
    context_token_seconds: float = 40e-9  # of a decode: its attention is bound by memory

    @classmethod
    def roofline(
        cls,
        active_parameters: float,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        effective_flops: float,
        attention_flops: float = 0.0,
        call_seconds: float = 10e-3,
        context_token_seconds: float = 40e-9,
    ) -> RecomputePrior:
        """2 FLOP a parameter and token; 4 a layer, head, dimension and (query, key) pair."""
        pair_flop = 4.0 * num_layers * num_heads * head_dim
        return cls(
            CallCost(
                call_seconds,
                2.0 * active_parameters / effective_flops,
                pair_flop / (attention_flops or effective_flops),
            ),
            context_token_seconds,
        )


class RecomputeIdentity(NamedTuple):
    """What a recompute model was measured on; another one has another model."""

    model: str
    revision: str = ""
    engine_build: str = ""
    device: str = ""
    shard_count: int = 1


class LinkIdentity(NamedTuple):
    """What a path model was measured on."""

    link: str
    device: str = ""


class MeasuredModel:
    """What both models share: a fit, the quantiles of its errors, and the identity it is of."""

    def __init__(self, identity: RecomputeIdentity | LinkIdentity, fit: RecursiveFit) -> None:
        self.identity = identity
        self._fit = fit
        self.unread = ""  # why a saved model was not taken over

    @property
    def state(self) -> State:
        """`prior` or `fitted`, and why."""
        return self._fit.state

    @property
    def sample_count(self) -> int:
        return self._fit.count

    @property
    def counters(self) -> dict[str, int]:
        """Measurements that were rejected, by reason, or clipped, and lasting changes followed."""
        fit = self._fit
        return {**fit.rejected, "clipped": fit.clipped, "shifts": fit.shifts}

    def ratio(self, share: float) -> float:
        """Measured over predicted seconds that `share` of the last measurements were below."""
        return self._fit.ratios.quantile(share)

    def dump(self) -> dict[str, Any]:
        """What it knows, in plain values, with what it was measured on."""
        return {"identity": list(self.identity), "fit": self._fit.dump()}

    def load(self, saved: Any) -> bool:
        """Takes over what `dump` gave; False, and the prior stays, if it is of something else."""
        known = saved.get("identity") if isinstance(saved, Mapping) else None
        if known != list(self.identity):
            self.unread = f"the saved costs are of {known}, not of {list(self.identity)}"
        elif not self._fit.load(saved.get("fit")):
            self.unread = "the saved costs are damaged"
        else:
            self.unread = ""
        return not self.unread


class RecomputeModel(MeasuredModel):
    """Seconds of forward calls, from measured engine steps."""

    def __init__(self, identity: RecomputeIdentity, prior: RecomputePrior | None = None) -> None:
        (call, token, pair), context = prior or RecomputePrior()
        fit = RecursiveFit(
            prior=(call, token, pair, token, context),
            groups=(0, 1, 1, 1, 1),
            forgetting=RECOMPUTE_FORGETTING,
            spans=(Span("chunk size"), Span("depth", CACHED_TOKENS_FLOOR)),
            core=3,
        )
        super().__init__(identity, fit)

    def observe(
        self,
        seconds: float,
        prefill: Sequence[tuple[int, int]],
        decode_tokens: int = 0,
        decode_context_tokens: int = 0,
        calls: int = 1,
    ) -> bool:
        """One measured step of (new, cached) parts and co-batched decode; False if it can't be."""
        parts = [part for part in prefill if part[0] > 0]
        given = (value for part in parts for value in part)
        if any(not 0 <= value <= TOKENS_MAX for value in (*given, decode_tokens, calls)):
            self._fit.rejected["too_large"] += 1
            return False
        new = float(sum(n for n, _ in parts))
        pairs = float(sum(n * (p + n / 2) for n, p in parts))
        features = (float(calls), new, pairs, float(decode_tokens), float(decode_context_tokens))
        # The depth of a step is that of its average part; a step without prefill spans nothing.
        depth = sum(n * p for n, p in parts) / new if new else math.nan
        spanned = (new or math.nan, depth)
        return self._fit.observe(features, seconds, spanned)

    def cost(self, share: float | None = None) -> CallCost:
        """a, b and c: the mean's, or those that `share` of the measurements were below."""
        call, token, pair = self._fit.coefficients[:3]
        mean = CallCost(call, token, pair)
        return mean if share is None else mean.times(self.ratio(share))

    def seconds(
        self, new_tokens: int, cached_tokens: int = 0, chunk_tokens: int = 0,
        share: float | None = None,
    ) -> float:  # fmt: skip
        """Predicted seconds of a prefill, its mean or a quantile."""
        return self.cost(share).seconds(new_tokens, cached_tokens, chunk_tokens)

    def block_value(self, cached_tokens: int, tokens: int) -> float:
        return self.cost().block_value(cached_tokens, tokens)


class PathModel(MeasuredModel):
    """Seconds of transfers over one physical link."""

    def __init__(self, identity: LinkIdentity, prior: LinkCost) -> None:
        fit = RecursiveFit(tuple(prior), (0, 1), PATH_FORGETTING, (Span("transfer size"),), kinds=2)
        super().__init__(identity, fit)

    def observe(self, seconds: float, byte_count: int, queued_bytes: int = 0) -> bool:
        """One measured transfer, with the bytes that were queued ahead; False if it can't be."""
        if not 0 < byte_count <= BYTES_MAX or not 0 <= queued_bytes <= BYTES_MAX:
            name = "not_positive" if byte_count <= 0 or queued_bytes < 0 else "too_large"
            self._fit.rejected[name] += 1
            return False
        total = float(byte_count) + float(queued_bytes)
        return self._fit.observe((1.0, total), seconds, (total,), int(total > SHORT_BYTES))

    def observe_overdue(self, seconds: float, byte_count: int, queued_bytes: int = 0) -> bool:
        """A transfer that is not there after `seconds`; False if that is no news yet.

        It takes at least that long. Without it, a link that is much slower than believed would be
        used until the first transfer over it ends. Measured against the mean and not the quantiles,
        since they grow with every such news.
        """
        if not seconds > OVERDUE_RATIO * self.seconds(byte_count, queued_bytes):
            return False
        return self.observe(seconds, byte_count, queued_bytes)

    def cost(self, share: float | None = None) -> LinkCost:
        """L and 1/B: the mean's, or those that `share` of the measurements were below.

        What disturbs a transfer adds milliseconds, which weigh more on short ones. So there is one
        ratio for the bytes, that of long transfers, and L is so that short ones have theirs.
        """
        mean = LinkCost(*self._fit.coefficients)
        if share is None:
            return mean
        short, long = [self._ratio_of(kind, share) for kind in (0, 1)]
        moving = long * mean.byte_seconds
        latency = short * mean.seconds(SHORT_USUAL_BYTES) - moving * SHORT_USUAL_BYTES
        return LinkCost(max(short * mean.latency_seconds, latency), moving)

    def _ratio_of(self, kind: int, share: float) -> float:
        """Of short transfers (0) or long ones (1); of all while these are too few."""
        ratios = self._fit.ratios_of[kind]
        return ratios.quantile(share) if ratios.count >= KIND_SAMPLES_MIN else self.ratio(share)

    def seconds(self, byte_count: int, queued_bytes: int = 0, share: float | None = None) -> float:
        return self.cost(share).seconds(byte_count, queued_bytes)
