"""A strategy of the user with a mistake ends the command or the run with a sentence that names the mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.tiny_jobs import job, linear

from culm.cluster.leader.leader import Leader
from culm.cluster.prepare_run import prepare_run
from culm.config import RunConfig
from culm.errors import RunError, UsageError
from culm.plan.recover.role_assignment import RoleAssignment, ShadowReplica, SurvivingCluster
from culm.plan.rent.strategy_goodput import GoodputInputs, StrategyGoodput
from culm.schedule import Plan
from culm.strategies import RunShape, StrategyChoice
from culm.strategies.reroute import RerouteStrategy
from culm.testing import Faults, simulate

JOB = job(layers=[linear] * 4, steps=4)


class RaisesAfterALoss(RerouteStrategy):
    def assign_roles(self, cluster: SurvivingCluster) -> RoleAssignment:
        raise KeyError("no role")


class RaisesInCheck(RerouteStrategy):
    def check(self, run: RunShape) -> None:
        raise ValueError(f"{run.stages} stages")


class RaisesInChoose(RerouteStrategy):
    def choose(self, run: GoodputInputs, shape: RunShape) -> StrategyChoice:
        raise ValueError("undecided")


class RaisesInShadows(RerouteStrategy):
    def initial_shadows(self, plan: Plan) -> tuple[ShadowReplica, ...]:
        raise ValueError("no shadow")


class ShadowsItself(RerouteStrategy):
    def initial_shadows(self, plan: Plan) -> tuple[ShadowReplica, ...]:
        return (ShadowReplica(stage=0, slot=0, source=0),)


class ShadowsNobody(RerouteStrategy):
    def initial_shadows(self, plan: Plan) -> tuple[ShadowReplica, ...]:
        return (ShadowReplica(stage=7, slot=0, source=0),)


class WrongEstimate(RerouteStrategy):
    def estimate(self, run: GoodputInputs) -> StrategyGoodput | None:
        raise ValueError("no estimate")


@pytest.mark.parametrize("in_background", [False, True])
def test_a_strategy_that_raises_after_a_loss_ends_the_run(in_background: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of simulations recoveries are planned in the background, where an exception could go unnoticed."""
    if in_background:
        create = Leader.__init__

        def create_real(self: Leader, *arguments: Any, **options: Any) -> None:
            create(self, *arguments, **options)
            self._simulated = False

        monkeypatch.setattr(Leader, "__init__", create_real)
    with pytest.raises(RunError, match=r"failed: KeyError: 'no role' \(in assign_roles, .*test_wrong_strategies.py:"):
        simulate(JOB, pipelines=2, stages=2, strategy=RaisesAfterALoss, faults=Faults().kill(1, step=2))


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        (RaisesInCheck, ["raised ValueError: 2 stages (in check, ", "test_wrong_strategies.py:"]),
        (RaisesInChoose, ["raised ValueError: undecided (in choose, "]),
        (RaisesInShadows, ["raised ValueError: no shadow (in initial_shadows, "]),
        (ShadowsItself, ["use a slot that does not run stage 0, and a source that does"]),
        (ShadowsNobody, ["initial_shadows has ShadowReplica(stage=7", "the plan has 4 slots and 2 stages"]),
    ],
)
def test_a_mistake_is_found_before_anything_is_started(strategy: type[RerouteStrategy], parts: Sequence[str]) -> None:
    with pytest.raises(UsageError) as caught:
        prepare_run(JOB, RunConfig(pipelines=2, stages=2, strategy=strategy))  # type: ignore[arg-type]
    assert f"test_wrong_strategies:{strategy.__name__}" in str(caught.value)
    assert [part for part in parts if part not in str(caught.value)] == []
