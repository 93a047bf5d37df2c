"""Re-routing around failed slots: known answers, and properties of every plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import CulmError, PlanError, ScheduleError
from culm.plan import (
    ActivationLimit,
    PlanCase,
    Slot,
    explain_plan,
    fits_in_bubble,
    plan_greedy,
    staggered_period,
    step_lower_bound,
)
from culm.plan.replan.greedy_planner import PRIORITY_RULES, SHUFFLED_RULES, plan_step_time, plan_with_rule
from culm.schedule import Action, Costs, Kind, check_plan, time_plan

CASE_WITH_FAILURE = PlanCase(pipelines=3, stages=4, micro_batches=18, failed=frozenset({Slot(2, 2)}))
"""The example of the SlipStream paper: one worker of the third stage has failed."""


@pytest.mark.parametrize(
    ("failed", "split", "stagger", "memory", "slots"),
    [
        (set(), False, False, None, 27),
        ({Slot(2, 2)}, False, False, None, 33),
        ({Slot(2, 2)}, True, False, None, 29),
        ({Slot(2, 2)}, True, True, None, 27),
        ({Slot(2, 2)}, True, True, "1f1b", 32),
    ],
)
def test_the_answers_of_the_paper_are_found(
    failed: set[Slot], split: bool, stagger: bool, memory: ActivationLimit, slots: int
) -> None:
    case = replace(CASE_WITH_FAILURE, failed=frozenset(failed), split=split, stagger=stagger, memory=memory)
    assert plan_greedy(case).step_time == slots


@pytest.mark.parametrize("options", [(False, False), (True, False), (True, True)])
def test_without_a_cap_these_answers_meet_the_bound_and_so_are_optimal(options: tuple[bool, bool]) -> None:
    result = plan_greedy(replace(CASE_WITH_FAILURE, split=options[0], stagger=options[1]))
    assert result.gap == 0
    assert result.step_time == result.lower_bound


def test_under_the_cap_of_1f1b_the_bound_stays_below_the_optimum_and_the_gap_says_so() -> None:
    result = plan_greedy(replace(CASE_WITH_FAILURE, memory="1f1b"))
    assert (result.step_time, result.lower_bound) == (32, 31)
    assert result.gap == pytest.approx(1 / 31)


def test_less_memory_never_means_fewer_slots() -> None:
    slots = [plan_greedy(replace(CASE_WITH_FAILURE, memory=memory)).step_time for memory in (None, 9, 4, 2, 1)]
    assert slots == sorted(slots)
    assert slots[0] < slots[-1]


def test_two_failures_in_one_stage_cost_more_than_in_two() -> None:
    same = plan_greedy(replace(CASE_WITH_FAILURE, failed=frozenset({Slot(1, 2), Slot(2, 2)})))
    apart = plan_greedy(replace(CASE_WITH_FAILURE, failed=frozenset({Slot(1, 1), Slot(2, 2)})))
    assert (apart.step_time, same.step_time) == (27, 54)


@pytest.mark.parametrize(("micro_batches", "free"), [(4, True), (6, True), (7, False), (9, False)])
def test_a_failure_is_free_if_its_work_fits_into_the_bubble_of_1f1b(micro_batches: int, free: bool) -> None:
    case = replace(CASE_WITH_FAILURE, micro_batches=3 * micro_batches)
    fault_free = 3 * (micro_batches + case.stages - 1)
    assert fits_in_bubble(case, 2) is free
    assert (plan_greedy(case).step_time <= fault_free) is free


def test_a_stage_without_a_live_worker_is_refused() -> None:
    with pytest.raises(PlanError, match="stage 1 has lost all of its 3 workers, so its layers are lost"):
        replace(CASE_WITH_FAILURE, failed=frozenset(Slot(pipeline, 1) for pipeline in range(3)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"failed": frozenset({Slot(3, 0)})}, "the failed slot 3.0 does not exist: use 0.0 to 2.3"),
        ({"failed": frozenset({Slot(0, -1)})}, "the failed slot 0.-1 does not exist"),
        ({"memory": 0}, "memory is 0: use none, 1f1b, or a number of activations of at least 1"),
        ({"memory": "2f2b"}, "memory is '2f2b': use none, 1f1b"),
        ({"micro_batches": 2}, "micro_batches is 2, fewer than the 3 pipelines"),
        ({"costs": Costs(input=-1.0)}, "Costs.input is -1.0: use a number of at least 0"),
        ({"costs": Costs(weight=(1.0, 2.0))}, "Costs.weight has 2 numbers: use 4"),
    ],
)
def test_an_invalid_case_is_refused_in_one_sentence(change: dict[str, object], sentence: str) -> None:
    with pytest.raises((PlanError, ScheduleError)) as error:
        replace(CASE_WITH_FAILURE, **change)  # type: ignore[arg-type]
    assert isinstance(error.value, CulmError)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_the_explanation_names_the_bottleneck_stage_and_the_gap() -> None:
    hurt, decisive, quality = explain_plan(plan_greedy(CASE_WITH_FAILURE))
    assert hurt.startswith("stage 2 runs on 2 of 3 workers: up to 9 micro-batches each, 3 more")
    assert "comes from stage 2" in decisive
    assert "no plan is shorter" in quality
    assert (
        "a shorter one may exist, but not below 31"
        in explain_plan(plan_greedy(replace(CASE_WITH_FAILURE, memory="1f1b")))[-1]
    )


def test_the_period_is_that_of_a_long_run() -> None:
    plan = plan_greedy(replace(CASE_WITH_FAILURE, memory=3)).plan
    steps = 40
    free = [0.0] * plan.stages
    for _ in range(steps):
        free = _one_step(plan.workers, plan.stages, free)
    assert staggered_period(plan) == pytest.approx(max(free) / steps, rel=1 / steps)


def _one_step(workers: tuple[tuple[Action, ...], ...], stages: int, begin: list[float]) -> list[float]:
    """When each stage ends a step that it began at `begin`, with unit times: by repeated relaxation."""
    at = {(w, a): begin[w % stages] for w, row in enumerate(workers) for a in row if a.micro is not None}
    owner = {a: w for w, a in at}
    changed = True
    while changed:
        changed = False
        for w, row in enumerate(workers):
            ready = begin[w % stages]
            for a in (a for a in row if a.micro is not None):
                near = {Kind.F: a.segment - 1, Kind.I: a.segment + 1}.get(a.kind)
                source = None if near is None else Action(near, a.kind, a.micro)
                needed = at[owner[source], source] + 1 if source in owner and source is not None else 0.0
                start = max(ready, needed, at[w, a])
                changed |= start > at[w, a]
                at[w, a], ready = start, start + 1
    return [max(start + 1 for (w, _), start in at.items() if w % stages == s) for s in range(stages)]


@pytest.mark.parametrize(("micro_batches", "stage", "memory"), list(product((2, 3), (0, 1), (None, 1, 2))))
def test_no_plan_is_below_the_bound(micro_batches: int, stage: int, memory: int | None) -> None:
    failed = frozenset({Slot(1, stage)})
    shape = PlanCase(pipelines=2, stages=2, micro_batches=micro_batches, failed=failed)
    case = replace(shape, stagger=False, memory=memory)
    assert step_lower_bound(case) <= shortest_makespan(case) <= plan_greedy(case).step_time


def shortest_makespan(case: PlanCase) -> int:
    """Exhaustive search, with split backward and unit times.

    A state says of each (stage, micro-batch) how many of F, I and W are done, and who runs it.
    """
    home = [pipeline for pipeline, block in enumerate(case.micros_by_pipeline) for _ in block]
    cells = [(stage, micro) for stage in range(case.stages) for micro in range(case.micro_batches)]
    states, slots = {tuple((0, -1) for _ in cells)}, 0
    while not any(all(done == 3 for done, _ in state) for state in states):
        known = [dict(zip(cells, state, strict=True)) for state in states]
        states = {after for state in known for after in _successors(case, home, cells, state)}
        slots += 1
    return slots


State = dict[tuple[int, int], tuple[int, int]]


def _successors(
    case: PlanCase, home: list[int], cells: list[tuple[int, int]], state: State
) -> list[tuple[tuple[int, int], ...]]:
    out = [dict(state)]
    for stage in range(case.stages):
        for pipeline in case.live_pipelines(stage):
            out = [new for partial in out for new in _next_states(case, home, state, partial, Slot(pipeline, stage))]
    return [tuple(new[cell] for cell in cells) for new in out]


def _next_states(case: PlanCase, home: list[int], before: State, state: State, slot: Slot) -> list[State]:
    """The possible states after a slot in which one worker idles or runs an action that it can start."""
    out = [state]
    alive = sum(0 < phase < 3 and who == slot.pipeline for (s, _), (phase, who) in before.items() if s == slot.stage)
    for micro in range(case.micro_batches):
        cell = (slot.stage, micro)
        phase, who = before[cell]
        if state[cell] != before[cell] or phase == 3:
            continue
        mine = who == slot.pipeline
        adoptable = home[micro] == slot.pipeline or Slot(home[micro], slot.stage) in case.failed
        ahead = slot.stage == 0 or before[slot.stage - 1, micro][0] >= 1
        behind = slot.stage == case.stages - 1 or before[slot.stage + 1, micro][0] >= 2
        may = (adoptable and ahead and alive < case.max_activations(slot.stage), mine and behind, mine)[phase]
        out += [{**state, cell: (phase + 1, slot.pipeline)}] if may else []
    return out


@st.composite
def cases(draw: st.DrawFn) -> PlanCase:
    D, P = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    per_stage = [draw(st.sets(st.integers(0, D - 1), max_size=D - 1)) for _ in range(P)] if D > 1 else []
    price = st.sampled_from((0.0, 0.1, 0.5, 1.0, 2.0, 3.0))
    each = st.one_of(price, st.tuples(*[price] * P))
    return PlanCase(
        pipelines=D,
        stages=P,
        micro_batches=draw(st.integers(D, 4 * D + 1)),
        failed=frozenset(Slot(d, s) for s, lost in enumerate(per_stage) for d in lost),
        costs=Costs(
            forward=draw(each),
            input=draw(each),
            weight=draw(each),
            reduce=draw(price),
            step=draw(price),
            send=draw(price),
        ),
        split=draw(st.booleans()),
        stagger=draw(st.booleans()),
        memory=draw(st.sampled_from((None, "1f1b", 1, 2, 5))),
    )


@given(cases(), st.sampled_from(PRIORITY_RULES + SHUFFLED_RULES))
def test_every_plan_of_every_rule_can_run_and_is_no_shorter_than_the_bound(case: PlanCase, rule: object) -> None:
    plan = plan_with_rule(case, rule)  # type: ignore[arg-type]
    report = check_plan(plan)
    assert plan_step_time(case, plan) >= step_lower_bound(case) * (1 - 1e-9)
    for worker, peak in enumerate(report.peak_activations):
        assert peak <= case.max_activations(worker % case.stages)


@given(cases())
def test_failed_slots_are_never_used_and_peers_share_their_work_evenly(case: PlanCase) -> None:
    plan = plan_greedy(case).plan
    for worker, actions in enumerate(plan.workers):
        slot = Slot(*divmod(worker, case.stages))
        forwards = sum(action.kind is Kind.F for action in actions)
        assert bool(actions) == (slot not in case.failed)
        assert forwards <= case.max_micros_per_worker(slot.stage)


@given(cases())
def test_the_best_plan_has_its_stated_time_and_is_as_short_as_that_of_any_rule(case: PlanCase) -> None:
    result = plan_greedy(case)
    assert result.step_time == plan_step_time(case, result.plan)
    assert result.step_time <= min(plan_step_time(case, plan_with_rule(case, rule)) for rule in PRIORITY_RULES) * (
        1 + 1e-9
    )
    assert result.gap >= 0
    assert result.step_time <= time_plan(result.plan, case.costs).makespan * (1 + 1e-9)
