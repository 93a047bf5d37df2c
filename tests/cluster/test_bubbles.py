"""What is done in bubbles, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
from tests.known import ready, truth

from culm.testing.cluster import Simulated, enact

from .jobs import job, linear

SHAPE: dict[str, Any] = {"pipelines": 1, "stages": 3}
STEPS = 8
JOB = job(layers=[linear] * 6, steps=STEPS)
FORWARD_S, BACKWARD_S = 1.0, 2.0


def even(node: int, step: int, action: str) -> float:
    """The same for all, every time; the ends of a step take nothing."""
    del node, step
    return FORWARD_S if "F" in action else BACKWARD_S if "B" in action else 0.0


def run(strategy: str, cost: Any = even) -> Simulated:
    """Actions may take minutes here: nobody is to be taken for stuck."""
    return enact(JOB, ready(JOB, strategy=strategy, suspect_after=600, **SHAPE), cost=cost)


def test_replicas_run_forward_in_bubbles_without_holding_the_run_up() -> None:
    """Once at the most for each: until its first forward nobody knows how long it takes."""
    eager, lazy = run("shadow"), run("shadow-lazy")
    assert eager.summary["bubble_share"] > 0.3
    assert eager.virtual_s <= lazy.virtual_s + 3 * FORWARD_S


def test_a_bubble_that_is_too_short_for_a_forward_is_left_alone() -> None:
    """Stages whose forward takes longer than any wait: after the first, which shows it, none is run."""

    def slow(node: int, step: int, action: str) -> float:
        own = action.startswith(f"{node}F")
        return 0.1 if own else 50.0 if "F" in action else even(node, step, action)

    eager, lazy = run("shadow", slow), run("shadow-lazy", slow)
    assert eager.virtual_s <= lazy.virtual_s + 3 * 50.0
    assert eager.summary["bubble_share"] <= 3 / (3 * 4 * STEPS) + 1e-9


@pytest.mark.parametrize("strategy", ["shadow", "shadow-lazy"])
def test_what_is_done_in_bubbles_changes_nothing_that_is_learned(strategy: str) -> None:
    assert run(strategy).weights_sha256 == truth(JOB).weights_sha256
