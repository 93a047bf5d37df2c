"""Kill each node at each of its actions, under every strategy that survives losses: the result must be the same.

A job of 2 pipelines x 3 stages, killed in its second step, or in its first where sums need not be exact; three steps
follow. The reference is one process. In other shapes, and for losses of several nodes, each strategy runs a part of the
moments: together they cover every moment.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TypeVar

import pytest
import torch
from tests.cached_runs import (
    cached_setup,
    reference_result,
    with_early_grad_send,
    with_split_plan,
    with_two_range_plan,
)
from tests.testing.small_job import job
from torch import nn

from culm.cluster.node_faults import NodeFault
from culm.cluster.run_setup import RunSetup
from culm.job import Job
from culm.schedule import Plan
from culm.testing import Faults
from culm.testing.simulated_cluster import SimulatedRun
from culm.testing.survival_check import run_and_compare

SURVIVING = ("shadow", "shadow-lazy", "reroute")
SCHEDULES = ("1f1b", "zb")
EARLY_GRAD_SEND = "1f1b with early gradients"
"""Input gradients are sent before the weight gradients are done: the last backwards are split."""
STEP = 1
T = TypeVar("T")


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """One fused call of torch, because there are a thousand runs."""
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


@functools.cache
def sweep_job(exact: bool = True) -> Job:
    """Four layers, so that a stage has one or two of them."""
    return job(steps=(STEP if exact else 0) + 4, exact=exact, optimizer=adamw)


@functools.cache
def prepared_setup(pipelines: int, stages: int, schedule: str, strategy: str, exact: bool) -> RunSetup:
    plain = "1f1b" if schedule == EARLY_GRAD_SEND else schedule
    made = cached_setup(sweep_job(exact), pipelines=pipelines, stages=stages, schedule=plain, strategy=strategy)
    if schedule == "planned":
        return with_split_plan(made)
    return with_early_grad_send(made) if schedule == EARLY_GRAD_SEND else made


@functools.cache
def two_range_job(clip_norm: float | None) -> Job:
    return job(steps=STEP + 4, exact=True, optimizer=adamw, clip_norm=clip_norm)


@functools.cache
def two_range_setup(strategy: str, clip_norm: float | None) -> RunSetup:
    made = cached_setup(
        two_range_job(clip_norm),
        same_layers_as=sweep_job(),
        pipelines=2,
        stages=2,
        schedule="planned",
        strategy=strategy,
    )
    return with_two_range_plan(made)


def run_and_check(faults: Faults, setup: RunSetup, exact: bool) -> SimulatedRun:
    run = run_and_compare(sweep_job(exact), setup, faults, 0, reference_result(sweep_job(exact)))
    assert not run.faults_not_reached(faults), f"{faults} was to strike, and {run.faults_not_reached(faults)} did not"
    assert run.summary["preemptions"] == sum(len(fault.nodes) for fault in faults.all if isinstance(fault, NodeFault))
    return run


def moments(setup: RunSetup, node: int) -> Iterator[str]:
    """All actions of a node in a step, and the leader's commit."""
    for action in Plan.from_text(setup.plan).workers[node]:
        yield str(action)
        if str(action).endswith("S"):
            yield f"{action}+"
    if node == 0:
        yield "commit"


def every_nth(strategy: str, all_moments: Iterable[T], of: int = 3) -> list[T]:
    """Every `of`-th of the moments; each strategy starts at a different one."""
    return list(all_moments)[SURVIVING.index(strategy) % of :: of]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("node", range(6))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", SURVIVING)
def test_a_node_killed_at_any_of_its_actions_changes_nothing_that_is_learned(
    strategy: str, schedule: str, node: int, exact: bool
) -> None:
    setup = prepared_setup(2, 3, schedule, strategy, exact)
    for at in moments(setup, node):
        run_and_check(Faults().kill(node, at=at, step=STEP if exact else 0), setup, exact)


@pytest.mark.parametrize("node", range(6))
@pytest.mark.parametrize("strategy", SURVIVING)
def test_a_kill_at_any_action_of_a_planned_schedule_changes_nothing(strategy: str, node: int) -> None:
    setup = prepared_setup(2, 3, "planned", strategy, True)
    for at in moments(setup, node):
        run_and_check(Faults().kill(node, at=at, step=STEP), setup, True)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("strategy", SURVIVING)
def test_a_kill_at_any_action_of_a_plan_with_two_segments_per_worker_changes_nothing(
    strategy: str, clip_norm: float | None
) -> None:
    setup = two_range_setup(strategy, clip_norm)
    for node in range(4):
        for at in every_nth(strategy, moments(setup, node), of=4):
            run = run_and_compare(
                two_range_job(clip_norm),
                setup,
                Faults().kill(node, at=at, step=STEP),
                0,
                reference_result(two_range_job(clip_norm)),
            )
            assert run.summary["preemptions"] == 1


def test_without_a_strategy_a_planned_schedule_trains_the_same_and_a_kill_ends_it() -> None:
    setup = prepared_setup(2, 3, "planned", "none", True)
    run_and_check(Faults(), setup, True)
    for node in range(6):
        at = list(moments(setup, node))[node]
        with pytest.raises(AssertionError, match="NodeLost"):
            run_and_check(Faults().kill(node, at=at, step=STEP), setup, True)


@pytest.mark.parametrize("node", range(3))
@pytest.mark.parametrize("schedule", [EARLY_GRAD_SEND, "zb", "planned"])
@pytest.mark.parametrize("strategy", ["shadow", "shadow-lazy"])
def test_one_pipeline_alone_survives_by_its_shadows(strategy: str, schedule: str, node: int) -> None:
    setup = prepared_setup(1, 3, schedule, strategy, True)
    for at in every_nth(strategy, moments(setup, node), of=2):
        run_and_check(Faults().kill(node, at=at, step=STEP), setup, True)


@pytest.mark.parametrize("schedule", [EARLY_GRAD_SEND, "zb", "planned"])
@pytest.mark.parametrize("strategy", SURVIVING)
def test_three_pipelines_survive_too(strategy: str, schedule: str) -> None:
    """One fault in each pipeline: the first stage of one, the last of another."""
    setup = prepared_setup(3, 2, schedule, strategy, True)
    for node in (0, 3, 4):
        for at in every_nth(strategy, moments(setup, node)):
            run_and_check(Faults().kill(node, at=at, step=STEP), setup, True)


@pytest.mark.parametrize(("schedule", "pair"), list(zip(SCHEDULES * 2, [(0, 1), (1, 2), (4, 5), (2, 3)], strict=True)))
@pytest.mark.parametrize("strategy", SURVIVING)
def test_neighbours_may_be_lost_together(strategy: str, schedule: str, pair: tuple[int, int]) -> None:
    """Also across the end of a pipeline, and with the loss of their messages in flight."""
    setup = prepared_setup(2, 3, schedule, strategy, True)
    for number, at in enumerate(every_nth(strategy, moments(setup, pair[0]))):
        run_and_check(Faults().kill(pair, at=at, step=STEP, silence=number % 2 == 1), setup, True)


@pytest.mark.parametrize("strategy", SURVIVING)
def test_a_whole_pipeline_may_be_lost_at_once(strategy: str) -> None:
    setup = prepared_setup(2, 3, "1f1b", strategy, True)
    for pipeline in ((0, 1, 2), (3, 4, 5)):
        for at in every_nth(strategy, moments(setup, pipeline[1])):
            run_and_check(Faults().kill(pipeline, at=at, step=STEP), setup, True)


@pytest.mark.parametrize("moment", ["inventory", "adopt"])
@pytest.mark.parametrize(("second", "first_at_its"), [(0, "beginning"), (2, "end"), (3, "beginning"), (5, "end")])
@pytest.mark.parametrize("strategy", SURVIVING)
def test_a_second_node_may_be_lost_during_the_recovery_from_the_first(
    strategy: str, second: int, first_at_its: str, moment: str
) -> None:
    """The second loss is at the report of the inventory, and at the start of the new epoch, with the leader among them.
    Each schedule gets both moments, the leader, and a first loss at the beginning and at the end of a step."""
    schedule = SCHEDULES[(second % 3 // 2 + (second >= 3) + (moment == "adopt") + SURVIVING.index(strategy)) % 2]
    setup = prepared_setup(2, 3, schedule, strategy, True)
    nth = 2 if moment == "adopt" else 1  # the first epoch is adopted once already
    at = "1F0" if first_at_its == "beginning" else "1R" if schedule == "zb" else "1S+"
    run_and_check(Faults().kill(1, at=at, step=STEP).kill(second, at=moment, nth=nth), setup, True)


@pytest.mark.parametrize("second", [0, 3])
@pytest.mark.parametrize("strategy", SURVIVING)
def test_a_second_node_may_be_lost_while_the_step_is_done_again(strategy: str, second: int) -> None:
    setup = prepared_setup(2, 3, "1f1b", strategy, True)
    for nth in every_nth(strategy, range(1, 8)):
        run_and_check(Faults().kill(1, at="1B1", step=STEP).kill(second, step=STEP + 1, nth=nth), setup, True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", SURVIVING)
def test_a_node_silent_for_too_long_is_lost_and_its_later_messages_are_ignored(strategy: str, schedule: str) -> None:
    setup = prepared_setup(2, 3, schedule, strategy, True)
    for node, hurt in ((0, Faults().pause), (4, Faults().partition)):
        for at in every_nth(strategy, moments(setup, node))[::2]:
            run_and_check(hurt(node, at=at, step=STEP, seconds=6.5), setup, True)
