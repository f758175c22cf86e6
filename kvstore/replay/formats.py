"""Trace files: Mooncake JSONL, read strictly and as a stream, plain or compressed.

One line is one request: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`,
one id for each block of the input, the last of which may cover less than a block. An id stands for
a block *and everything before it*, so equal ids are equal prefixes. Optional: `tenant`, `session`,
`block_size` (512 without it). Fields that nobody knows are ignored.
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated, cast

import msgspec
import zstandard

from kvstore.core.errors import InvalidRequest

BLOCK_SIZE = 512
LINE_BYTES_MAX = 16 << 20
ZSTD_LEVEL = 19
ZSTD_MAGIC, GZIP_MAGIC = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
BUNDLED = Path(__file__).parent / "data" / "mooncake_conversation_600s.jsonl.zst"

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class TraceError(InvalidRequest):
    """A trace file that cannot be used; the text names file, line and fault."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a trace."""

    timestamp: Count | Annotated[float, msgspec.Meta(ge=0, le=2.0**53)]
    input_length: Count
    output_length: Count
    hash_ids: list[Count]
    tenant: str = ""
    session: str = ""
    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = BLOCK_SIZE

    @property
    def full_blocks(self) -> int:
        """Blocks that the input fills; only these can be stored."""
        return self.input_length // self.block_size

    def covered_tokens(self, block: int) -> int:
        """Input tokens that lie in block number `block`."""
        return min(self.block_size, self.input_length - block * self.block_size)


class TraceChecker:
    """What holds between the lines of a trace: time goes forward, an id has one parent."""

    def __init__(self) -> None:
        self._time = 0.0
        self._block_size = 0
        self._parents: dict[int, int] = {}

    def check(self, request: TraceRequest) -> None:
        """Raises ValueError with the fault and the fix, without file and line."""
        needed = -(-request.input_length // request.block_size)
        if len(request.hash_ids) != needed:
            raise ValueError(
                f"hash_ids has {len(request.hash_ids)} ids, but {request.input_length} input "
                f"tokens in blocks of {request.block_size} need {needed}; give each block an id, "
                "or the block_size that they are of"
            )
        if request.timestamp < self._time:
            raise ValueError(
                f"timestamp {request.timestamp:g} is before the line above ({self._time:g}); "
                "sort the file by timestamp"
            )
        self._time = request.timestamp
        if request.block_size != (self._block_size or request.block_size):
            raise ValueError(
                f"block_size is {request.block_size}, above it was {self._block_size}; "
                "a trace has one block size"
            )
        self._block_size = request.block_size
        self._check_parents(request.hash_ids)

    def _check_parents(self, hash_ids: list[int]) -> None:
        parents, parent = self._parents, -1
        for hash_id in hash_ids:
            known = parents.setdefault(hash_id, parent)
            if known != parent:
                raise ValueError(
                    f"id {hash_id} follows {_name(parent)} here and {_name(known)} before; "
                    "an id stands for one prefix, so it has one predecessor"
                )
            parent = hash_id
        if len(set(hash_ids)) != len(hash_ids):
            raise ValueError("hash_ids holds an id twice; an id stands for one prefix")


def _name(parent: int) -> str:
    return "nothing" if parent < 0 else f"id {parent}"


def read_trace(path: str | Path, check: bool = True) -> Iterator[TraceRequest]:
    """The requests of a file, one at a time; raises TraceError.

    `check` off leaves out what holds between lines, for a file that was checked before.
    """
    checker = TraceChecker() if check else None
    decoder = msgspec.json.Decoder(TraceRequest)
    number = 0
    with open_trace(path) as stream:
        for number, line in enumerate(_lines(stream, path), start=1):
            try:
                request = decoder.decode(line)
                if checker is not None:
                    checker.check(request)
            except ValueError as error:
                raise TraceError(f"{path}, line {number}: {_explain(error)}") from None
            yield request
    if not number:
        raise TraceError(f"{path} holds no request; a trace has one JSON object a line")


def load_trace(path: str | Path, limit: int = 0) -> list[TraceRequest]:
    """The first `limit` requests of a file (0: all), checked; raises TraceError."""
    requests = []
    for request in read_trace(path):
        requests.append(request)
        if len(requests) == limit:
            break
    return requests


def _lines(stream: IO[bytes], path: str | Path) -> Iterator[bytes]:
    number = 0
    while True:
        number += 1
        try:
            line = stream.readline(LINE_BYTES_MAX + 1)
        except (OSError, EOFError, zstandard.ZstdError) as error:
            raise TraceError(
                f"{path}, line {number}: the file ends early or is damaged ({error}); "
                "fetch it again"
            ) from None
        if not line:
            return
        if len(line) > LINE_BYTES_MAX:
            raise TraceError(f"{path}, line {number}: longer than 16 MiB; one request a line")
        if line.strip():
            yield line


def _explain(error: ValueError) -> str:
    """msgspec's words, turned to one sentence that names the field."""
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        what, _, where = text.partition(" - at `$.")
        fix = "" if where else "; a request has timestamp, input_length, output_length and hash_ids"
        return f"{where.rstrip('`') or 'the line'}: {what[0].lower()}{what[1:]}{fix}"
    if isinstance(error, msgspec.DecodeError):
        return f"no valid JSON ({text}); one request is one JSON object on one line"
    return text


def open_trace(path: str | Path) -> IO[bytes]:
    """The uncompressed bytes of a file; its first bytes say how it is compressed."""
    try:
        raw = open(path, "rb")  # noqa: SIM115 (closed by what is answered)
    except OSError as error:
        raise TraceError(f"the trace {path} cannot be read ({error.strerror})") from error
    magic = raw.peek(4)[:4]
    if magic == ZSTD_MAGIC:
        stream = zstandard.ZstdDecompressor().stream_reader(
            raw, read_across_frames=True, closefd=True
        )
        return io.BufferedReader(stream, 1 << 18)
    if magic[:2] == GZIP_MAGIC:
        return cast(IO[bytes], _GzipReader(raw))
    return raw


class _GzipReader(gzip.GzipFile):
    """A GzipFile that closes the file below it too."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__(fileobj=raw)
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> int:
    """Writes a file, compressed if its name ends in .zst or .gz, and says how many requests.

    The file appears whole or not at all.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    encoder, count = msgspec.json.Encoder(), 0
    try:
        with _create(partial, path.suffix) as stream:
            for request in requests:
                stream.write(encoder.encode(request) + b"\n")
                count += 1
        partial.replace(path)
    except OSError as error:
        raise TraceError(f"the trace {path} cannot be written ({error.strerror})") from error
    finally:
        partial.unlink(missing_ok=True)
    return count


def _create(path: Path, suffix: str) -> IO[bytes]:
    if suffix == ".zst":
        compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        return cast(IO[bytes], zstandard.open(path, "wb", cctx=compressor))
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "wb"))
    return open(path, "wb")
