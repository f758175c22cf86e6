"""`kvstore demo --engine`: a small real model answers users over one long system prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvstore.cli.output import finish, print_json, print_table

POOL_BYTES, DISK_BYTES = 512 << 20, 1 << 30


def run(path: Path | None, report: Path | None, as_json: bool) -> None:
    """The whole demo; exit 1 if a restored byte or an answer was another."""
    result = _chat(path, quiet=as_json)
    if report is not None:
        from kvstore.replay.chat_report import page
        from kvstore.replay.report import write_page

        write_page(report, page(result))
    if as_json:
        print_json(result)
    else:
        _show(result)
        if report is not None:
            click.echo(f"The page with the plot is {report}.")
    finish(not result["wrong_bytes"] and not result["different_answers"])


def _chat(path: Path | None, quiet: bool) -> dict[str, Any]:
    from kvstore.cli.replay import SHORT_LEASES
    from kvstore.engines import smollm2
    from kvstore.replay.chat import Chat, ChatDemo
    from kvstore.replay.chat_script import QUESTIONS, system_prompt
    from kvstore.replay.own_daemon import OwnDaemon, fitting_pool_bytes
    from kvstore.replay.own_disk import disk_section, fitting_disk_bytes, own_disk

    model, tokenizer = smollm2.load()
    chat = Chat(
        model,
        smollm2.NAME,
        lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        lambda ids: str(tokenizer.decode(ids)).strip(),
        [int(tokenizer.convert_tokens_to_ids("<|im_end|>"))],
        system_prompt(),
        QUESTIONS,
    )
    with own_disk(path) as disk:
        size = fitting_disk_bytes(disk, DISK_BYTES)
        sections = {**SHORT_LEASES, "tiers.disk": disk_section(disk, size)}
        with OwnDaemon(fitting_pool_bytes(POOL_BYTES), sections) as daemon:
            if not quiet:
                users = len(QUESTIONS)
                click.echo(f"{smollm2.NAME} on this processor; {users} users, one system prompt.\n")
            return ChatDemo(chat, daemon, disk).run(None if quiet else _tell)


def _tell(told: Any) -> None:
    """A turn, or what happened between two."""
    if isinstance(told, str):
        click.echo(f"\n{told}\n")
        return
    came = ", ".join(
        f"{count:,} from {tier}" for tier, count in told.restored_tokens.items() if count
    )
    click.echo(f"{told.user}: {told.question}\n  {' '.join(told.answer.split())}")
    click.echo(
        f"  {told.prompt_tokens:,} tokens: {came or 'nothing'} restored, {told.computed_tokens:,} "
        f"computed; first token after {told.ttft_seconds:.2f} s, without the store "
        f"{told.ttft_alone_seconds:.2f} s"
    )
    click.echo(f"  {told.problem or told.reason}")


def _show(result: dict[str, Any]) -> None:
    from kvstore.replay.chat_report import COLUMNS, model_lines, turn_cells

    click.echo("")
    turns = result["turns"]
    print_table(list(COLUMNS[:-1]), [turn_cells(turn)[:-1] for turn in turns])
    rows = [
        ("first tokens, of those without", f"{result['ttft_ratio']:.1%}"),
        ("other answers", str(result["different_answers"])),
        ("wrong bytes", f"{result['wrong_bytes']:,}"),
        ("logits differ by at most", f"{result['logits_difference_max']:.1e}"),
    ]
    print_table(["", "demo"], rows)
    click.echo(
        "What is restored are the very bytes that were stored. Logits differ in their last digits\n"
        "from those of one call over the whole prompt, as sums of other shapes round otherwise."
    )
    click.echo("\nWhat things cost here, as the daemon has learned it:")
    for line in model_lines(result["costs"]):
        click.echo(f"  {line}")
