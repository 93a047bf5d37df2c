"""`culm bench scale`: what the leader and an epoch cost with 64 to 1,024 nodes, by part. To draw the chart again:

python -m benchmarks.scale.scale_bench

The clusters are simulated (see simulated_fleet): the leader's code is that of a real run, the nodes only send messages.
Figures are processor seconds of the leader's process, the minimum of several rounds where there are several. Steps are
an average over those between two looks for slow nodes. A loss
happens in the middle of a step. `recovery_s` is the time from the loss to the new epoch: the leader's processor time,
plus one millisecond for each of the messages that follow each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scale.real_processes import measure_real_processes
from benchmarks.scale.simulated_fleet import STAGES, LossCost, SimulatedFleet
from rich import box
from rich.console import Group
from rich.table import Table

from culm.market.chart import ChartPanel, Points, draw_svg
from culm.plan.replan.slow_nodes import WINDOW_STEPS

PIPELINES = (4, 8, 16, 32, 64)
QUICK_PIPELINES = (4, 16)
STEPS = 4 * WINDOW_STEPS
LATENCY_S = 0.001
HOPS = 8
"""Messages that follow each other in a recovery: loss, halt, reports, epoch to the store, and from the leader over
up to three other nodes to the last one."""
CHART_FILE = Path(__file__).parents[2] / "docs" / "images" / "scale.svg"


def run(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The figures of each cluster size. `real`: a run of 64 processes, where this machine has the memory for it."""
    rows = []
    for pipelines in QUICK_PIPELINES if quick else PIPELINES:
        progress(f"{pipelines * STAGES} simulated nodes")
        rows.append(asyncio.run(_measure(pipelines)))
    result: dict[str, Any] = {"rows": rows}
    if not quick:
        progress("64 real processes")
        result["real"] = measure_real_processes()
    return result


async def _measure(pipelines: int) -> dict[str, Any]:
    """Run some steps, lose a node in the middle of one, and let the survivors continue."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = SimulatedFleet(pipelines, folder)
        try:
            await fleet.start()
            await fleet.wait_for_precomputed_plans()
            steps = [await fleet.run_step() for _ in range(STEPS)]
            beats = [await fleet.run_heartbeats() for _ in range(3)]
            cost = await fleet.lose_node(fleet.nodes // 3 + 5)
            await fleet.make_ready()
        finally:
            await fleet.close()
    return {"nodes": fleet.nodes, "leader_ms_per_step": _ms_per_step(steps), "heartbeat_ms": 1e3 * min(beats)} | _row(
        cost
    )


def _ms_per_step(steps: Sequence[float]) -> float:
    """Milliseconds of a step, on average over the steps between two looks for slow nodes; each of them is the minimum
    of several rounds."""
    rounds = [steps[at : at + WINDOW_STEPS] for at in range(0, len(steps), WINDOW_STEPS)]
    fastest = [min(each[index] for each in rounds) for index in range(WINDOW_STEPS)]
    return 1e3 * sum(fastest) / WINDOW_STEPS


def _row(cost: LossCost) -> dict[str, Any]:
    leader_s = cost.halt_s + cost.report_s + cost.decide_s + cost.spread_s
    return {
        "halt_s": cost.halt_s,
        "report_s": cost.report_s,
        "decide_s": cost.decide_s,
        "spread_s": cost.spread_s,
        "recovery_s": leader_s + HOPS * LATENCY_S,
        "adopt_s": cost.adopt_s,
        "epoch_bytes": cost.epoch_bytes,
        "node_bytes": cost.node_bytes,
        "leader_bytes": cost.leader_bytes,
    }


def render_table(result: dict[str, Any]) -> Group:
    """The figures as a table."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title="leader and epoch: processor time (simulated nodes)",
    )
    columns = ("", "step", "beats", "halt", "hear", "decide", "spread", "total", "read", "epoch", "node", "sent")
    for name, unit in zip(columns, ("nodes", *["ms"] * 8, *["kB"] * 3), strict=True):
        table.add_column(f"{name}\n{unit}", justify="right")
    for row in result["rows"]:
        times = [1e3 * row[f"{name}_s"] for name in ("halt", "report", "decide", "spread", "recovery", "adopt")]
        sizes = [row[f"{name}_bytes"] / 1e3 for name in ("epoch", "node", "leader")]
        table.add_row(
            f"{row['nodes']:,}",
            f"{row['leader_ms_per_step']:.1f}",
            f"{row['heartbeat_ms']:.1f}",
            *(f"{value:,.0f}" for value in (*times, *sizes)),
        )
    lines = [
        "beats: a heartbeat of every worker; hear: reports of survivors",
        "spread: encode, publish and send the epoch; read: of one worker",
        f"total: from the loss to the epoch, with {LATENCY_S * 1e3:g} ms for each message",
        "node: what a node receives of the epoch; sent: what the leader sends",
    ]
    real = result.get("real")
    if real is not None:
        lines.append(_real_line(real))
    return Group(table, *lines)


def _real_line(real: dict[str, Any]) -> str:
    if "unavailable" in real:
        return f"64 real processes: {real['unavailable']}"
    return (
        f"{real['nodes']} real nodes on {real['cores']} cores (workers outnumber cores, so times include waiting): "
        f"step {real['step_s']:.2f} s, lost node detected in {real['detect_s']:.2f} s, next epoch "
        f"{real['replan_s']:.2f} s later"
    )


def draw_chart(rows: Sequence[dict[str, Any]]) -> str:
    """Cost by part over the number of nodes, as SVG."""

    def line(name: str, scale: float = 1.0) -> Points:
        return [(row["nodes"], row[name] * scale) for row in rows]

    parts = {"halt": "halt_s", "reports": "report_s", "decide": "decide_s", "spread": "spread_s"}
    panels = [
        ChartPanel("loss to epoch, s", {name: line(key) for name, key in parts.items()}, slope=True),
        ChartPanel("leader, ms", {"step": line("leader_ms_per_step"), "heartbeats": line("heartbeat_ms")}, slope=True),
        ChartPanel("epoch, kB", {"whole": line("epoch_bytes", 1e-3), "per node": line("node_bytes", 1e-3)}, slope=True),
    ]
    return draw_svg("Leader and epoch by cluster size", panels, max(row["nodes"] for row in rows), "nodes")


def main() -> None:
    result = run(progress=lambda line: print(line, flush=True))
    CHART_FILE.write_text(draw_chart(result["rows"]), encoding="utf-8")
    print(json.dumps(result | {"cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
