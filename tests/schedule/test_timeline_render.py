"""Rendering of a timeline: text, SVG and Perfetto."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from culm.schedule import SCHEDULES, Costs, Timeline, generate_plan, render_perfetto, render_svg, render_text, time_plan

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str = "1f1b", costs: Costs | None = None) -> Timeline:
    plan = generate_plan(name, pipelines=2, stages=3, micro_batches=7)
    return time_plan(plan, costs or Costs(reduce=0.5, step=0.25, send=0.125))


def test_the_grid_has_a_row_for_each_worker_and_a_column_for_each_slot() -> None:
    plan = generate_plan("1f1b", pipelines=1, stages=2, micro_batches=2)
    assert render_text(time_plan(plan)) == (
        "1f1b: 1 pipeline x 2 stages, 2 micro-batches; makespan 9, bubble 33.3%\n"
        "     0                   5\n"
        "0.0  0F0 0F1 .   .   0B0---- .   0B1----\n"
        "0.1  .   1F0 1B0---- 1F1 1B1---- .   .\n"
    )


def test_the_grid_of_a_split_backward_fills_the_slots_with_weights() -> None:
    plan = generate_plan("zb", pipelines=1, stages=2, micro_batches=2)
    assert render_text(time_plan(plan)).splitlines()[2:] == [
        "0.0  0F0 0F1 .   0I0 0W0 0I1 0W1",
        "0.1  .   1F0 1I0 1F1 1I1 1W0 1W1",
    ]


def test_the_grid_lines_up_when_numbers_have_two_digits() -> None:
    plan = generate_plan("gpipe", pipelines=11, stages=1, micro_batches=11)
    lines = render_text(time_plan(plan)).splitlines()[2:]
    assert lines[0] == " 0.0  0F0  0B0------"
    assert lines[10] == "10.0  0F10 0B10-----"


def test_actions_shorter_than_a_column_are_omitted() -> None:
    plan = generate_plan("1f1b", pipelines=1, stages=1, micro_batches=1)
    costs = Costs(forward=4.0, input=4.0, weight=4.0, step=0.5)
    assert render_text(time_plan(plan, costs), column_duration=4.0).splitlines()[2] == "0.0  0F0 0B0----"
    assert "0S" in render_text(time_plan(plan, costs), column_duration=0.5)


def test_a_grid_never_has_more_than_a_thousand_columns() -> None:
    plan = generate_plan("1f1b", pipelines=1, stages=2, micro_batches=2)
    shown = render_text(time_plan(plan, Costs(forward=(1.0, 1e-9))))
    assert max(map(len, shown.splitlines())) <= 1000 * 4 + 5


def test_an_empty_timeline_can_be_shown() -> None:
    plan = generate_plan("1f1b", pipelines=1, stages=1, micro_batches=1)
    nothing = time_plan(plan, Costs(forward=0, input=0, weight=0))
    assert "makespan 0, bubble 0.0%" in render_text(nothing, column_duration=0.0)
    ElementTree.fromstring(render_svg(nothing))
    assert all(event["dur"] == 0 for event in render_perfetto(nothing)["traceEvents"] if event["ph"] == "X")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_svg_draws_every_action_that_takes_time(name: str) -> None:
    shown = timeline(name)
    root = ElementTree.fromstring(render_svg(shown))
    titles = [title.text or "" for title in root.iterfind(f"{SVG}g/{SVG}title")]
    assert [title.split(":")[0] for title in titles] == [str(span.action) for row in shown.spans for span in row]


def test_the_svg_names_the_workers_the_kinds_and_the_result() -> None:
    root = ElementTree.fromstring(render_svg(timeline("zb")))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "zb: 2 pipelines x 3 stages, 7 micro-batches; makespan 15.75, bubble 28.6%" in texts
    assert [f"pipeline {d} stage {s}" in texts for d in range(2) for s in range(3)] == [True] * 6
    legend = ["forward (F)", "backward, input (I)", "backward, weights (W)", "reduce (R)", "optimizer step (S)"]
    assert [text for text in texts if text in legend] == legend
    assert "backward (B)" not in texts


def test_the_bars_of_the_svg_stay_inside_the_picture() -> None:
    root = ElementTree.fromstring(render_svg(timeline("interleaved")))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.attrib.get("x", 0)) + float(rect.attrib["width"]) <= width
        assert float(rect.attrib.get("y", 0)) + float(rect.attrib["height"]) <= height


def test_a_name_with_markup_does_not_break_the_svg() -> None:
    plan = replace(generate_plan("1f1b", pipelines=1, stages=1, micro_batches=1), name="<b>&\"'")
    root = ElementTree.fromstring(render_svg(time_plan(plan)))
    title = root.find(f"{SVG}title")
    assert title is not None
    assert (title.text or "").startswith("<b>&\"': 1 pipeline x 1 stage, 1 micro-batch;")


def test_perfetto_has_a_process_for_each_pipeline_and_a_thread_for_each_worker() -> None:
    trace = json.loads(json.dumps(render_perfetto(timeline())))
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    assert names["process_name", 2, 4] == "pipeline 1"
    assert names["thread_name", 2, 5] == "stage 1"
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}


def test_perfetto_events_are_in_microseconds_and_in_order() -> None:
    shown = timeline()
    events = [event for event in render_perfetto(shown)["traceEvents"] if event["ph"] == "X"]
    for worker, row in enumerate(shown.spans):
        own = [event for event in events if event["tid"] == worker + 1]
        assert [event["name"] for event in own] == [str(span.action) for span in row]
        starts = [event["ts"] for event in own]
        assert starts == sorted(starts)
        assert own[-1]["ts"] + own[-1]["dur"] == pytest.approx(row[-1].end * 1e6)
    assert events[0]["args"] == {"segment": 0, "kind": "F", "micro": 0}


def test_perfetto_can_draw_slots_as_well_as_seconds() -> None:
    events = render_perfetto(timeline(costs=Costs()), microseconds=1000.0)["traceEvents"]
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == 18_000
