"""The ledger: early stopping, and the best evaluation."""

from __future__ import annotations

from culm.gnn.leader.gnn_ledger import Evaluation, GnnLedger, early_stop_reason
from culm.gnn.scheduler.passes import list_passes


def evaluations(*values: float) -> list[Evaluation]:
    return [Evaluation(i, 1.0, v, 0.5) for i, v in enumerate(values)]


def test_training_stops_after_patience_evaluations_without_improvement() -> None:
    assert (
        early_stop_reason(evaluations(0.5, 0.6, 0.6, 0.59), 2)
        == "validation accuracy has not passed 0.6000 in 2 evaluations"
    )
    assert early_stop_reason(evaluations(0.5, 0.6, 0.59, 0.61), 2) is None
    assert early_stop_reason(evaluations(0.5, 0.4, 0.3), 0) is None


def test_without_validation_vertices_the_last_evaluation_is_the_best() -> None:
    nan = float("nan")
    ledger = GnnLedger(1, 1, list_passes(3, 1), evaluations={e: Evaluation(e, 0.5, nan, nan) for e in range(3)})
    assert ledger.best_evaluation is not None
    assert ledger.best_evaluation.epoch == 2
