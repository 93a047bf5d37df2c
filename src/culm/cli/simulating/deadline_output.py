"""`culm simulate --deadline --budget`: how often both are kept, and at what price, by policy of renting."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, quantiles
from typing import Any

from rich import box
from rich.table import Table

from culm.cli.progress_display import make_console
from culm.estimates.deadline_estimate import DeadlineStudy
from culm.market.market_trace import HOUR
from culm.market.rental_cost import on_demand_equivalent
from culm.sim.deadline_run import DeadlineOutcome, full_step_s
from culm.text_format import count_noun


def print_study(study: DeadlineStudy, outcomes: Mapping[str, Sequence[DeadlineOutcome]], *, as_json: bool) -> None:
    """Print the table, or one JSON object."""
    rows = {name: _figures(found) for name, found in outcomes.items()}
    reference = _on_demand_usd(study)
    for row in rows.values():
        row["of_on_demand"] = row["usd"] / reference
    if as_json:
        print(json.dumps({"policies": rows, **_about(study)}))
        return
    table = Table(
        "policy", "deadline", "budget", "both", "(95 %)", "cost", "(10-90 %)", "of on demand", "hours", "(90 %)",
        "on demand", box=box.SIMPLE, pad_edge=False,
    )  # fmt: skip
    for name, row in rows.items():
        low, high = row["kept_both_ci"]
        table.add_row(
            name,
            f"{row['kept_deadline']:.1%}",
            f"{row['kept_budget']:.1%}",
            f"{row['kept_both']:.1%}",
            f"{low:.0%}-{high:.0%}",
            f"${row['usd']:,.0f}",
            f"{row['usd_10']:,.0f}-{row['usd_90']:,.0f}",
            f"{row['of_on_demand']:.1%}",
            f"{row['hours']:.1f}",
            f"{row['hours_90']:.1f}",
            f"{row['on_demand_share']:.1%}",
        )
    make_console(stderr=False).print(table)
    print(_describe(study))


def _figures(found: Sequence[DeadlineOutcome]) -> dict[str, Any]:
    both = sum(each.kept_both for each in found)
    usd, hours = [each.usd for each in found], [each.seconds / HOUR for each in found]
    return {
        "kept_deadline": fmean(each.kept_deadline for each in found),
        "kept_budget": fmean(each.kept_budget for each in found),
        "kept_both": both / len(found),
        "kept_both_ci": wilson_interval(both, len(found)),
        "usd": fmean(usd),
        "usd_10": _quantile(usd, 1),
        "usd_90": _quantile(usd, 9),
        "hours": fmean(hours),
        "hours_90": _quantile(hours, 9),
        "on_demand_share": fmean(each.on_demand_share for each in found),
        "decisions": fmean(each.decisions for each in found),
        "markets": len(found),
    }


def _on_demand_usd(study: DeadlineStudy) -> float:
    """What the work costs on nodes that are rented on demand and never lost."""
    w = study.context.workload
    return on_demand_equivalent(
        steps=math.ceil(study.goal.samples / w.samples),
        step_s=full_step_s(study.context),
        nodes=w.nodes,
        on_demand_usd_h=study.on_demand_usd_h,
    )


def _quantile(values: Sequence[float], tenth: int) -> float:
    return values[0] if len(values) < 2 else quantiles(values, n=10, method="inclusive")[tenth - 1]


def wilson_interval(kept: int, markets: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share (Wilson's)."""
    z, share = 1.959964, kept / markets
    middle = (share + z * z / (2 * markets)) / (1 + z * z / markets)
    half = z * math.sqrt(share * (1 - share) / markets + z * z / (4 * markets**2)) / (1 + z * z / markets)
    return max(0.0, middle - half), min(1.0, middle + half)


def _about(study: DeadlineStudy) -> dict[str, Any]:
    limits = study.goal.limits
    calm_s = study.goal.samples / study.context.workload.samples * full_step_s(study.context)
    return {
        "market": study.source,
        "strategy": study.strategy,
        "nodes": study.context.workload.nodes,
        "samples": study.goal.samples,
        "calm_hours": calm_s / HOUR,
        "calm_on_demand_usd": _on_demand_usd(study),
        "deadline_h": limits.deadline_s / HOUR if math.isfinite(limits.deadline_s) else None,
        "budget_usd": limits.budget_usd if math.isfinite(limits.budget_usd) else None,
        "on_demand_usd_h": study.on_demand_usd_h,
        "spot_usd_h": study.prices(0).at(0.0),
    }


def _describe(study: DeadlineStudy) -> str:
    about = _about(study)
    promises = [
        f"deadline {about['deadline_h']:g} h" if about["deadline_h"] is not None else "",
        f"budget ${about['budget_usd']:,.0f}" if about["budget_usd"] is not None else "",
    ]
    work = f"{about['calm_hours']:.1f} h of work without losses (${about['calm_on_demand_usd']:,.0f} on demand)"
    return (
        f"{study.context.workload.name}, {study.strategy} on {count_noun(about['nodes'], 'node')}, "
        f"{work}, {' and '.join(filter(None, promises))}; "
        f"{count_noun(study.markets, 'market')} of {study.source}; ${about['spot_usd_h']:g}/h spot at first, "
        f"${about['on_demand_usd_h']:g}/h on demand"
    )
