"""`Space`: what an engine looks up in, restores from and puts to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor

import numpy as np

from kvstore.client import inline, watching
from kvstore.client.buffers import BlockBuffers, Blocks, BlockSource, Buffers
from kvstore.client.link import Link
from kvstore.client.located import Located
from kvstore.client.match import Match
from kvstore.client.put import Put, PutHandle, PutResult
from kvstore.client.session import Attachment
from kvstore.client.watching import BlockEvent
from kvstore.client.wire import Tokens, fill_hints, fill_prompt, fit_prompt
from kvstore.core.errors import InvalidRequest, NotFound
from kvstore.core.plan import ReuseHints
from kvstore.core.spec import KVSpec
from kvstore.proto.v1 import kvstore_pb2 as pb


class Space:
    """One KVSpec of one tenant, and one shard of it. Made by `KVClient.attach`; any thread may
    use it. When the daemon comes back it is attached again by itself.
    """

    def __init__(
        self, link: Link, executor: Executor, spec: KVSpec, tenant: str, shard: int,
        engine_id: str, plan_shapes: Sequence[str], overlap: str, engine_build: str = "",
        device: str = "", prefill_chunk_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.tenant = tenant
        self.shard = shard
        self.engine_id = engine_id
        self.plan_shapes = tuple(plan_shapes)
        self.overlap = overlap
        self.engine_build = engine_build
        self.device = device
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self._link = link
        self._executor = executor
        self.attached: Attachment | None = None  # the latest, as long as its session lasts

    def __repr__(self) -> str:
        return f"Space({self.spec.model!r}, tenant={self.tenant!r}, shard={self.shard})"

    @property
    def space_id(self) -> bytes:
        """What the daemon tells this space from others by, 32 bytes."""
        return self._link.attachment(self).space_id

    @property
    def epoch(self) -> int:
        """The space's epoch when it was last attached; blocks of earlier ones are gone."""
        return self._link.attachment(self).epoch

    # ---- Lookup and restore ----

    def lookup(
        self,
        token_ids: Tokens | None = None,
        *,
        hashes: Sequence[bytes] | None = None,
        adapter: str = "",
        cache_salt: str = "",
        request_id: str | None = None,
        deadline_seconds: float | None = None,
        local_tokens: int = 0,
        extra_digests: Mapping[int, bytes] | None = None,
        hints: ReuseHints | None = None,
        queued_prefill_tokens: int = 0,
        gpu_busy_ratio: float = 0.0,
    ) -> Match:
        """The longest stored prefix of a prompt, leased, with a plan of what is worth loading.

        `local_tokens` are in the engine already. `extra_digests` maps a block's position to a
        32-byte digest of what else its KV depends on. A repeat with the same `request_id` and
        prompt shares one lease.
        """
        attachment = self._link.attachment(self)
        session, spec, limit = attachment.session, self.spec, self._link.timeouts.call_seconds
        request = pb.LookupRequest()
        request.attachment = attachment.number
        prompt = request.prompt
        fill_prompt(prompt, spec, token_ids, hashes, adapter, cache_salt, extra_digests)
        if prompt.ByteSize() > session.prompt_bytes:
            fit_prompt(prompt, spec, session.prompt_bytes)
        if local_tokens:
            request.local_tokens = local_tokens
        if request_id:
            request.request_id = request_id
        if deadline_seconds is not None:
            request.deadline_seconds = deadline_seconds
        if hints is not None:
            fill_hints(request.reuse, hints)
        if queued_prefill_tokens or gpu_busy_ratio:
            request.load.queued_prefill_tokens = queued_prefill_tokens
            request.load.gpu_busy_ratio = gpu_busy_ratio
        before = session.clock.now()
        response = session.call("Lookup", request, limit, session.late_lookup)
        lease = None
        lease_id = response.lease_id
        if lease_id:
            ttl = response.lease_ttl_seconds
            lease = session.leases.hold(lease_id, request_id or "", before, ttl)
        return Match(response, attachment, lease, spec.block_size, local_tokens)

    def restore(self, match: Match, *, partial: bool = False) -> list[memoryview]:
        """A read-only view of each block that the plan loads; waits until all are in memory.

        Raises NotFound if one cannot be had, or comes so late that computing all is faster. With
        `partial` the blocks before it are restored then, and `match` says which those are:
        `ranges`, `restore_tokens` and `reason` change. Ranks of an engine have to agree on the
        fewest. A split is never restored in part.

        The views are the store's own memory: what was read is right only if `match.check()`
        passes afterwards, and they must not be read after `match.release()`. They are copies where
        the store's memory is not mapped or has no room for all of the blocks.
        """
        if not match.block_count:
            return []
        attachment = self._readable(match)
        located = self._place(match, partial) if attachment.pools else None
        if not match.block_count:
            return []
        if located is None or located.inline:
            copies = np.empty((match.block_count, attachment.block_bytes), np.uint8)
            self.restore_into(match, copies)
            return [row.data.toreadonly() for row in copies]
        views = located.views()
        match.check()
        return views

    def restore_into(self, match: Match, buffers: Buffers, *, partial: bool = False) -> None:
        """Copies the blocks that the plan loads into `buffers` and makes sure of them.

        `buffers` is one contiguous writable buffer of exactly `match.block_count` blocks, or a
        sequence of one buffer a block. Raises LeaseLost when the bytes may be others by now;
        what is in the buffers then is worthless. With `partial`, as in `restore`, only the first
        `match.block_count` buffers are filled, by what that is afterwards.
        """
        attachment, count = self._readable(match), match.block_count
        first = match.ranges[0].start if count else 0
        width = attachment.block_bytes
        target = BlockBuffers(buffers, count, width, "buffers", first, writable=True)
        if not count:
            return
        if not attachment.pools:
            inline.fetch(match, target, self._link.timeouts.put_seconds)
            return
        self._copy(match, target, partial)

    def _copy(self, match: Match, target: BlockBuffers, partial: bool) -> None:
        """Copies from the pools, and has sent what the daemon had no room for in them."""
        located = self._place(match, partial)
        located.copy(target)
        match.check()
        for blocks in located.inline:
            inline.fetch_range(match, blocks, target, self._link.timeouts.put_seconds)

    @property
    def attach_seconds(self) -> float:
        """Time limit of calls that set something up."""
        return self._link.timeouts.attach_seconds

    def locate(self, match: Match, *, partial: bool = False) -> Located | None:
        """Where the blocks that the plan loads lie, once all are in memory; None without pools.

        For copies of the caller's own making, which count only if `match.check()` passes after
        them. Raises, and shortens `match`, as `restore` does.
        """
        attachment = self._readable(match)
        return self._place(match, partial) if match.block_count and attachment.pools else None

    def fetch(self, match: Match, rows: np.ndarray, blocks: Sequence[range]) -> None:
        """Has blocks sent that lie in no pool; `rows` has one for each block that is loaded."""
        target = BlockBuffers(
            rows, match.block_count, match.attachment.block_bytes, "rows",
            match.ranges[0].start, writable=True,
        )  # fmt: skip
        for part in blocks:
            inline.fetch_range(match, part, target, self._link.timeouts.put_seconds)

    def _readable(self, match: Match) -> Attachment:
        self._link.check_process()
        if match.block_count:
            match.check_lease()
        return match.attachment

    def _place(self, match: Match, partial: bool = False) -> Located:
        """Where the blocks lie, once the daemon has brought what was in no pool yet."""
        located, partial = match.located, partial and len(match.ranges) == 1
        if located.complete:
            return located
        for blocks in located.missing():
            assert match.lease is not None
            if blocks.start >= match.ranges[-1].stop:
                break  # behind what was left out meanwhile
            request = pb.RestoreRequest(
                lease_id=match.lease.id, first_block=blocks.start, block_count=len(blocks),
                partial=partial,
            )  # fmt: skip
            limit, awaited = self._link.timeouts.put_seconds, len(blocks)
            for part in match.attachment.session.stream("Restore", request, limit):
                if part.inline or not part.failed_reason:
                    if part.inline:
                        located.send_inline(part.first_block, part.block_count)
                    else:
                        located.add(part.first_block, part.slots)
                    awaited -= part.block_count
                    if not awaited:
                        break  # the end of the stream would be news of nothing
                elif partial:
                    match.shorten(part.first_block, part.failed_reason)
                else:
                    raise NotFound(
                        f"blocks {part.first_block} to {part.first_block + part.block_count - 1} "
                        f"cannot be had: {part.failed_reason}; recompute them"
                    )
        if left := located.missing():
            raise NotFound(f"the daemon did not say where block {left[0].start} is; recompute it")
        return located

    def events(
        self, from_sequence: int = 0, *, silence_seconds: float = 60.0
    ) -> Iterator[BlockEvent]:
        """The space's KV events from a sequence number on, 0 for those to come, as they come.

        Ends when none came for `silence_seconds`; go on with the last one's sequence + 1.
        """
        return watching.events(self._link.attachment(self), from_sequence, silence_seconds)

    # ---- Put ----

    def put(
        self,
        token_ids: Tokens | None = None,
        blocks: Blocks = (),
        first_block: int = 0,
        *,
        hashes: Sequence[bytes] | None = None,
        adapter: str = "",
        cache_salt: str = "",
        request_id: str | None = None,
        extra_digests: Mapping[int, bytes] | None = None,
        hints: ReuseHints | None = None,
    ) -> PutResult:
        """Stores the full blocks of a prompt from `first_block` on.

        `blocks` holds their bytes: one contiguous buffer, a sequence of one buffer a block, or a
        function from a block's position to its buffer, which is called for wanted blocks only; or
        a `BlockSource`.
        """
        attachment = self._link.attachment(self)
        request = pb.ReserveRequest(attachment=attachment.number, first_block=first_block)
        prompt = request.prompt
        stop = fill_prompt(prompt, self.spec, token_ids, hashes, adapter, cache_salt, extra_digests)
        if not 0 <= first_block <= stop:
            raise InvalidRequest(f"first_block is {first_block}; the prompt has {stop} full blocks")
        width, count = attachment.block_bytes, stop - first_block
        source = blocks
        if not isinstance(source, BlockSource):
            source = BlockBuffers(blocks, count, width, "blocks", first_block)
        left_out = 0
        if prompt.ByteSize() > attachment.session.prompt_bytes:
            fit = fit_prompt(prompt, self.spec, attachment.session.prompt_bytes)
            left_out = min(count, stop - fit)
            count -= left_out
        if not count:
            return PutResult().and_left_out(left_out)
        request.request_id = request_id or ""
        if hints is not None:
            fill_hints(request.reuse, hints)
        limit = self._link.timeouts.put_seconds
        symbol_bytes = prompt.hash_bytes or 4 * self.spec.block_size
        if attachment.session.staging is None:
            result = inline.put(attachment, request, source, count, symbol_bytes, limit)
        else:
            put = Put(attachment, request, source, first_block, count, symbol_bytes, limit)
            result = put.run()
        return result.and_left_out(left_out)

    def put_async(
        self,
        token_ids: Tokens | None = None,
        blocks: Blocks = (),
        first_block: int = 0,
        *,
        hashes: Sequence[bytes] | None = None,
        adapter: str = "",
        cache_salt: str = "",
        request_id: str | None = None,
        extra_digests: Mapping[int, bytes] | None = None,
        hints: ReuseHints | None = None,
    ) -> PutHandle:
        """As `put`, on the client's own thread, one after the other in the order of the calls.

        `token_ids` and `blocks` must not change until the handle is done.
        """
        self._link.attachment(self)
        future = self._executor.submit(
            self.put, token_ids, blocks, first_block, hashes=hashes, adapter=adapter,
            cache_salt=cache_salt, request_id=request_id, extra_digests=extra_digests,
            hints=hints,
        )  # fmt: skip
        return PutHandle(future)

    # ---- Reports ----

    def finish_request(
        self,
        request_id: str,
        output_tokens: int = 0,
        *,
        hints: ReuseHints | None = None,
        finish_reason: str = "",
        pending_tool_calls: bool = False,
    ) -> None:
        """The request is over: its leases end, and what is known of its reuse is told."""
        attachment = self._link.attachment(self)
        request = pb.FinishRequestRequest(
            attachment=attachment.number,
            request_id=request_id,
            output_tokens=output_tokens,
            finish_reason=finish_reason,
            pending_tool_calls=pending_tool_calls,
        )
        if hints is not None:
            fill_hints(request.reuse, hints)
        attachment.session.leases.finish(request_id)
        attachment.session.call("FinishRequest", request, self._link.timeouts.call_seconds)

    def report_step(
        self,
        seconds: float,
        prefill: Iterable[tuple[int, int] | tuple[int, int, str]] = (),
        *,
        decode_tokens: int = 0,
        decode_context_tokens: int = 0,
        clock: str = "wall",
    ) -> None:
        """Measured seconds of one engine step.

        `prefill` holds (new tokens, cached tokens) of each sequence, and the `request_id` of its
        lookup as a third if the daemon shall tell what its plan took; `clock` says how the time was
        taken: `device`, `cpu` or `wall`.
        """
        attachment = self._link.attachment(self)
        parts = [
            pb.PrefillPart(new_tokens=new, cached_tokens=cached, request_id="".join(request))
            for new, cached, *request in prefill
        ]
        request = pb.ReportStepRequest(
            attachment=attachment.number,
            seconds=seconds,
            prefill=parts,
            decode_tokens=decode_tokens,
            decode_context_tokens=decode_context_tokens,
            clock=clock,
        )
        attachment.session.call("ReportStep", request, self._link.timeouts.call_seconds)

    def report_transfer(
        self, link: str, transferred_bytes: int, seconds: float, *, match: Match | None = None
    ) -> None:
        """Measured seconds of one of the engine's own copies over `link`, such as `host>hbm`.

        With the `match` that it restored, the daemon can tell how good its prediction was.
        """
        attachment = self._link.attachment(self)
        request = pb.ReportTransferRequest(
            attachment=attachment.number, link=link, bytes=transferred_bytes, seconds=seconds
        )
        if match is not None and match.lease is not None:
            request.lease_id = match.lease.id
        attachment.session.call("ReportTransfer", request, self._link.timeouts.call_seconds)
