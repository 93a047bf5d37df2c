"""What a run came to, in the words of summary.json."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from culm.gnn.price import bill, prices_of, value
from culm.runtime.state import total_digest

if TYPE_CHECKING:
    from culm.gnn.desk import Desk
    from culm.gnn.findings import Findings
    from culm.gnn.graph import Graph
    from culm.gnn.setup import Setup

WORKER_GB = 1769 / 1024
"""Memory at which AWS Lambda gives a worker one whole core."""


def summarise(
    setup: Setup,
    findings: Findings,
    desk: Desk,
    graph: Graph,
    intervals: int,
    *,
    launcher: str,
    instance: str,
    wall_s: float,
) -> dict[str, Any]:
    """Everything in one place. Costs are those of the named instances and of AWS Lambda, wherever it really ran."""
    ledger = findings.ledger
    digests = [state.digest() for _, state in sorted(findings.state.items())]
    epochs = len(ledger.losses)
    times = ledger.epoch_times()
    best = ledger.best
    recoveries = findings.recoveries.rows(time.monotonic())
    servers = setup.servers + setup.parameter_servers
    prices = prices_of()
    paid = bill(
        prices,
        instance=instance,
        server_s=wall_s * servers,
        worker_gb_s=desk.lived() * WORKER_GB,
        requests=desk.launched,
    )
    return {
        "steps": epochs,
        "epochs": epochs,
        "samples": sum(ledger.vertices.values()),
        "samples_expected": epochs * graph.train_vertices,
        "samples_lost": ledger.lost(),
        "samples_duplicated": ledger.duplicated(),
        "final_loss": ledger.losses[max(ledger.losses)] if ledger.losses else None,
        "test_accuracy": None if best is None else best.test,
        "val_accuracy": None if best is None else best.val,
        "train_accuracy": None if best is None else best.train,
        "best_epoch": None if best is None else best.epoch,
        "stopped_early": findings.stopped,
        "time_per_epoch_s": sum(times) / len(times) if times else None,
        "wall_s": wall_s,
        "goodput": epochs * graph.train_vertices / wall_s,
        "strategy": "checkpoint",
        "pipelines": setup.servers,
        "stages": 1,
        "schedule": setup.mode,
        "exact": setup.mode != "async",
        "checkpoints": findings.checkpoints,
        "mode": setup.mode,
        "staleness": setup.staleness,
        "lookahead": setup.looks_ahead,
        "model": setup.model.kind,
        "widths": list(setup.model.widths),
        "heads": setup.model.heads,
        "graph": graph.name,
        "vertices": graph.vertices,
        "edges": graph.edges,
        "servers": setup.servers,
        "parameter_servers": setup.parameter_servers,
        "intervals": intervals,
        "workers": desk.target,
        "launcher": launcher,
        "relaunches": int(ledger.total_of("relaunches")),
        "late_results": int(ledger.total_of("refused")),
        "worker_tasks": int(ledger.total_of("worker_tasks")),
        "worker_busy_s": ledger.total_of("worker_seconds"),
        "workers_launched": desk.launched,
        "workers_lost": desk.lost,
        "callers_refused": desk.refused,
        "preemptions": desk.lost + sum(len(recovery["lost"]) for recovery in recoveries),
        "recoveries": recoveries,
        "generations": findings.generations,
        "weights_sha256": total_digest(weights for weights, _ in digests),
        "state_sha256": total_digest(state for _, state in digests),
        "cost_usd": paid.usd,
        "cost": {"servers_usd": paid.servers_usd, "workers_usd": paid.workers_usd, "requests_usd": paid.requests_usd},
        "prices": {"as_of": prices.as_of, "source": prices.source, "instance": instance, "worker_gb": WORKER_GB},
        "value": value(wall_s, paid.usd),
    }
