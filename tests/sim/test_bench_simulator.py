"""The bench predicts with the simulator, and what it measures are real runs."""

from __future__ import annotations

import pytest
from benchmarks.simulator import Calibration, Case, cases, measure, predict

from culm.providers.local import LocalNursery

KNOWN = Calibration(action_s=0.004, layer_s=0.02, around_s=1.0, again_s={"checkpoint": 2.0, "reroute": 0.5})


def test_an_undisturbed_run_is_its_steps_and_what_is_around_them() -> None:
    step_s = (12 + 3) * (0.004 + 2 * 0.02)
    assert predict(Case("plain", 1, 4, 10), KNOWN) == pytest.approx(1.0 + 10 * step_s, rel=1e-6)


def test_a_restart_costs_its_pause_and_the_steps_since_the_checkpoint() -> None:
    plain = predict(Case("plain", 1, 4, 20), KNOWN)
    hurt = predict(Case("hurt", 1, 4, 20, "checkpoint", ((10, 1),), 4), KNOWN)
    step_s = (12 + 3) * 0.044
    assert hurt - plain == pytest.approx(2.0 + 2 * step_s, rel=0.01)


def test_a_strategy_that_survives_goes_on_more_slowly() -> None:
    plain = predict(Case("plain", 2, 4, 20), KNOWN)
    early, late = (predict(Case("hurt", 2, 4, 20, "reroute", ((at, 1),)), KNOWN) for at in (5, 15))
    assert plain + 0.5 < late < early


def test_cases_differ_by_seed_and_leave_room_for_a_checkpoint() -> None:
    found = [case for case in cases(["checkpoint"], quick=False) if case.kills]
    assert len(found) == 3
    assert all(case.kills[0][0] > 2 * case.checkpoint_every for case in found)


@pytest.mark.real
def test_a_killed_run_is_measured_to_its_last_step() -> None:
    with LocalNursery() as nursery:
        found = measure(Case("real", 1, 2, 12, "checkpoint", ((9, 1),), 2), nursery)
    assert found.seconds > 12 * found.step_s > 0
    assert found.again_s > 0
