"""How the simulator's own time grows: a day of 1,000 nodes, with more and more events. To draw the picture again:

python -m benchmarks.scale
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from culm.market import Market, generate
from culm.market.chart import Panel, Points, svg
from culm.schedule import Costs
from culm.sim.costs import Charges
from culm.sim.study import Price, simulate
from culm.sim.workload import Workload

NAMES = ("auto", "reroute", "shadow", "templates", "checkpoint", "bamboo")
RATES = (0.022, 0.045, 0.09, 0.18)
"""Losses of a node per hour: from about 2,200 events in a day to about 10,000."""
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "simulator-events.svg"

DAY = Workload(
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
    """Processor seconds by number of events and strategy; generating the trace is counted apart."""
    rows = []
    for rate in RATES[-1:] if quick else RATES:
        began = time.process_time()
        trace = generate(Market(nodes=1000, hours=24, rate=rate, available=0.97, zones=6), 0)
        row: dict[str, Any] = {"events": len(trace.events), "generate_s": time.process_time() - began}
        for name in NAMES:
            began = time.process_time()
            simulate(DAY, [trace], [name], charges=Charges(), price=Price(1.0, 3.0))
            row[name] = time.process_time() - began
        progress(f"{row['events']} events: " + ", ".join(f"{name} {row[name]:.2f} s" for name in NAMES))
        rows.append(row)
    return rows


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds over events, a line for each strategy, as SVG."""
    lines: dict[str, Points] = {name: [(row["events"], row[name]) for row in rows] for name in NAMES}
    title = "A day of 1,000 nodes: what simulating it takes, by the number of events"
    return svg(title, [Panel("processor seconds", lines, slope=True)], max(row["events"] for row in rows), "events")


def main() -> None:
    rows = run(progress=lambda line: print(line, flush=True))
    PICTURE.write_text(picture(rows), encoding="utf-8")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
