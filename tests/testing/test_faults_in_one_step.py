"""Two and three faults in one step, of every kind that a strategy survives: the result must be that of one process.

The moments are drawn, from a fixed seed. `EXAMPLES=1000 pytest tests/testing/test_faults_in_one_step.py` draws more.
"""

from __future__ import annotations

import os
import random

import pytest
from tests.cached_runs import reference_result
from tests.testing.test_kill_at_every_action import SCHEDULES, SURVIVING, prepared_setup, sweep_job

from culm import strategies
from culm.schedule import Plan
from culm.testing import Faults
from culm.testing.simulated_cluster import LEASE_S
from culm.testing.survival_check import run_and_compare

PIPELINES, STAGES = 2, 3
STEP = 2
"""An exception before the first commit is taken for an error of the job."""
CASES = int(os.environ.get("EXAMPLES", "10"))
KINDS = ("kill", "silence", "exception", "notice", "short notice", "pause", "flipped frame")
LOSSES = KINDS[:5]
MAX_NTH = 8
"""Every worker runs more actions in the step."""


def add_fault(faults: Faults, kind: str, node: int, nth: int, rng: random.Random) -> Faults:
    match kind:
        case "kill":
            return faults.kill(node, step=STEP, nth=nth)
        case "silence":
            return faults.kill(node, silence=True, step=STEP, nth=nth)
        case "exception":
            return faults.fail(node, error=f"error of node {node}", step=STEP, nth=nth)
        case "notice":
            return faults.warn(node, seconds=30.0, step=STEP, nth=nth)
        case "short notice":
            return faults.warn(node, seconds=round(rng.uniform(0.001, 0.2), 3), step=STEP, nth=nth)
        case "pause":
            return faults.pause(node, seconds=round(rng.uniform(0.01, 0.9 * LEASE_S), 3), step=STEP, nth=nth)
    return faults.flip_frame(node, nth=nth)


def drawn_faults(rng: random.Random, strategy: str, plan: Plan, count: int) -> Faults:
    """Faults of different nodes in one step. At most one is no loss, and the strategy survives the losses together."""
    kinds = [rng.choice(LOSSES) for _ in range(count - 1)] + [rng.choice(KINDS)]
    survives = strategies.get(strategy).survives
    while True:
        nodes = rng.sample(range(PIPELINES * STAGES), count)
        if survives(plan, [node for node, kind in zip(nodes, kinds, strict=True) if kind in LOSSES]):
            break
        kinds = kinds[1:] + kinds[:1]
    faults = Faults()
    for kind, node in zip(kinds, nodes, strict=True):
        faults = add_fault(faults, kind, node, rng.randint(1, MAX_NTH), rng)
    return faults


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("strategy", SURVIVING)
def test_several_faults_in_one_step_change_nothing_that_is_learned(strategy: str, count: int) -> None:
    struck = 0
    for case in range(CASES):
        rng = random.Random(f"{strategy} {count} {case}")
        setup = prepared_setup(PIPELINES, STAGES, SCHEDULES[case % 2], strategy, True)
        faults = drawn_faults(rng, strategy, Plan.from_text(setup.plan), count)
        run = run_and_compare(sweep_job(), setup, faults, case, reference_result(sweep_job()))
        struck += len(faults.all) - len(run.faults_not_reached(faults))
    assert struck >= 0.8 * count * CASES, "the faults of a case strike, unless an earlier one prevents that"
