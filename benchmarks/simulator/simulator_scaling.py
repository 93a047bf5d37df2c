"""How the simulator's run time grows with the number of events: a day of 1,000 nodes. To draw the chart again:

python -m benchmarks.simulator.simulator_scaling
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from culm.market import MarketModel, generate_trace
from culm.market.chart import ChartPanel, Points, draw_svg
from culm.schedule import Costs
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import NodePrice, simulate
from culm.sim.workload import Workload

STRATEGIES_TIMED = ("auto", "reroute", "shadow", "templates", "checkpoint", "bamboo")
PREEMPTION_RATES = (0.022, 0.045, 0.09, 0.18)
"""Preemption rates per node and hour: from about 2,200 events in a day to about 10,000."""
CHART_FILE = Path(__file__).parents[2] / "docs" / "images" / "simulator-events.svg"

LARGE_WORKLOAD = Workload(
    name="1,000 nodes",
    pipelines=62,
    stages=16,
    micro_batches=62 * 32,
    costs=Costs(forward=0.05, input=0.05, weight=0.05),
    state_bytes=1e11,
    least_stages=12,
    layers=96,
)


def run(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """CPU seconds by number of events and strategy; generating the trace is measured separately."""
    rows = []
    for rate in PREEMPTION_RATES[-1:] if quick else PREEMPTION_RATES:
        start = time.process_time()
        trace = generate_trace(MarketModel(nodes=1000, hours=24, rate=rate, available=0.97, zones=6), 0)
        row: dict[str, Any] = {"events": len(trace.events), "generate_s": time.process_time() - start}
        for name in STRATEGIES_TIMED:
            start = time.process_time()
            simulate(LARGE_WORKLOAD, [trace], [name], cluster_costs=ClusterCosts(), price=NodePrice(1.0, 3.0))
            row[name] = time.process_time() - start
        progress(f"{row['events']} events: " + ", ".join(f"{name} {row[name]:.2f} s" for name in STRATEGIES_TIMED))
        rows.append(row)
    return rows


def draw_chart(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds over events, a line for each strategy, as SVG."""
    lines: dict[str, Points] = {name: [(row["events"], row[name]) for row in rows] for name in STRATEGIES_TIMED}
    title = "A day of 1,000 nodes: what simulating it takes, by the number of events"
    return draw_svg(
        title, [ChartPanel("processor seconds", lines, slope=True)], max(row["events"] for row in rows), "events"
    )


def main() -> None:
    rows = run(progress=lambda line: print(line, flush=True))
    CHART_FILE.write_text(draw_chart(rows), encoding="utf-8")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
