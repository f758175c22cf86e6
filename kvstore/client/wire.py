"""Words of `kvstore.core` to and from the protobuf messages; no decisions."""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from kvstore.core import errors
from kvstore.core.errors import InvalidRequest, KVStoreError
from kvstore.core.keys import pack_tokens
from kvstore.core.plan import PlanStep, RestorePlan, ReuseHints
from kvstore.core.spec import KVSpec
from kvstore.proto.v1 import kvstore_pb2 as pb

Tokens = Sequence[int] | np.ndarray
assert array.array("I").itemsize == 4, "token ids are packed as 4-byte unsigned integers"

ERRORS: dict[str, type[KVStoreError]] = {
    kind.code: kind
    for kind in (
        errors.InvalidRequest, errors.FailedPrecondition, errors.NotFound, errors.Unauthenticated,
        errors.PermissionDenied, errors.LimitReached, errors.Draining, errors.NotImplementedYet,
    )
}  # fmt: skip

_UINT32 = np.dtype("<u4")
MESSAGE_MARGIN_BYTES = 8192  # what a request holds beside its prompt


def error_of(code: str, message: str) -> KVStoreError:
    """The exception a status code and its sentence stand for."""
    return ERRORS.get(code, KVStoreError)(message)


def spec_message(spec: KVSpec) -> pb.KVSpec:
    return pb.KVSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__})


def token_bytes(token_ids: Tokens) -> bytes:
    """Packed ids; lists, the usual case, skip numpy, which takes four times as long for them."""
    if isinstance(token_ids, np.ndarray):
        if token_ids.dtype == _UINT32 and token_ids.ndim == 1:
            return token_ids.tobytes()
    elif isinstance(token_ids, (list, tuple)):
        try:
            packed = array.array("I", token_ids)
        except (OverflowError, TypeError):
            return pack_tokens(token_ids)
        return packed.tobytes()
    return pack_tokens(token_ids)


def fill_prompt(
    prompt: pb.Prompt,
    spec: KVSpec,
    token_ids: Tokens | None,
    hashes: Sequence[bytes] | None,
    adapter: str,
    cache_salt: str,
    extra_digests: Mapping[int, bytes] | None = None,
) -> int:
    """Writes a prompt and answers with its number of full blocks; raises InvalidRequest."""
    if adapter:
        prompt.adapter = adapter
    if cache_salt:
        prompt.cache_salt = cache_salt
    if extra_digests:
        for block in sorted(extra_digests):
            prompt.extra.add(block=block, digest=extra_digests[block])
    if spec.key_mode == "tokens":
        if token_ids is None or hashes is not None:
            raise InvalidRequest("the space's key_mode is 'tokens'; pass token_ids, not hashes")
        prompt.tokens = packed = token_bytes(token_ids)
        return len(packed) // (4 * spec.block_size)
    if hashes is None or token_ids is not None:
        raise InvalidRequest("the space's key_mode is 'external'; pass hashes, not token_ids")
    widths = {len(digest) for digest in hashes}
    if len(widths) > 1:
        raise InvalidRequest(f"hashes are {sorted(widths)} bytes long; pass one length for all")
    prompt.hash_bytes = widths.pop() if widths else 32
    prompt.hashes = b"".join(hashes)
    return len(hashes)


def fill_hints(message: pb.ReuseHints, hints: ReuseHints) -> None:
    message.session = hints.session
    message.turn = hints.turn
    message.expect_reuse = cast("pb.ExpectReuse", hints.expect_reuse)
    message.expect_reuse_seconds = hints.expect_reuse_seconds
    message.priority = hints.priority
    message.no_store = hints.no_store


def cut_prompt(prompt: pb.Prompt, symbols: bytes, symbol_bytes: int, stop: int) -> None:
    """Leaves the first `stop` blocks of `symbols` in the prompt."""
    kept = symbols[: stop * symbol_bytes]
    if prompt.hash_bytes:
        prompt.hashes = kept
    else:
        prompt.tokens = kept


def fit_prompt(prompt: pb.Prompt, spec: KVSpec, prompt_bytes: int) -> int:
    """Cuts a prompt longer than a message takes; answers with the number of blocks left.

    What is left is a prefix, so it finds and stores less, never something else.
    """
    symbols = prompt.tokens or prompt.hashes
    width = prompt.hash_bytes or 4 * spec.block_size
    room = prompt_bytes - (prompt.ByteSize() - len(symbols))
    if len(symbols) > room:
        cut_prompt(prompt, symbols, width, max(room, 0) // width)
    return len(prompt.tokens or prompt.hashes) // width


def plan_of(message: pb.Plan) -> RestorePlan:
    p50, p99 = (
        getattr(message, name) if message.HasField(name) else None
        for name in ("predicted_p50_seconds", "predicted_p99_seconds")
    )
    steps = tuple(PlanStep(s.first_token, s.token_count, s.source) for s in message.steps)
    return RestorePlan(message.kind, steps, p50, p99)
