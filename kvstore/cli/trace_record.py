"""`kvstore trace record`: the requests of a live daemon as a trace, without a token of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.admin import connected, counted, duration_text, duration_value, spinner
from kvstore.cli.output import finish, json_option, print_json, socket_option
from kvstore.core.errors import FailedPrecondition

if TYPE_CHECKING:
    from kvstore.client import KVClient
    from kvstore.replay.recording import RecordedTrace

AS_ASKED = ("seconds", "requests", "stopped")


@click.command()
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Where it is written, compressed as its name says (.zst, .gz).",
)  # fmt: skip
@click.option(
    "--seconds", type=duration_value, default=None, metavar="DURATION",
    help="End after so long, such as 90, 15m or 2h; else Ctrl-C ends it.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), default=0, help="End after N requests.")
@click.option(
    "--block-size", type=click.IntRange(1, 4096), default=None, metavar="TOKENS",
    help="Of the trace; else that of the first request.",
)  # fmt: skip
@click.option("--pseudonyms", is_flag=True, help="Call tenants t1, t2, ...")
@click.option("--force", is_flag=True, help="Replace a FILE that is there.")
@click.option("--stop", is_flag=True, help="End the recording that is under way, and do no more.")
@socket_option
@json_option
def record(
    out: Path | None,
    seconds: float | None,
    limit: int,
    block_size: int | None,
    pseudonyms: bool,
    force: bool,
    stop: bool,
    socket: str | None,
    as_json: bool,
) -> None:
    """Record the requests that reach a running daemon, as a trace for simulate and tune.

    It has when requests came, how long they were, and which of their blocks are equal, as numbers
    that lead back to no token; of sessions it has numbers, of tenants their names unless
    --pseudonyms. The length of an output is known once the engine finishes the request (within
    ten minutes), else it is 0. Blocks are as large as statistics are: the daemon's, or 128 tokens
    if those are smaller; requests whose blocks do not fit --block-size are left out and counted.

    One recording at a time; it ends with this command, and with the daemon. Exit 1 if it was cut
    short; what came until then is kept.
    """
    if stop:
        _stop(socket, as_json)
        return
    context = click.get_current_context()
    if out is None:
        raise click.UsageError("--out is missing; name the file to write", context)
    if out.exists() and not force:
        raise click.UsageError(f"{out} is there already; name another file or --force", context)
    from kvstore.replay.formats import write_trace
    from kvstore.replay.recording import RecordedTrace

    trace = RecordedTrace(pseudonyms)
    with connected(socket) as client:
        write_trace(out, _requests(client, trace, block_size or 0, seconds or 0.0, limit))
    if as_json:
        print_json(_document(out, trace))
    else:
        click.echo(_text(out, trace))
    finish(trace.ended in AS_ASKED)


def _stop(socket: str | None, as_json: bool) -> None:
    with connected(socket) as client:
        count = client.admin.trace_stop().request_count
    if as_json:
        print_json({"requests": count})
    else:
        click.echo(f"the recording is over, with {counted(count, 'request')}")


def _requests(
    client: KVClient, trace: RecordedTrace, block_size: int, seconds: float, limit: int
) -> Iterator[Any]:
    """The requests as they come; the first Ctrl-C has the daemon end the recording."""
    with ExitStack() as stack:
        interrupted = stack.enter_context(_interruptions())
        say = stack.enter_context(spinner("recording: no request yet"))
        has_begun = is_stopping = False

        def heard() -> None:
            nonlocal has_begun, is_stopping
            if not has_begun:
                has_begun = True
                click.echo("recording; Ctrl-C ends it", err=True)
            waiting = f", {trace.held:,} wait for their end" if trace.held else ""
            say(f"recording: {counted(trace.requests, 'request')}{waiting}")
            if interrupted and not is_stopping and not trace.ended:
                is_stopping = True
                _ask_to_stop(client)

        yield from trace.follow(client.admin.trace_start(block_size, seconds, limit), heard)


def _ask_to_stop(client: KVClient) -> None:
    with suppress(FailedPrecondition):  # it ended by itself just now
        client.admin.trace_stop()


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """Signals that came; the second one interrupts as ever."""
    came: list[int] = []
    before: dict[int, Any] = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: Any) -> None:
        came.append(number)
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, note)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _document(out: Path, trace: RecordedTrace) -> dict[str, Any]:
    return {
        "trace": str(out),
        "requests": trace.requests,
        "block_size": trace.block_size,
        "seconds": trace.seconds,
        "without_output": trace.without_output,
        "left_out": trace.left_out,
        "ended": trace.ended,
    }


def _text(out: Path, trace: RecordedTrace) -> str:
    parts = [f"{counted(trace.requests, 'request')} in {duration_text(trace.seconds)}"]
    if trace.without_output:
        parts.append(f"{trace.without_output:,} without the length of their output")
    if trace.left_out:
        parts.append(f"{trace.left_out:,} more left out for blocks of another size")
    ended = "" if trace.ended in AS_ASKED else f"; it was cut short: {trace.ended}"
    return f"{', '.join(parts)} written to {out}{ended}"
