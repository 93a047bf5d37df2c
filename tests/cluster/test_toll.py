"""What a loss cost, and to what: no second is counted twice, and none to the wrong cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from culm.cluster.toll import Halting, Recovering, Toll
from culm.schedule.generate import one_f_one_b

PLAN = one_f_one_b(pipelines=1, stages=2, micro_batches=2).to_text()


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.t = 0.0

    def now(self) -> float:
        return self.t

    def struck_at(self, node: int) -> float | None:
        return None


def steady(watch: Watch, steps: int = 5) -> Any:
    """A run of steps of one second each."""
    toll = Toll(watch)  # type: ignore[arg-type]
    for _ in range(steps):
        watch.t += 1.0
        toll.committed()
    return toll


def made(toll: Toll, watch: Watch, *, step: int) -> Recovering:
    """A loss that is known of now; deciding takes 0.1 s, moving state 0.2 s."""
    halting = Halting(2, {3}, {0, 1}, watch.t, toll.took_to_detect([3]), step)
    recovery = SimpleNamespace(steps=(step,), redone=0)
    epoch = SimpleNamespace(start=step + 1, reshapes=False, recovery=recovery, plan=PLAN)
    regrouped: Any = SimpleNamespace(epoch=epoch, source="peers")
    return Recovering(halting, watch.t + 0.1, regrouped, ready_at=watch.t + 0.3, lost={3})


def test_a_silence_that_nobody_was_told_of_is_time_to_detect_and_not_to_redo() -> None:
    watch = Watch()
    toll = steady(watch)
    watch.t += 8.0  # the step was due after 1 s; then the lease ran out
    recovering = made(toll, watch, step=5)
    watch.t += 0.7
    found = toll.recovered(recovering)
    assert [found.detect_ms, found.decide_ms, found.move_ms] == pytest.approx([7000.0, 100.0, 200.0])
    assert found.redo_ms == pytest.approx(400.0)


def test_a_loss_that_was_seen_at_once_took_as_long_as_from_the_sign_on() -> None:
    watch = Watch()
    toll = steady(watch)
    watch.t += 1.3
    toll.sign()
    watch.t += 0.05
    assert toll.took_to_detect([3]) == pytest.approx(0.05)


def test_what_one_loss_cost_is_not_counted_to_the_next() -> None:
    watch = Watch()
    toll = steady(watch)
    watch.t += 8.0
    recovering = made(toll, watch, step=5)
    watch.t += 0.7
    toll.recovered(recovering)
    toll.resumed()
    watch.t += 0.4  # before the next step is there
    recovering = made(toll, watch, step=6)
    watch.t += 0.9
    found = toll.recovered(recovering)
    assert found.detect_ms == 0.0
    assert sum([found.decide_ms, found.move_ms, found.redo_ms]) == pytest.approx(300.0)
