"""The page of the demo of a real engine: its turns, and what computing and restoring cost here."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from kvstore.core.sizes import format_bytes
from kvstore.policies.cost import CallCost, LinkCost
from kvstore.replay.report import STYLE
from kvstore.replay.report_charts import (
    Axis,
    Point,
    Series,
    line_chart,
    seconds_axis,
    sizes_axis,
    table,
)

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
HOST_LINK, DISK_LINK = "host>hbm", "disk>host"
COLUMNS = (
    "user", "turn", "prompt", "from host", "from disk", "computed", "first token", "without",
    "same answer", "why",
)  # fmt: skip
Curve = Callable[[int], float]


def page(result: dict[str, Any]) -> str:
    """One HTML page that needs nothing else."""
    curves = curves_of(result["costs"], result["bytes_per_token"])
    chart = _chart(curves, result["turns"]) if curves else "<p>Nothing was measured.</p>"
    models = "".join(f"<li>{escape(line)}</li>" for line in model_lines(result["costs"]))
    style = STYLE.read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvstore: {escape(result['model'])}</title><style>{style}</style></head><body>"
        f"<main><h1>{escape(result['model'])}, with the store and without</h1>"
        f'<p class="lead">First tokens took <b>{result["ttft_ratio"]:.1%}</b> of what they take '
        "without the store, over all turns.</p>"
        f'<figure class="card"><h3>Seconds to have a prompt of so many tokens ready</h3>{chart}'
        "<figcaption>Lines are the cost models that the daemon learned in this run; both axes are "
        "logarithmic. What is named measured are the turns as computed without the store."
        f"</figcaption></figure><ul>{models}</ul>"
        f"<h2>Turns</h2>{_turns(result['turns'])}</main></body></html>\n"
    )


def curves_of(costs: dict[str, Any], bytes_per_token: float) -> dict[str, Curve]:
    """Predicted seconds by the number of tokens: all computed, and restored by each way."""
    curves: dict[str, Curve] = {}
    if costs["recompute"]:
        compute = CallCost(*(costs["recompute"][name] for name in CallCost._fields))
        curves["compute"] = lambda tokens: compute.seconds(tokens, 0)
    links = {
        name: LinkCost(*(link[field] for field in LinkCost._fields))
        for name, link in costs["links"].items()
    }
    if HOST_LINK in links:
        host = links[HOST_LINK]
        curves["from host"] = lambda tokens: host.seconds(int(tokens * bytes_per_token))
        if DISK_LINK in links:
            disk = links[DISK_LINK]
            curves["from disk"] = lambda tokens: (
                disk.seconds(int(tokens * bytes_per_token))
                + host.seconds(int(tokens * bytes_per_token))
            )
    return curves


def _chart(curves: dict[str, Curve], turns: list[dict[str, Any]]) -> str:
    series = []
    for (name, curve), colour in zip(curves.items(), ("base", "c0", "c1"), strict=False):
        points = [Point(n, curve(n), f"{n} tokens, {curve(n):.3g} s") for n in LENGTHS]
        series.append(Series(name, colour, points))
    measured = sorted(
        Point(t["prompt_tokens"], t["ttft_alone_seconds"], f"{t['prompt_tokens']} tokens, measured")
        for t in turns
    )
    series.append(Series("measured", "c2", measured))
    x: Axis = sizes_axis([(n, f"{n:,}") for n in LENGTHS])
    y = seconds_axis([point.y for one in series for point in one.points])
    return line_chart("Seconds by prompt length", series, x, y)


def model_lines(costs: dict[str, Any]) -> list[str]:
    """Each model in a sentence."""
    lines = []
    if compute := costs["recompute"]:
        lines.append(
            f"compute n tokens on p: {_time(compute['call_seconds'])} + "
            f"{_time(compute['token_seconds'])} n + {_time(compute['pair_seconds'])} n (p + n/2) "
            f"({_state(compute)})"
        )
    for name, link in sorted(costs["links"].items()):
        rate = format_bytes(int(1 / link["byte_seconds"])) if link["byte_seconds"] else "any"
        lines.append(
            f"{name}: {_time(link['latency_seconds'])} + bytes at {rate}/s ({_state(link)})"
        )
    return lines


def _state(model: dict[str, Any]) -> str:
    """How sure a model is."""
    known = model["state"] if not model["state_reason"] else f"{model['state']}: "
    known += model["state_reason"]
    return f"{known}, {model['samples']} samples"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _turns(turns: list[dict[str, Any]]) -> str:
    cells = [[escape(cell) for cell in turn_cells(turn)] for turn in turns]
    # Sentences want the whole width: in a column they would have the page scroll.
    reasons = "".join(f"<li>{user} {turn}: {why}</li>" for user, turn, *_, why in cells)
    shown = table(COLUMNS[:-1], [[row[:-1] for row in cells]], left=1)
    return f"{shown}<h3>Why</h3><ul>{reasons}</ul>"


def turn_cells(turn: dict[str, Any]) -> list[str]:
    """A turn as a table shows it, in the order of COLUMNS."""
    restored = turn["restored_tokens"]
    return [
        turn["user"],
        str(turn["turn"]),
        f"{turn['prompt_tokens']:,}",
        f"{restored['host']:,}",
        f"{restored['disk']:,}",
        f"{turn['computed_tokens']:,}",
        f"{turn['ttft_seconds']:.2f} s",
        f"{turn['ttft_alone_seconds']:.2f} s",
        "yes" if turn["is_same_answer"] else "no",
        turn["problem"] or turn["reason"],
    ]
