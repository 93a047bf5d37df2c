"""The cost of a loss: no second is counted twice or for the wrong cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from culm.cluster.leader.recovery_metrics import EpochHalt, OpenRecovery, RecoveryMetrics
from culm.schedule.builtin_schedules import one_f_one_b

PLAN = one_f_one_b(pipelines=1, stages=2, micro_batches=2).to_text()


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.t = 0.0

    def now(self) -> float:
        return self.t

    def killed_at(self, node: int) -> float | None:
        return None


def steady(watch: Watch, steps: int = 5) -> Any:
    """Steps of one second each."""
    metrics = RecoveryMetrics(watch)
    for _ in range(steps):
        watch.t += 1.0
        metrics.record_commit()
    return metrics


def open_recovery(metrics: RecoveryMetrics, watch: Watch, *, step: int) -> OpenRecovery:
    """A loss detected now; deciding takes 0.1 s, moving state 0.2 s."""
    halt = EpochHalt(2, {3}, {0, 1}, watch.t, metrics.detection_time([3]), step)
    recovery = SimpleNamespace(steps=(step,), redone_actions=0)
    epoch = SimpleNamespace(start=step + 1, changes_shape=False, recovery=recovery, plan=PLAN)
    regrouped: Any = SimpleNamespace(epoch=epoch, source="peers")
    return OpenRecovery(halt, watch.t + 0.1, regrouped, ready_at=watch.t + 0.3, lost_nodes={3})


def test_an_unreported_silence_counts_as_detection_time() -> None:
    watch = Watch()
    metrics = steady(watch)
    watch.t += 8.0  # the step was due after 1 s; then the lease ran out
    recovery = open_recovery(metrics, watch, step=5)
    watch.t += 0.7
    record = metrics.record_recovery(recovery)
    assert [record.detect_ms, record.decide_ms, record.move_ms] == pytest.approx([7000.0, 100.0, 200.0])
    assert record.redo_ms == pytest.approx(400.0)


def test_detection_time_starts_with_the_first_report() -> None:
    watch = Watch()
    metrics = steady(watch)
    watch.t += 1.3
    metrics.note_suspicion()
    watch.t += 0.05
    assert metrics.detection_time([3]) == pytest.approx(0.05)


def test_the_cost_of_a_loss_is_not_counted_for_the_next() -> None:
    watch = Watch()
    metrics = steady(watch)
    watch.t += 8.0
    recovery = open_recovery(metrics, watch, step=5)
    watch.t += 0.7
    metrics.record_recovery(recovery)
    metrics.restart_step_timer()
    watch.t += 0.4  # before the next step is there
    recovery = open_recovery(metrics, watch, step=6)
    watch.t += 0.9
    record = metrics.record_recovery(recovery)
    assert record.detect_ms == 0.0
    assert sum([record.decide_ms, record.move_ms, record.redo_ms]) == pytest.approx(300.0)
