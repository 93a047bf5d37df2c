"""The ledger: reports in any order, steps out in order, every sample accounted for."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.observe.ledger import Ledger
from culm.observe.step_metrics import StepMetrics
from culm.runtime.messages import CountRun, EvaluationReport, StepReport, count_runs

M = 4
"""Micro-batches of a step."""


def report(node: int, step: int, **fields: object) -> StepReport:
    """A good report; node 0 speaks for the loss."""
    good = StepReport(
        worker=node,
        epoch=1,
        step=step,
        reported_at=step + node / 10,
        counts=(CountRun(M, 1, 1),),
        loss_sum=float(step) if node == 0 else None,
        weight_sum=2.0 if node == 0 else None,
    )
    changed: StepReport = msgspec.structs.replace(good, **fields)
    return changed


def evaluation_report(node: int, step: int, loss: float = 1.0, weight: float = 2.0) -> EvaluationReport:
    return EvaluationReport(node, step, ((node, loss, weight, ()),))


def add_all(ledger: Ledger, reports: list[StepReport | EvaluationReport]) -> list[StepMetrics]:
    return [done for one in reports for done in ledger.add_report(one)]


@given(st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_steps_are_committed_once_and_in_order_whatever_the_order_of_reports(
    workers: int, steps: int, order: random.Random
) -> None:
    reports: list[StepReport | EvaluationReport] = [report(n, s) for n in range(workers) for s in range(steps)]
    reports += order.choices(reports, k=3)  # and some come twice
    order.shuffle(reports)
    ledger = Ledger(workers=workers, micro_batch=2)
    assert [done.step for done in add_all(ledger, reports)] == list(range(steps))
    assert (ledger.steps, ledger.next_step) == (steps, steps)
    assert ledger.samples == steps * M * 2
    assert (ledger.samples_lost, ledger.samples_duplicated) == (0, 0)


@given(st.lists(st.lists(st.integers(0, 3), min_size=M, max_size=M), min_size=1, max_size=3))
def test_a_sample_is_lost_if_any_layer_missed_it_and_duplicated_as_often_as_any_had_it_again(
    counts: list[list[int]],
) -> None:
    """The smallest and the largest count of each micro-batch over a worker's segments, from every worker."""
    ledger = Ledger(workers=len(counts), micro_batch=5)
    reports = [report(n, 0, counts=count_runs(c, c)) for n, c in enumerate(counts)]
    (done,) = add_all(ledger, list(reports))
    columns = list(zip(*counts, strict=True))
    assert done.samples_lost == ledger.samples_lost == 5 * sum(min(column) == 0 for column in columns)
    assert done.samples == ledger.samples == 5 * sum(min(column) > 0 for column in columns)
    assert (
        done.samples_duplicated == ledger.samples_duplicated == 5 * sum(max(0, max(column) - 1) for column in columns)
    )
    assert done.samples + done.samples_lost == 5 * M


def test_a_worker_with_several_segments_reports_the_extremes_of_them() -> None:
    ledger = Ledger(workers=1, micro_batch=1)
    (done,) = ledger.add_report(report(0, 0, counts=count_runs((0, 1, 1, 1), (1, 1, 2, 1))))
    assert (done.samples, done.samples_lost, done.samples_duplicated) == (3, 1, 1)


def test_a_step_is_not_committed_before_every_worker_has_reported_it() -> None:
    ledger = Ledger(workers=3, micro_batch=1)
    for node in (2, 0, 0, 2):
        assert ledger.add_report(report(node, 0)) == []
    assert [done.step for done in ledger.add_report(report(1, 0))] == [0]


def test_a_step_ends_when_its_last_report_was_written_and_its_loss_is_the_speakers_mean() -> None:
    ledger = Ledger(workers=2, micro_batch=1)
    (done,) = add_all(
        ledger,
        [report(1, 0, reported_at=9.0), report(0, 0, reported_at=3.0, loss_sum=5.0, weight_sum=4.0, grad_norm=0.5)],
    )
    assert (done.t, done.loss, done.norm) == (9.0, 1.25, 0.5)
    assert ledger.last_step == done


def test_a_report_of_a_committed_step_changes_nothing_and_is_not_kept() -> None:
    ledger = Ledger(workers=1, micro_batch=1, evaluate_every=1, evaluation_parts=1)
    add_all(ledger, [report(0, 0), evaluation_report(0, 0)])
    before = msgspec.json.encode(ledger)
    assert ledger.add_report(report(0, 0)) == ledger.add_report(evaluation_report(0, 0)) == []
    assert msgspec.json.encode(ledger) == before


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_an_evaluation_is_complete_with_all_its_parts_and_holds_its_step_back_until_then(
    order: tuple[int, ...],
) -> None:
    reports: list[StepReport | EvaluationReport]
    two = EvaluationReport(0, 0, ((0, 1.0, 1.0, ()), (2, 2.0, 1.0, ())))
    reports = [report(0, 0), report(1, 0), two, evaluation_report(1, 0, 5.0, 6.0)]
    ledger = Ledger(workers=2, micro_batch=1, evaluate_every=1, evaluation_parts=3)
    *early, last = order
    assert add_all(ledger, [reports[i] for i in early]) == []
    (done,) = ledger.add_report(reports[last])
    assert done.eval_loss == 1.0
    assert ledger.evaluations == {0: 1.0}


def test_an_evaluation_that_is_reported_twice_counts_once() -> None:
    ledger = Ledger(workers=1, micro_batch=1, evaluate_every=1, evaluation_parts=2)
    assert add_all(ledger, [report(0, 0), evaluation_report(0, 0), evaluation_report(0, 0)]) == []
    assert [done.eval_loss for done in ledger.add_report(evaluation_report(1, 0))] == [0.5]


def test_only_every_nth_step_waits_for_an_evaluation() -> None:
    ledger = Ledger(workers=1, micro_batch=1, evaluate_every=3, evaluation_parts=1)
    assert [done.step for done in add_all(ledger, [report(0, s) for s in range(6)])] == [0, 1]
    assert [done.step for done in ledger.add_report(evaluation_report(0, 2))] == [2, 3, 4]
    assert [done.step for done in ledger.add_report(evaluation_report(0, 5))] == [5]
    assert ledger.evaluations == {2: 0.5, 5: 0.5}


def test_the_parts_of_an_evaluation_are_added_in_the_order_of_the_micro_batches() -> None:
    """So that a run has one evaluation, not one for each order of arrival."""
    losses = {0: 1e16, 1: 1.0, 2: -1e16}
    found = set()
    for order in itertools.permutations(losses):
        ledger = Ledger(workers=1, micro_batch=1, evaluate_every=1, evaluation_parts=3)
        reports = [evaluation_report(n, 0, losses[n], 1.0) for n in order]
        found.add(add_all(ledger, [*reports, report(0, 0)])[0].eval_loss)
    assert len(found) == 1


def test_a_resumed_ledger_begins_at_its_step() -> None:
    ledger = Ledger(workers=1, micro_batch=1, next_step=7)
    assert ledger.add_report(report(0, 6)) == []
    assert [done.step for done in ledger.add_report(report(0, 7))] == [7]
    assert ledger.steps == 1


def test_skipped_steps_are_counted() -> None:
    ledger = Ledger(workers=1, micro_batch=1)
    add_all(ledger, [report(0, s, skipped=s == 1) for s in range(3)])
    assert ledger.skipped_steps == 1


def test_a_long_run_takes_no_more_room_than_a_short_one() -> None:
    ledger = Ledger(workers=2, micro_batch=1)

    def room(steps: int) -> int:
        add_all(ledger, [report(n, s) for s in range(ledger.next_step, steps) for n in range(2)])
        return len(msgspec.json.encode(ledger))

    assert room(5000) <= room(50) + 40
