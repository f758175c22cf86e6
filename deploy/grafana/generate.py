"""Writes kvstore.json, the Grafana dashboard, from the panels below; `--check` only compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).with_name("kvstore.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HERE = 'instance=~"$instance"'
COLUMNS, HEIGHT = 24, 8


class Panel(NamedTuple):
    """A panel: its title, unit, and (query, legend) pairs. `<>` stands for the chosen instances."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str
    kind: str = "timeseries"
    width: int = 8


def rate(metric: str, by: str = "", labels: str = "") -> str:
    inside = f"{HERE},{labels}" if labels else HERE
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({metric}{{{inside}}}[$__rate_interval]))"


def now(metric: str, by: str = "", labels: str = "") -> str:
    inside = f"{HERE},{labels}" if labels else HERE
    return f"sum by ({by}) ({metric}{{{inside}}})" if by else f"sum ({metric}{{{inside}}})"


def quantile(share: float, metric: str, by: str = "") -> str:
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, {rate(metric + '_bucket', labels)})"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Is it worth having?": (
        Panel("Up", "none", ((f'up{{job="kvstore",{HERE}}}', "{{instance}}"),),
              "1 while the daemon answers.", "stat", 4),
        Panel("Tiers out of order", "none",
              ((now("kvstore_tier_degraded", "instance, tier"), "{{instance}} {{tier}}"),),
              "1 while a tier takes no blocks.", "stat", 4),
        Panel("Tokens found, of those looked up", "percentunit",
              ((f"{rate('kvstore_hit_tokens_total', 'tier')} / ignoring(tier) group_left "
                f"{rate('kvstore_lookup_tokens_total')}", "{{tier}}"),),
              "By tier, counted up to the first block that is missing."),
        Panel("Seconds of prefill saved a second", "none",
              ((now("kvstore_shadow_saved_seconds_per_second", "policy, tier", 'capacity="1"'),
                "{{policy}} {{tier}}"),),
              "1 is a whole GPU that need not prefill; each policy at the capacity there is."),
    ),
    "Tiers": (
        Panel("Bytes", "bytes",
              ((now("kvstore_tier_used_bytes", "tier"), "{{tier}} used"),
               (now("kvstore_tier_capacity_bytes", "tier"), "{{tier}} in all"),
               (now("kvstore_tier_resting_bytes", "tier"), "{{tier}} resting")),
              "Resting: let go of, and still read by somebody."),
        Panel("Evicted", "Bps",
              ((rate("kvstore_evicted_bytes_total", "tier, reason"), "{{tier}} {{reason}}"),),
              "Bytes that left a tier, by reason."),
        Panel("Between host and disk", "Bps",
              ((rate("kvstore_demoted_bytes_total"), "written to disk"),
               (rate("kvstore_promoted_bytes_total"), "brought back")),
              "Written down, and read for a restore."),
        Panel("Not written to disk", "ops",
              ((rate("kvstore_demotions_skipped_blocks_total", "reason"), "{{reason}}"),),
              "Blocks by reason; `worth` is no fault."),
        Panel("Restored", "Bps",
              ((rate("kvstore_restored_bytes_total", "tier"), "{{tier}}"),),
              "Bytes handed to engines."),
        Panel("Put", "Bps", ((rate("kvstore_put_bytes_total"), "stored"),),
              "Bytes that became readable."),
    ),
    "Decisions": (
        Panel("Plans", "ops",
              ((rate("kvstore_plan_decisions_total", "kind, costs"), "{{kind}} {{costs}}"),),
              "Lookups by what was planned; `unmeasured`: for want of measured costs."),
        Panel("Time to first token, predicted and measured", "none",
              ((rate("kvstore_plan_predicted_seconds_total"), "predicted"),
               (rate("kvstore_plan_measured_seconds_total"), "measured"),
               (rate("kvstore_plan_regret_seconds_total"), "regret")),
              "Seconds of all plans a second; regret: what the best other plan would have spared."),
        Panel("Measured over predicted", "none",
              ((f"kvstore_cost_error_ratio{{{HERE}}}", "{{subject}} {{quantile}}"),),
              "Of each cost model; near 1 at p50."),
        Panel("What if", "none",
              ((now("kvstore_shadow_saved_seconds_per_second", "policy, tier, capacity"),
                "{{policy}} {{tier}} x{{capacity}}"),),
              "Seconds of prefill saved a second by other policies and capacities."),
        Panel("Restores that failed", "ops",
              ((rate("kvstore_restore_failed_blocks_total", "reason"), "{{reason}}"),),
              "Blocks that engines computed after all."),
        Panel("Another policy acts", "none",
              ((now("kvstore_policy_guarded", "instance"), "{{instance}}"),),
              "1 while a shadow saves more than the configured policy."),
    ),
    "Service": (
        Panel("Lookup", "s",
              ((quantile(0.5, "kvstore_lookup_seconds"), "p50"),
               (quantile(0.99, "kvstore_lookup_seconds"), "p99")),
              "Time on the owner thread."),
        Panel("Owner thread late", "s", ((quantile(0.99, "kvstore_loop_stall_seconds"), "p99"),),
              "Should stay within 5 ms."),
        Panel("Calls", "reqps",
              ((rate("kvstore_rpcs_total", "method", 'status="OK"'), "{{method}}"),),
              "By method, over any transport."),
        Panel("Calls that failed", "reqps",
              ((f"{rate('kvstore_rpcs_total', 'status')}", "{{status}}"),),
              "By gRPC status, OK among them for scale."),
        Panel("Links", "Bps", ((rate("kvstore_copied_bytes_total", "link"), "{{link}}"),),
              "Bytes copied over each."),
        Panel("Queues", "bytes", ((now("kvstore_queue_bytes", "link"), "{{link}}"),),
              "Bytes queued or running."),
        Panel("One copy", "s",
              ((quantile(0.99, "kvstore_copy_seconds", "link"), "{{link}} p99"),),
              "Queueing left out."),
        Panel("Sessions and leases", "none",
              ((now("kvstore_sessions"), "sessions"), (now("kvstore_leases"), "leases")),
              "Open at this moment."),
        Panel("Limits met", "ops",
              ((rate("kvstore_limit_rejections_total", "limit"), "{{limit}}"),),
              "Requests cut short or refused, by the setting to raise."),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(_row(len(panels) + 1, title, y))
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            panels.append(_panel(len(panels) + 1, panel, x, y))
            x += panel.width
        y += HEIGHT
    return {
        "title": "kvstore",
        "uid": "kvstore",
        "tags": ["kvstore"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance", "label": "Instance", "type": "query", "datasource": SOURCE,
            "query": {"query": "label_values(kvstore_build_info, instance)", "refId": "instance"},
            "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]  # fmt: skip


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query,
                "legendFormat": legend,
            }
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    """0 when the committed dashboard is, or now is, what the panels say."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" in arguments:
        return int(TARGET.read_text(encoding="utf-8") != text)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
