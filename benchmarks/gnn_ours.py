"""culm.gnn's side: the same case on as many cores, as its users would call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.gnn_case import Curve, Request
from benchmarks.gnn_peers import read

if TYPE_CHECKING:
    from culm.gnn.ledger import Evaluation

EVERY = 5
"""Epochs between evaluations. Between two of them the curve stands still, which counts against culm."""
CORES_PER_SERVER = 4


def train(request: Request) -> Curve:
    """`culm-sync`, `culm-pipe`, `culm-async` (staleness 0), `culm-async-1`, `culm-async-1-plain` (without look-ahead);
    elastic workers are local processes."""
    from culm.gnn import train as run

    case = request.case
    _, mode, staleness, plain = (*request.system.split("-"), "0", "")[:4]
    made = run(
        read(case),
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
        evaluate_every=min(request.every or EVERY, case.epochs),
    )
    seconds = float(made.summary["time_per_epoch_s"])
    return Curve((seconds,) * case.epochs, *held(made.evaluations, case.epochs))


def held(evaluations: Sequence[Evaluation], epochs: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Validation and test accuracy after every epoch: that of the last evaluation so far, zero before the first."""
    known = {found.epoch: (found.val, found.test) for found in evaluations}
    now, rows = (0.0, 0.0), []
    for epoch in range(epochs):
        now = known.get(epoch, now)
        rows.append(now)
    return tuple(val for val, _ in rows), tuple(test for _, test in rows)
