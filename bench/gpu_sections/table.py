"""The short table at the end of a GPU check."""

from __future__ import annotations

from typing import Any

TARGETS = {
    "decode bf16": "0.85 of the read ceiling at >= 0.5 GB",
    "scatter": "0.85 of copy",
}


def table(results: dict[str, Any]) -> str:
    """Lines of what matters most, a section after the other; errors are lines too."""
    lines = []
    for name, result in results.items():
        errors = [result["error"]] if "error" in result else result.get("errors", [])
        for error in errors:
            lines.append(f"{name:18} ERROR {str(error)[:150]}")
        make = globals().get(f"_{name}")
        try:
            lines += [f"{name:18} {line}" for line in (make(result) if make else [])]
        except (KeyError, TypeError, ValueError) as error:
            lines.append(f"{name:18} (incomplete: {type(error).__name__} {error})")
    return "\n".join(lines)


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


def _ceilings(result: dict[str, Any]) -> list[str]:
    names = ("copy", "read", "write", "h2d", "d2h", "both")
    rates = ", ".join(f"{n} {_gb(result[f'{n}_bytes_per_second'])}" for n in names)
    return [rates, f"matmul {result['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s"]


def _matrix(result: dict[str, Any]) -> list[str]:
    failed = result.get("failed", [])
    lines = [f"{result['cases']} cases, {len(failed)} failed, {result.get('left_out', 0)} left out"]
    return lines + [f"  {item}"[:200] for item in failed[:8]]


_copy_matrix = _attention_matrix = _compiling = _matrix


def _copies(result: dict[str, Any]) -> list[str]:
    return [
        f"{r['operation']:10} {r['kind']:18} P={r['tokens']:<3} {r['layers']:8} "
        f"{_gb(r['bytes_per_second'])} = {r['copy_ceiling_ratio']:.2f} of copy"
        for r in result["rows"]
    ]


def _restore(result: dict[str, Any]) -> list[str]:
    lines = []
    for run_bytes in sorted({r["run_bytes"] for r in result["rows"]}):
        cells = []
        for r in (r for r in result["rows"] if r["run_bytes"] == run_bytes):
            value = r.get("error") or f"{r['h2d_ceiling_ratio']:.2f} ({_gb(r['bytes_per_second'])})"
            cells.append(f"{r['way']} {value}"[:60])
        lines.append(f"runs of {run_bytes >> 10} KiB, of H2D: " + "; ".join(cells))
    for r in result["beside_gemm"]:
        lines.append(
            f"beside GEMM, {r['run_bytes'] >> 10} KiB {r['way']}: restore x "
            f"{r['restore_slowdown']:.2f}, products x {r['product_slowdown_while_copying']:.2f}"
        )
    return [*lines, f"wrong: {len(result['wrong'])}"]


def _engine_side(result: dict[str, Any]) -> list[str]:
    lines = ["a dry run: no rate here means anything"] if result["is_dry"] else []
    known = result["registration"]
    lines.append(f"registered {known['bytes'] >> 20} MiB; {known['problems'] or 'no problem'}")
    for one in result["calibrations"]:
        least = one["chosen_run_bytes"] >> 10
        lines.append(f"runs of {one['run_bytes'] >> 10} KiB: pieces from {least} KiB on")
    for row in result["rows"]:
        ratio = row.get("h2d_ceiling_ratio", row.get("d2h_ceiling_ratio", float("nan")))
        value = row.get("error") or f"{_gb(row['bytes_per_second'])} = {ratio:.2f} of the link"
        name = f"{row['work']} {row['way']} {row['run_bytes'] >> 10} KiB, {row['overlap']}"
        lines.append(f"{name:34} {value}"[:120])
    return [*lines, f"wrong: {len(result['wrong'])}"]


def _vllm_pages(result: dict[str, Any]) -> list[str]:
    lines = ["a dry run: no rate here means anything"] if result["is_dry"] else []
    for row in result["rows"]:
        name = f"{row['work']} {row['way']} {row['kind']} {row['piece_bytes'] >> 10} KiB"
        value = row.get("error") or (
            f"{_gb(row['bytes_per_second'])} = {row['link_ratio']:.2f} of the link"
        )
        lines.append(f"{name:34} {value}"[:120])
    return [*lines, f"wrong: {len(result['wrong'])}"]


def _rows(result: dict[str, Any]) -> list[str]:
    """Sections that make their own lines: each row's `line`."""
    return [str(row["line"]) for row in result["rows"]]


_decode = _extend = _baselines = _rows


def _sharing(result: dict[str, Any]) -> list[str]:
    return [f"{name}: {value}"[:300] for name, value in result.items() if name != "error"]


_host_memory = _sharing


def _contract(result: dict[str, Any]) -> list[str]:
    return [result.get("summary", ""), *result.get("failed", [])[:5]]
