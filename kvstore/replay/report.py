"""The report of a simulation: one HTML page that needs nothing else, with plots as inline SVG."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from kvstore.core.errors import InvalidRequest
from kvstore.core.sizes import format_bytes
from kvstore.replay.report_charts import (
    Axis,
    Band,
    Point,
    Series,
    line_chart,
    percent_axis,
    seconds_axis,
    sizes_axis,
    table,
)
from kvstore.replay.simulate import share_text

STYLE = Path(__file__).parent / "data" / "report.css"
COLOURS = 10
# These have colours of their own wherever they are.
FIXED_COLOURS = {"lru": "base", "saved_time": "c0", "gdsf": "c1"}
NO_STORE = "no store"
CDF_TICKS = ((0, "0%"), (25, "25%"), (50, "50%"), (75, "75%"), (90, "90%"), (99, ""), (100, "100%"))

COLUMNS = (
    "policy", "tiers", "token hits", "seconds saved", "gap closed", "TTFT p50", "p99",
    "prefill left p99",
)  # fmt: skip

Document = dict[str, Any]
Result = dict[str, Any]


def write_report(path: Path, document: Document) -> None:
    """Writes the page of what `simulate` answered."""
    write_page(path, page(document))


def write_page(path: Path, text: str) -> None:
    """Writes a page; it appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise InvalidRequest(f"the report {path} cannot be written ({error.strerror})") from error
    finally:
        partial.unlink(missing_ok=True)


def page(document: Document) -> str:
    """The whole page of what `simulate` answered."""
    results: list[Result] = document["results"]
    colours = colours_of(list(dict.fromkeys(result["policy"] for result in results)))
    name = Path(document["trace"]).name
    body = "".join([
        _head(document, name),
        _capacity_section(results, colours),
        _ttft_section(document, colours),
        _links_section(results, colours),
        _table_section(results, colours),
        _notes(),
    ])  # fmt: skip
    style = STYLE.read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: simulated policies</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def colours_of(policies: list[str]) -> dict[str, str]:
    """A colour for each policy."""
    free = [f"c{i}" for i in range(COLOURS) if f"c{i}" not in FIXED_COLOURS.values()]
    others = [policy for policy in policies if policy not in FIXED_COLOURS]
    chosen = {policy: free[i % len(free)] for i, policy in enumerate(others)}
    return {policy: FIXED_COLOURS.get(policy) or chosen[policy] for policy in policies}


def _head(document: Document, name: str) -> str:
    block_bytes = _block_bytes(document["results"][0])
    unique = format_bytes(document["unique_blocks"] * block_bytes)
    facts = [
        ("requests", f"{document['requests']:,}"),
        ("unique blocks", f"{document['unique_blocks']:,} ({unique})"),
        ("block", f"{document['block_size']} tokens, {format_bytes(block_bytes)}"),
        ("engines", str(document["engine_count"])),
    ]
    what_if = ""
    if document["what_if"]:
        what_if = (
            f'<p class="note">What if: hints were made from the trace\'s own future and are right '
            f"in {document['hints']:.0%} of cases. No engine knows this much.</p>"
        )
    listed = "".join(f"<span>{label} <b>{value}</b></span>" for label, value in facts)
    return (
        f'<h1>{escape(name)}</h1><div class="facts">{listed}</div>'
        f'<p class="lead">{_lead(document["results"])}</p>{what_if}'
    )


def _lead(results: list[Result]) -> str:
    """What a person should take away."""
    best = max(results, key=lambda r: (_gain(r, results), r["prefill_seconds_saved_ratio"]))
    lru = _same_size(best, "lru", results)
    low, high = best["optimum"]["prefill_seconds_saved_ratio_bounds"]
    bound = _range(low, high)
    text = f"With {_size_text(best)}, <b>{escape(best['policy'])}</b> saves "
    text += f"<b>{best['prefill_seconds_saved_ratio']:.1%}</b> of all prefill seconds"
    if lru is not None and lru is not best:
        text += f", where least recently used saves {lru['prefill_seconds_saved_ratio']:.1%}"
    return text + f" and no policy could save more than {bound}."


def _figure(title: str, chart: str, caption: str) -> str:
    return (
        f'<figure class="card"><h3>{title}</h3>{chart}<figcaption>{caption}</figcaption></figure>'
    )


def _range(low: float, high: float) -> str:
    """Bounds, as one number where they agree."""
    if f"{low:.1%}" == f"{high:.1%}":
        return f"{high:.1%}"
    return f"{high:.1%} (the best possible is {low:.1%} or more)"


def _gain(result: Result, results: list[Result]) -> float:
    lru = _same_size(result, "lru", results)
    base = 0.0 if lru is None else lru["prefill_seconds_saved_ratio"]
    return float(result["prefill_seconds_saved_ratio"] - base)


def _same_size(result: Result, policy: str, results: list[Result]) -> Result | None:
    wanted = _capacities(result)
    same = (r for r in results if r["policy"] == policy and _capacities(r) == wanted)
    return next(same, None)


def _capacities(result: Result) -> tuple[int, ...]:
    """Blocks of host, and of disk if there is one; a tier hbm is of one size in all results."""
    tiers = result["tiers"].items()
    return tuple(tier["capacity_blocks"] for name, tier in tiers if name != "hbm")


def _block_bytes(result: Result) -> int:
    host = result["tiers"]["host"]
    return int(host["capacity_bytes"] // host["capacity_blocks"])


def _size_text(result: Result) -> str:
    parts = [
        f"{share_text(tier)} of the blocks in {name}" for name, tier in result["tiers"].items()
    ]
    return " and ".join(parts)


def _facets(results: list[Result]) -> Iterator[tuple[str, str, list[Result]]]:
    """(title, tier along the axis, results): one facet, or one a host size where both vary."""
    hosts = {_capacities(r)[0] for r in results}
    disks = {_capacities(r)[1:] for r in results}
    if len(disks) == 1:
        rest = results[0]["tiers"].get("disk")
        yield ("" if rest is None else f"disk {share_text(rest)}"), "host", results
        return
    for host in sorted(hosts):
        some = [r for r in results if _capacities(r)[0] == host]
        yield f"host {share_text(some[0]['tiers']['host'])}", "disk", some


def _capacity_section(results: list[Result], colours: dict[str, str]) -> str:
    cards = []
    for title, tier, some in _facets(results):
        for heading, name, bounds in (
            ("Prefill seconds saved", "prefill_seconds_saved_ratio", True),
            ("Token hits", "token_hit_ratio", False),
        ):
            chart = _capacity_chart(some, tier, name, bounds, colours)
            where = f" <span class='soft'>{title}</span>" if title else ""
            caption = f"over {tier} capacity, as a share of the trace's unique blocks"
            cards.append(_figure(heading + where, chart, caption))
    return (
        "<h2>What each policy saves</h2><p class='soft'>The dashed line is the offline optimum, "
        "which knows the future; a grey band is what is between its lower and upper bound.</p>"
        f'<div class="grid">{"".join(cards)}</div>'
    )


def _capacity_chart(
    results: list[Result], tier: str, name: str, bounds: bool, colours: dict[str, str]
) -> str:
    lines: dict[str, list[Point]] = {}
    best: dict[float, tuple[float, float, float]] = {}
    ticks: dict[float, str] = {}
    for result in sorted(results, key=_capacities):
        x, y = result["tiers"][tier]["capacity_fraction"], result[name]
        text = f"{y:.2%} at {share_text(result['tiers'][tier])}"
        lines.setdefault(result["policy"], []).append(Point(x, y, text))
        optimum = result["optimum"]
        low, high = optimum[f"{name}_bounds"] if bounds else (optimum[name], optimum[name])
        best[x] = (x, low, high)
        ticks[x] = share_text(result["tiers"][tier])
    series = [Series(policy, colours[policy], points) for policy, points in lines.items()]
    values = [p.y for s in series for p in s.points] + [high for _, _, high in best.values()]
    band = Band("optimum", list(best.values()))
    return line_chart(name, series, sizes_axis(list(ticks.items())), percent_axis(values), band)


def _by_size(results: list[Result]) -> list[list[Result]]:
    ordered = sorted(results, key=_capacities)
    return [list(group) for _, group in groupby(ordered, key=_capacities)]


def _ttft_section(document: Document, colours: dict[str, str]) -> str:
    none = document["without_store"]
    everything = [none, *document["results"]]
    seconds = [s for one in everything for p, s in one["ttft_curve"] if 1 <= p <= 99.5]
    x = seconds_axis(seconds)
    cards = []
    for some in _by_size(document["results"]):
        series = [_curve(NO_STORE, "best", none, x)]
        series += [_curve(r["policy"], colours[r["policy"]], r, x) for r in some]
        chart = line_chart("time to first token", series, x, Axis(0, 100, CDF_TICKS), small=True)
        best = min(some, key=lambda r: r["ttft_p99_seconds"])
        caption = (
            f"99% within {best['ttft_p99_seconds']:.2f} s ({escape(best['policy'])}); "
            f"{none['ttft_p99_seconds']:.2f} s without a store"
        )
        cards.append(_figure(_sizes(some[0]), chart, caption))
    return (
        "<h2>Time to the first token</h2><p class='soft'>The share of requests that have their "
        "first token after so long; further left is better.</p>"
        f'{_legend({NO_STORE: "best", **colours})}<div class="grid small">{"".join(cards)}</div>'
    )


def _curve(name: str, colour: str, result: dict[str, Any], x: Axis) -> Series:
    points = [
        Point(min(max(seconds, x.low), x.high), percent)
        for percent, seconds in result["ttft_curve"]
    ]
    return Series(name, colour, points)


def _legend(colours: dict[str, str]) -> str:
    entries = [f"<span>{_dot(colour)}{escape(name)}</span>" for name, colour in colours.items()]
    return f'<div class="legend">{"".join(entries)}</div>'


def _dot(colour: str) -> str:
    return f'<span class="dot" style="background:var(--{colour})"></span>'


def _links_section(results: list[Result], colours: dict[str, str]) -> str:
    links = list(dict.fromkeys(link for r in results for link in r["bytes_by_link"]))
    most = max([size for r in results for size in r["bytes_by_link"].values()] + [1])
    groups = [
        [_link_cells(result, links, most, colours[result["policy"]]) for result in some]
        for some in _by_size(results)
    ]
    head = ["policy", "tiers", *links, "a saved second"]
    return (
        "<h2>Bytes over each link</h2><p class='soft'>host&gt;hbm is what is restored, hbm&gt;host "
        "what is stored; in the last column, bytes restored for each second saved.</p>"
        f'<div class="card dense">{table(head, groups, 2 + len(links))}</div>'
    )


def _link_cells(result: Result, links: list[str], most: int, colour: str) -> list[str]:
    moved, per_second = result["bytes_by_link"], result["bytes_per_saved_second"]
    bars = [_bar(moved.get(link, 0), most, len(links), colour) for link in links]
    worth = "-" if per_second is None else format_bytes(per_second)
    return [_name_cell(result, colour), _sizes(result), *bars, worth]


def _bar(size: int, most: int, links: int, colour: str) -> str:
    width = round(360 / links * size / most)
    return (
        f'<span class="bar" style="width:{width}px;background:var(--{colour})"></span> '
        f'<span class="soft">{format_bytes(size)}</span>'
    )


def _name_cell(result: Result, colour: str) -> str:
    return f"{_dot(colour)}{escape(result['policy'])}"


def _sizes(result: Result) -> str:
    return ", ".join(f"{name} {share_text(tier)}" for name, tier in result["tiers"].items())


def _table_section(results: list[Result], colours: dict[str, str]) -> str:
    missed = any(sum(r["deadline_misses"].values()) for r in results)
    written = any(r["endurance"] for r in results)
    head = [*COLUMNS, *(["deadlines missed"] * missed), *(["disk writes"] * written)]
    groups = []
    for some in _by_size(results):
        top = max(r["prefill_seconds_saved_ratio"] for r in some)
        groups.append([_cells(r, colours, top, missed, written) for r in some])
    return "<h2>All figures</h2><div class='card'>" + table(head, groups, left=2) + "</div>"


def _cells(
    result: Result, colours: dict[str, str], top: float, missed: bool, written: bool
) -> list[str]:
    """A row of the table; the best of its size is set off."""
    saved = f"{result['prefill_seconds_saved_ratio']:.2%}"
    if result["prefill_seconds_saved_ratio"] == top:
        saved = f"<b>{saved}</b>"
    cells = [
        _name_cell(result, colours[result["policy"]]),
        _sizes(result),
        f"{result['token_hit_ratio']:.2%}",
        saved,
        _gap_text(result["gap_closed_seconds_ratio"]),
        f"{result['ttft_p50_seconds']:.3f} s",
        f"{result['ttft_p99_seconds']:.2f} s",
        f"{result['residual_prefill_p99_seconds']:.2f} s",
    ]
    misses = result["deadline_misses"]
    if missed:
        cells.append(f"{misses['predicted']:,} + {misses['unpredicted']:,}")
    if written:
        cells.append(_endurance(result["endurance"]))
    return cells


def _gap_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"


def _endurance(endurance: dict[str, Any] | None) -> str:
    if endurance is None:
        return "-"
    writes, used = endurance["drive_writes_per_day"], endurance["allowance_used_ratio"]
    text = f"{writes:,.0f} a day" if writes >= 10 else f"{writes:.2g} a day"
    return text if used is None else f"{text}, {used:.0%} of allowed"


def _notes() -> str:
    return (
        "<footer><p>Token hits are full blocks along an unbroken prefix, over all input tokens. "
        "Seconds saved are those of the hit blocks over those of all blocks, the constant of a "
        "prefill left out. Gap closed: how much of the way from least recently used to Belady's "
        "optimum for tokens a policy goes, in seconds; it can pass 100%, as that optimum is not "
        "the one for seconds. The capacity of the optimum is that of all tiers together.</p>"
        "<p>Time to the first token is that of engines with a queue of chunked prefills each, "
        "which share the store and its links; decodes are not modelled. Deadlines missed: foreseen "
        "by the plan + not. Disk writes: how often a day the whole disk would be written, and "
        "how much of what its endurance allows was.</p></footer>"
    )
