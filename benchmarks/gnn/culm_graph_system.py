"""Training of a benchmark case with culm.gnn, as its users would call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.gnn.pyg_systems import load_graph
from benchmarks.gnn.training_case import TrainingCurve, TrainingRequest

if TYPE_CHECKING:
    from culm.gnn.leader.gnn_ledger import Evaluation

EVALUATE_EVERY = 5
"""Training epochs between evaluations. Between two evaluations the curve is constant, which counts against culm."""
CORES_PER_SERVER = 4


def train_culm(request: TrainingRequest) -> TrainingCurve:
    """Train `culm-sync`, `culm-pipe`, `culm-async` (staleness 0), `culm-async-1` or `culm-async-1-plain` (without
    weight prediction). Elastic workers are local processes."""
    from culm.gnn import train

    case = request.case
    _, mode, staleness, plain = (*request.system.split("-"), "0", "")[:4]
    result = train(
        load_graph(case),
        case.model,
        layers=case.layers,
        hidden=case.hidden,
        heads=case.heads,
        dropout=case.dropout,
        input_dropout=case.input_dropout,
        lr=case.lr,
        weight_decay=case.weight_decay,
        epochs=case.epochs,
        seed=request.seed,
        mode=mode,
        staleness=int(staleness),
        lookahead=plain != "plain",
        servers=request.servers or max(1, request.cores // CORES_PER_SERVER),
        workers=request.cores,
        intervals=request.intervals,
        latency_s=request.latency_s,
        evaluate_every=min(request.evaluate_every or EVALUATE_EVERY, case.epochs),
    )
    seconds = float(result.summary["time_per_epoch_s"])
    return TrainingCurve((seconds,) * case.epochs, *accuracy_per_epoch(result.evaluations, case.epochs))


def accuracy_per_epoch(evaluations: Sequence[Evaluation], epochs: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return validation and test accuracy after every training epoch: those of the last evaluation, 0 before the
    first."""
    by_epoch = {evaluation.epoch: (evaluation.val, evaluation.test) for evaluation in evaluations}
    latest, rows = (0.0, 0.0), []
    for epoch in range(epochs):
        latest = by_epoch.get(epoch, latest)
        rows.append(latest)
    return tuple(val for val, _ in rows), tuple(test for _, test in rows)
