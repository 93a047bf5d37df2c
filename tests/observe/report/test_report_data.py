"""What is said of a run holds whatever became of it, and nothing is made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.observe.sample_runs import EVENTS, START, SUMMARY, contents, steps
from tests.observe.writers.test_run_folder_contents import job, run, run_until_killed

from culm.observe.report.load_run import RunContents, RunFolderReader
from culm.observe.report.report_data import (
    build_report_data,
    cumulative_goodput,
    downsample_indices,
    event_sentence,
    pace_windows,
    same_weights,
)
from culm.observe.step_metrics import StepMetrics
from culm.testing import Faults


def test_the_state_of_a_completed_run_is_that_of_its_summary() -> None:
    found = build_report_data(contents())
    assert (found.state, found.steps, found.steps_requested, found.samples) == ("done", 10, 10, 80)
    assert found.every_sample_once
    assert found.proof == "80 of 80 expected, 0 lost, 0 counted twice"
    assert (found.preemptions, found.goodput, found.loss) == (1, 8.0, 0.1)
    assert found.recovering_s == pytest.approx(0.1)
    assert [(r.t, r.lost, r.source, r.redone_actions) for r in found.recoveries] == [(4.8, ("2",), "peers", 3)]
    assert found.checkpoints == ((5.0, 4, 1000),)


def test_the_state_of_a_running_run_follows_from_its_lines() -> None:
    found = build_report_data(contents(summary=None, steps=steps(6), events=EVENTS, idle_s=1.0))
    assert (found.state, found.steps, found.samples, found.preemptions) == ("running", 6, 48, 1)
    assert found.every_sample_once
    assert found.proof == "so far 48 of 48 in 6 committed steps"
    assert found.wall_s == pytest.approx(6.0)
    assert found.goodput == pytest.approx(8.0)
    assert found.left_s == pytest.approx(4.0)
    assert not build_report_data(
        contents(summary=None, steps=[*steps(6), StepMetrics(6, 9.0, 0.1, 4)], events=EVENTS)
    ).every_sample_once


def test_a_run_without_new_lines_was_cut_off() -> None:
    silent = contents(summary=None, steps=steps(6), events=EVENTS, idle_s=61.0)
    assert build_report_data(silent).state == "cut off"
    slow = [replace_t(step, 60.0 * step.step) for step in steps(6)]
    assert build_report_data(replace(silent, steps=slow)).state == "running"  # a step takes a minute
    assert build_report_data(replace(silent, live=True)).state == "running"
    assert build_report_data(replace(silent, has_open_writer=True)).state == "running"  # somebody has its files open
    assert build_report_data(replace(silent, idle_s=6.0)).state == "running"
    assert build_report_data(replace(silent, idle_s=6.0, has_open_writer=False)).state == "cut off"
    assert (
        build_report_data(replace(silent, idle_s=6.0, has_open_writer=False, steps=[])).state == "running"
    )  # perhaps on another machine


def replace_t(step: StepMetrics, t: float) -> StepMetrics:
    return StepMetrics(step.step, t, step.loss, step.samples)


def test_a_run_that_failed_says_why() -> None:
    end = {"t": 8.0, "kind": "failed", "error": "NodeLost", "message": "node 1 is gone"}
    found = build_report_data(contents(summary=None, events=[*EVENTS, end]))
    assert (found.state, found.why_state) == ("failed", "NodeLost: node 1 is gone")


def test_files_that_are_missing_leave_gaps_and_no_errors() -> None:
    assert build_report_data(RunContents()).state == "waiting"
    alone = build_report_data(RunContents(summary=SUMMARY))
    assert (alone.state, alone.samples, alone.node_presences) == ("done", 80, ())
    assert [r.t for r in alone.recoveries] == [None]
    lines = build_report_data(RunContents(steps=steps(3)))
    assert (lines.steps, lines.every_sample_once, lines.goodput) == (3, None, None)
    odd = build_report_data(
        RunContents(summary={"steps": "many", "recoveries": 3, "goodput": "nan"}, events=[{"t": 0.0, "kind": "lost"}])
    )
    assert (odd.steps, odd.recoveries, odd.goodput) == (0, (), None)


def test_nodes_are_there_from_joining_to_their_loss_and_in_which_slots() -> None:
    presences = {presence.node: presence for presence in build_report_data(contents()).node_presences}
    assert (presences["2"].joined_at, presences["2"].ended_at, presences["2"].end_reason) == (0.2, 4.6, "lost")
    assert presences["2"].assignments == ((0.3, 4.6, "2.0"),)
    assert presences["0"].assignments == ((0.3, 10.6, "0.0"),)
    assert presences["1"].notices == (7.0,)
    assert (presences["3"].assignments, presences["3"].ended_at) == ((), None)
    kinds = [mark.kind for mark in build_report_data(contents()).marks]
    assert kinds == ["lost", "recovered", "joined", "notice"]


def test_a_node_with_several_workers_has_several_slots() -> None:
    events: list[dict[str, Any]] = [
        {"t": 0.0, "kind": "run_started", "nodes": 2, "workers_per_node": 2, "steps": 6},
        *({"t": 0.1, "kind": "node_joined", "node": node} for node in (0, 1)),
        {"t": 0.3, "kind": "epoch", "number": 1, "members": [0, 0, 1, 1], "slots": ["0.0", "0.1", "1.0", "1.1"]},
    ]
    found = build_report_data(RunContents(events=events))
    assert {presence.node: [slot for *_, slot in presence.assignments] for presence in found.node_presences} == {
        "0": ["0.0, 0.1"],
        "1": ["1.0, 1.1"],
    }
    assert found.event_lines[-1].text == "epoch 1 begins with nodes 0, 1"
    assert found.nodes_present == 2


def test_a_resumed_run_is_one_run_on_one_axis() -> None:
    again = [{**START, "start": 6}, {"t": 0.2, "kind": "node_joined", "node": 0}]
    found = build_report_data(contents(events=[*EVENTS, *again], steps=[*steps(6), *steps(2, first=6)], idle_s=1.0))
    assert found.state == "running"  # the summary is that of the part before
    assert [point.step for point in found.loss_curve] == list(range(8))
    assert [point.t for point in found.loss_curve] == sorted(point.t for point in found.loss_curve)
    assert found.loss_curve[6].t == pytest.approx(7.0 + 1.5)
    assert found.samples == 16
    assert [presence.node for presence in found.node_presences if presence.ended_at is None] == ["0"]


def test_events_are_sentences_and_unknown_ones_their_fields() -> None:
    assert event_sentence(EVENTS[8]) == "node 2 is lost in step 4"
    assert event_sentence({"t": 1, "kind": "epoch", "number": 2, "members": [0, 1]}) == "epoch 2 begins with nodes 0, 1"
    assert event_sentence({"t": 1, "kind": "moon_landed", "why": "x", "size": 3}) == "moon landed: size 3"
    assert event_sentence({"t": 1, "kind": "notice", "seconds": "soon"}) == "notice: seconds soon"
    assert event_sentence(EVENTS[10]) == "step 4 went on without node 2, by peers: 3 actions run again"
    graph = {"t": 1, "kind": "run_started", "graph": "cora", "model": "gcn", "mode": "pipe", "epochs": 9}
    assert event_sentence(graph) == "the run begins: cora, gcn, pipe, up to epoch 9"


def test_equal_reports_of_several_nodes_are_shown_once() -> None:
    doubts = [{"t": 4.6, "kind": "suspected", "node": node, "why": "it broke"} for node in (0, 1, 1)]
    told = [h.text for h in build_report_data(contents(events=[*EVENTS[:9], *doubts])).event_lines]
    assert told[-1] == "node 0, 1 cannot reach a peer"
    assert sum("reach a peer" in text for text in told) == 1


def test_same_weights_needs_ends_to_compare() -> None:
    done, other = (
        build_report_data(contents()),
        build_report_data(contents(summary={**SUMMARY, "weights_sha256": "ef"})),
    )
    going = build_report_data(contents(summary=None, events=EVENTS, idle_s=1.0))
    assert same_weights([done, done]) is True
    assert same_weights([done, other, done]) is False
    assert same_weights([done, going]) is None
    assert same_weights([done]) is None


def test_a_long_run_keeps_its_ends_and_its_spikes() -> None:
    values = [1.0 / (n + 1) for n in range(100_000)]
    values[77_777] = 50.0
    few = downsample_indices(values)
    assert len(few) <= 1504
    assert (few[0], few[-1]) == (0, 99_999)
    assert 77_777 in few
    assert few == sorted(set(few))
    assert downsample_indices(values[:9]) == list(range(9))


def test_a_pause_is_a_dent_in_the_pace_and_no_sample_is_left_out() -> None:
    times = [*map(float, range(20)), *(30.0 + n for n in range(20))]
    windows = pace_windows(times, [8] * 40)
    width = windows[1][0] - windows[0][0]
    assert sum(value for _, value in windows) * width == pytest.approx(8 * 39)
    assert min(value for _, value in windows) < 1.0
    assert windows[0][1] == pytest.approx(8.0)
    assert cumulative_goodput(times, [8] * 40, 0.0)[-1] == pytest.approx((49.0, 8 * 40 / 49))
    assert pace_windows(times[:2], [8, 8]) == []
    assert pace_windows([1.0, 1.0, 1.0], [8] * 3) == []


def test_a_real_folder_is_read_whatever_became_of_its_run(tmp_path: Path) -> None:
    """Simulated runs write what real ones do."""
    out = str(tmp_path / "hurt")
    made = run(out, job(steps=6), faults=Faults().kill(node=3, step=2), strategy="reroute")
    found = build_report_data(RunFolderReader(out).read())
    assert (found.state, found.steps, found.preemptions, found.every_sample_once) == ("done", 6, 1, True)
    assert found.summary["weights_sha256"] == made.weights_sha256
    assert [presence.node for presence in found.node_presences if presence.end_reason == "lost"] == ["3"]
    assert {slot for presence in found.node_presences for *_, slot in presence.assignments} >= {
        "0.0",
        "0.1",
        "1.0",
        "1.1",
    }
    assert len(found.recoveries) == 1
    cut = str(tmp_path / "cut")
    run_until_killed(cut, after=3, checkpoint_every=2)
    assert build_report_data(RunFolderReader(cut).read()).steps == 4
    run(cut, resume=cut)
    whole = build_report_data(RunFolderReader(cut).read())
    assert (whole.state, whole.steps, [p.step for p in whole.loss_curve]) == ("done", 5, [0, 1, 2, 3, 4])
    assert [p.t for p in whole.loss_curve] == sorted(p.t for p in whole.loss_curve)
