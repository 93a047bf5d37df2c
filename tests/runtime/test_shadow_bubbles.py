"""What shadow replicas do while their worker waits."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cached_runs import cached_setup, reference_result
from tests.tiny_jobs import job, linear

from culm.testing.simulated_cluster import SimulatedRun, run_prepared

SHAPE: dict[str, Any] = {"pipelines": 1, "stages": 3}
STEPS = 8
JOB = job(layers=[linear] * 6, steps=STEPS)
FORWARD_S, BACKWARD_S = 1.0, 2.0


def even(node: int, step: int, action: str) -> float:
    """Equal times for all actions; the ends of a step take no time."""
    del node, step
    return FORWARD_S if "F" in action else BACKWARD_S if "B" in action else 0.0


def run(strategy: str, cost: Any = even) -> SimulatedRun:
    """Actions may take minutes here: no worker must be taken for hung."""
    return run_prepared(JOB, cached_setup(JOB, strategy=strategy, suspect_after=600, **SHAPE), cost=cost)


def test_replicas_run_forwards_in_bubbles_without_delaying_the_run() -> None:
    """At most one forward per stage: its duration is not known before the first."""
    eager, lazy = run("shadow"), run("shadow-lazy")
    assert eager.summary["bubble_share"] > 0.3
    assert eager.virtual_s <= lazy.virtual_s + 3 * FORWARD_S


def test_a_bubble_that_is_too_short_for_a_forward_is_not_used() -> None:
    """Stages whose forward takes longer than any wait: after the first one, none is run."""

    def slow(node: int, step: int, action: str) -> float:
        own = action.startswith(f"{node}F")
        return 0.1 if own else 50.0 if "F" in action else even(node, step, action)

    eager, lazy = run("shadow", slow), run("shadow-lazy", slow)
    assert eager.virtual_s <= lazy.virtual_s + 3 * 50.0
    assert eager.summary["bubble_share"] <= 3 / (3 * 4 * STEPS) + 1e-9


@pytest.mark.parametrize("strategy", ["shadow", "shadow-lazy"])
def test_work_in_bubbles_does_not_change_training(strategy: str) -> None:
    assert run(strategy).weights_sha256 == reference_result(JOB).weights_sha256
