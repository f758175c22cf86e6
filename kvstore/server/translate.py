"""Messages to the store's words and back: every field is checked here, nothing is decided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvstore.core.errors import InvalidRequest, LimitReached, NotFound, SpecMismatch
from kvstore.core.keys import EXTRA_DIGEST_BYTES, Chain, hash_chain, token_chain
from kvstore.core.plan import (
    NO_HINTS,
    Ask,
    CommitRun,
    FailedBlocks,
    LookupResult,
    Query,
    ReuseHints,
    Slots,
)
from kvstore.core.slots import encode_slots
from kvstore.core.space import Space
from kvstore.core.spec import KVSpec
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.store.sessions import Attachment, Session

TEXT_BYTES_MAX = 1024
ATTENTION_ENTRIES_MAX = 256
PLAN_SHAPES = ("prefix", "split")
OVERLAPS = ("none", "layerwise")
SECONDS_MAX = 1e9
SLOT_SHIFT = 12
PREFILL_TOKENS_MAX = 1 << 32  # that wait; more is no count


def text(name: str, value: str) -> str:
    """`value` if it is short enough for an identity; names and ids are never long."""
    if len(value) * 4 > TEXT_BYTES_MAX and len(value.encode()) > TEXT_BYTES_MAX:
        raise InvalidRequest(
            f"{name} is {len(value.encode())} bytes long; pass at most {TEXT_BYTES_MAX}"
        )
    return value


def seconds(name: str, value: float) -> float:
    """`value` if it is a duration: finite and not negative."""
    if not 0.0 <= value <= SECONDS_MAX or math.isnan(value):
        raise InvalidRequest(f"{name} is {value}; pass seconds from 0 to {SECONDS_MAX:.0f}")
    return value


def ratio(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise InvalidRequest(f"{name} is {value}; pass a ratio from 0 to 1")
    return value


def attachment_of(session: Session, number: int) -> Attachment:
    found = session.attachments.get(number)
    if found is None:
        raise NotFound(f"attachment {number} is not of this session; call Attach first")
    return found


def digest(name: str, value: bytes, size: int) -> bytes:
    if len(value) != size:
        raise InvalidRequest(f"{name} is {len(value)} bytes; pass {size}")
    return value


# ---- Attach ----


def key_spec(message: pb.KVSpec) -> KVSpec:
    """The KVSpec of a message; raises SpecError naming the field."""
    for name in _SPEC_TEXTS:
        text(f"spec.{name}", getattr(message, name))
    if len(message.attention) > ATTENTION_ENTRIES_MAX:
        raise InvalidRequest(
            f"spec.attention has {len(message.attention)} entries; "
            f"pass at most {ATTENTION_ENTRIES_MAX}"
        )
    for key, value in message.attention.items():
        text("spec.attention", key + value)
    fields = {name: getattr(message, name) for name in KVSpec.__struct_fields__}
    return KVSpec(**{**fields, "attention": dict(message.attention)})


_SPEC_TEXTS = (
    "model", "revision", "dtype", "layout", "group", "kv_format", "key_mode", "hash_algorithm",
)  # fmt: skip


def spec_message(spec: KVSpec) -> pb.KVSpec:
    return pb.KVSpec(**{name: getattr(spec, name) for name in KVSpec.__struct_fields__})


def plan_shapes(names: Sequence[str]) -> tuple[str, ...]:
    """What an engine can execute; `prefix` if it does not say."""
    for name in names:
        if name not in PLAN_SHAPES:
            raise InvalidRequest(
                f"plan_shapes holds {name!r}; pass some of {', '.join(PLAN_SHAPES)}"
            )
    return tuple(dict.fromkeys(names)) or ("prefix",)


def overlap(name: str) -> str:
    if name and name not in OVERLAPS:
        raise InvalidRequest(f"overlap is {name!r}; pass one of {', '.join(OVERLAPS)}")
    return name or "none"


# ---- Prompts ----


def query(
    attachment: Attachment, prompt: pb.Prompt, request_id: str, reuse: pb.ReuseHints | None
) -> Query:
    """A prompt as the store sees it; `reuse` is None when the message has no hints."""
    return Query(
        chain(attachment.space.spec, prompt),
        text("prompt.adapter", prompt.adapter),
        text("prompt.cache_salt", prompt.cache_salt),
        text("request_id", request_id),
        NO_HINTS if reuse is None else hints(reuse),
    )


def chain(spec: KVSpec, prompt: pb.Prompt) -> Chain:
    """Symbols of the full blocks; raises SpecMismatch for the other key mode's fields."""
    tokens, hashes = prompt.tokens, prompt.hashes
    if tokens and hashes:
        raise InvalidRequest("prompt has both tokens and hashes; pass the one of the space")
    if spec.key_mode == "tokens":
        if hashes:
            raise SpecMismatch("prompt.hashes: the space's key_mode is tokens; pass prompt.tokens")
        if len(tokens) % 4:
            raise InvalidRequest(f"prompt.tokens is {len(tokens)} bytes; pack 4 bytes a token")
        extra = prompt.extra
        return token_chain(tokens, spec.block_size, _extra_digests(extra) if extra else None)
    if tokens:
        raise SpecMismatch("prompt.tokens: the space's key_mode is external; pass prompt.hashes")
    if prompt.extra:
        raise InvalidRequest("prompt.extra: an external hash already covers extra keys; leave it")
    if not hashes:
        return Chain(())
    return hash_chain(hashes, prompt.hash_bytes)


def _extra_digests(entries: Sequence[pb.ExtraKeys]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for entry in entries:
        if entry.block in found:
            raise InvalidRequest(f"prompt.extra names block {entry.block} twice; join its keys")
        found[entry.block] = digest("prompt.extra.digest", entry.digest, EXTRA_DIGEST_BYTES)
    return found


def local_tokens(count: int, prompt: pb.Prompt, query: Query, block_size: int) -> int:
    """`count` if the prompt has that many tokens; hashes leave a partial last block out."""
    if not count:
        return 0
    tokens = len(prompt.tokens) // 4 or (query.chain.block_count + 1) * block_size - 1
    if count > tokens:
        raise InvalidRequest(f"local_tokens is {count} but the prompt has {tokens} tokens")
    return count


def hints(message: pb.ReuseHints) -> ReuseHints:
    if message.expect_reuse not in _EXPECT_REUSE:
        raise InvalidRequest(f"reuse.expect_reuse is {message.expect_reuse}; pass 0 to 3")
    return ReuseHints(
        text("reuse.session", message.session),
        message.turn,
        message.expect_reuse,
        seconds("reuse.expect_reuse_seconds", message.expect_reuse_seconds),
        message.priority,
        message.no_store,
    )


_EXPECT_REUSE = frozenset(pb.ExpectReuse.values())


def ask(request: pb.LookupRequest) -> Ask:
    """What a lookup tells of its request; a prompt of hashes has full blocks only."""
    tokens = len(request.prompt.tokens) // 4
    deadline = None
    if request.HasField("deadline_seconds"):
        deadline = seconds("deadline_seconds", request.deadline_seconds)
    if not request.HasField("load"):
        return Ask(tokens, deadline)
    load = request.load
    busy = ratio("load.gpu_busy_ratio", load.gpu_busy_ratio)
    return Ask(tokens, deadline, min(load.queued_prefill_tokens, PREFILL_TOKENS_MAX), busy)


# ---- Answers ----


def lookup_response(result: LookupResult, space: Space) -> pb.LookupResponse:
    # Assigning fields is twice as fast as keyword arguments, and this is the hottest answer.
    message = pb.LookupResponse()
    message.reason = result.reason
    plan = result.plan
    target = message.plan
    target.kind = plan.kind
    for step in plan.steps:
        added = target.steps.add()
        added.first_token = step.first_token
        added.token_count = step.token_count
        added.source = step.source
    if plan.predicted_p50_seconds is not None:
        target.predicted_p50_seconds = plan.predicted_p50_seconds
    if plan.predicted_p99_seconds is not None:
        target.predicted_p99_seconds = plan.predicted_p99_seconds
    if result.pending_tokens:
        message.pending_tokens = result.pending_tokens
    if result.matched_tokens:
        message.matched_tokens = result.matched_tokens
        message.restore_tokens = result.restore_tokens
    if result.lease_id:
        message.lease_id = result.lease_id
        message.lease_ttl_seconds = result.lease_ttl_seconds
    if result.slots is not None:
        message.first_block = result.slots.first_block
        fill_slots(message.slots, result.slots, space)
    return message


def fill_slots(target: pb.SlotRuns, slots: Slots, space: Space) -> None:
    places, generations, counts = encode_slots(
        slots.places, slots.generations, space.slot_bytes >> SLOT_SHIFT
    )
    target.places = places
    target.generations = generations
    target.counts = counts


def restore_response(item: Slots | FailedBlocks, space: Space) -> pb.RestoreResponse:
    """Blocks that are readable now, or that cannot be had this way."""
    if isinstance(item, FailedBlocks):
        return pb.RestoreResponse(
            first_block=item.first_block, block_count=item.block_count,
            failed_reason=item.reason, inline=item.inline,
        )  # fmt: skip
    message = pb.RestoreResponse(first_block=item.first_block, block_count=len(item.places))
    fill_slots(message.slots, item, space)
    return message


# ---- Put ----


def commit_runs(
    messages: Sequence[pb.CommitRun], staging: memoryview, space: Space, blocks_max: int
) -> list[CommitRun]:
    """Runs with their bytes in `staging`; ascending, within the segment, not too many."""
    runs, last, total = [], -1, 0
    size = len(staging)
    for message in messages:
        first, count, offset = message.first_block, message.block_count, message.staging_offset
        if not count:
            raise InvalidRequest("runs.block_count is 0; pass the blocks of the run")
        total += count
        if total > blocks_max:
            raise LimitReached(f"runs hold more than {blocks_max} blocks; send several Commits")
        if first <= last:
            raise InvalidRequest(f"runs.first_block {first} follows block {last}; sort the runs")
        last = first + count - 1
        end = offset + (count - 1) * space.slot_bytes + space.block_bytes
        if end > size:
            raise InvalidRequest(
                f"runs.staging_offset {offset} and {count} blocks end at byte {end}; "
                f"the staging segment has {size}"
            )
        runs.append(CommitRun(first, count, staging[offset:end], space.slot_bytes))
    if not runs:
        raise InvalidRequest("runs is empty; pass the blocks to commit")
    return runs


def prefill(parts: Sequence[pb.PrefillPart]) -> list[tuple[int, int]]:
    """(new, cached) tokens of each prompt in a step."""
    for part in parts:
        if not part.new_tokens:
            raise InvalidRequest("prefill.new_tokens is 0; leave empty parts out")
    return [(part.new_tokens, part.cached_tokens) for part in parts]


def lease_ids(ids: Sequence[int]) -> list[int]:
    return list(ids)


def notice_message(kind: str, value: Any) -> pb.Notice:
    """A store's notice: "draining" with seconds left, "lost_leases" with lease ids."""
    if kind == "draining":
        return pb.Notice(draining=True, drain_seconds=value)
    assert kind == "lost_leases", f"no message for a notice of kind {kind!r}"
    return pb.Notice(lost_leases=value)
