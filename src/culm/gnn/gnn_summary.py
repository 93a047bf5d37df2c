"""The summary of a run, with the keys of summary.json."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from culm.gnn.plan.gnn_prices import compute_bill, prices_for_year, value
from culm.runtime.compute.snapshot import total_digest

if TYPE_CHECKING:
    from culm.gnn.graph.csr_graph import Graph
    from culm.gnn.leader.gnn_ledger import RunResults
    from culm.gnn.server.store_records import GnnRunConfig
    from culm.gnn.worker.worker_pool import WorkerPool

WORKER_GB = 1769 / 1024
"""Memory at which AWS Lambda gives a worker one whole core."""


def build_summary(
    config: GnnRunConfig,
    results: RunResults,
    worker_pool: WorkerPool,
    graph: Graph,
    intervals: int,
    *,
    launcher: str,
    instance: str,
    wall_s: float,
) -> dict[str, Any]:
    """Build summary.json. Costs are computed with the prices of the named instance and of AWS Lambda, wherever the
    processes actually ran."""
    ledger = results.ledger
    digests = [state.digest() for _, state in sorted(results.final_state.items())]
    epochs = len(ledger.losses)
    times = ledger.epoch_times()
    best = ledger.best_evaluation
    recoveries = results.recoveries.summary_rows(time.monotonic())
    servers = config.servers + config.parameter_servers
    prices = prices_for_year()
    bill = compute_bill(
        prices,
        instance=instance,
        server_s=wall_s * servers,
        worker_gb_s=worker_pool.total_worker_seconds() * WORKER_GB,
        requests=worker_pool.launched_count,
    )
    return {
        "steps": epochs,
        "epochs": epochs,
        "samples": sum(ledger.counted_vertices.values()),
        "samples_expected": epochs * graph.train_vertices,
        "samples_lost": ledger.count_lost_vertices(),
        "samples_duplicated": ledger.count_duplicated_vertices(),
        "final_loss": ledger.losses[max(ledger.losses)] if ledger.losses else None,
        "test_accuracy": None if best is None else best.test,
        "val_accuracy": None if best is None else best.val,
        "train_accuracy": None if best is None else best.train,
        "best_epoch": None if best is None else best.epoch,
        "stopped_early": results.stop_reason,
        "time_per_epoch_s": sum(times) / len(times) if times else None,
        "wall_s": wall_s,
        "goodput": epochs * graph.train_vertices / wall_s,
        "strategy": "checkpoint",
        "pipelines": config.servers,
        "stages": 1,
        "schedule": config.mode,
        "exact": config.mode != "async",
        "checkpoints": results.checkpoints,
        "mode": config.mode,
        "staleness": config.staleness,
        "lookahead": config.predicts_weights,
        "model": config.model.kind,
        "widths": list(config.model.widths),
        "heads": config.model.heads,
        "graph": graph.name,
        "vertices": graph.vertices,
        "edges": graph.edges,
        "servers": config.servers,
        "parameter_servers": config.parameter_servers,
        "intervals": intervals,
        "workers": worker_pool.target_size,
        "launcher": launcher,
        "relaunches": int(ledger.counter_total("relaunches")),
        "late_results": int(ledger.counter_total("refused")),
        "worker_tasks": int(ledger.counter_total("worker_tasks")),
        "worker_busy_s": ledger.counter_total("worker_seconds"),
        "workers_launched": worker_pool.launched_count,
        "workers_lost": worker_pool.lost_count,
        "callers_refused": worker_pool.rejected_connections,
        "preemptions": worker_pool.lost_count + sum(len(recovery["lost"]) for recovery in recoveries),
        "recoveries": recoveries,
        "generations": results.generations,
        "weights_sha256": total_digest(weights for weights, _ in digests),
        "state_sha256": total_digest(state for _, state in digests),
        "cost_usd": bill.usd,
        "cost": {"servers_usd": bill.servers_usd, "workers_usd": bill.workers_usd, "requests_usd": bill.requests_usd},
        "prices": {"as_of": prices.as_of, "source": prices.source, "instance": instance, "worker_gb": WORKER_GB},
        "value": value(wall_s, bill.usd),
    }
