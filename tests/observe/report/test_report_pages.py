"""Pages: what they show, what they never do, and figures for Prometheus."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.observe.sample_runs import EVENTS, SUMMARY, TRACE, contents, steps

from culm.observe.report import html_page
from culm.observe.report.load_run import RunContents
from culm.observe.report.page_layout import PageLayout, layout_comparison, layout_run
from culm.observe.report.report_data import ReportData, build_report_data
from culm.observe.step_metrics import StepMetrics
from culm.observe.writers.prometheus import prometheus_figures, prometheus_text

EVIL = '<img src=x onerror=alert(1)></script><b>"'


class Words(HTMLParser):
    """What a reader of the page sees, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def words(view: PageLayout) -> str:
    return Words(html_page.live_page(view).partition("<script")[0]).text


def ids(view: PageLayout) -> list[str]:
    return [block.id for block in view.blocks]


def charts(view: PageLayout) -> dict[str, Any]:
    return {block.id: block.figure for block in view.blocks if block.figure is not None}


def test_a_page_shows_the_current_shape_and_why_it_was_chosen() -> None:
    changed = [
        {"t": 5.0, "kind": "drain", "step": 4, "layout": "2+1", "why": "three nodes train faster as 2+1"},
        {"t": 6.0, "kind": "reshaped", "layout": "2+1", "layers": 2, "seconds": 0.5},
    ]
    said = words(layout_run(build_report_data(contents(events=[*EVENTS, *changed]))))
    assert "3 pipelines x 1 stage, now 2+1" in said
    assert "three nodes train faster as 2+1" in said.partition("why the current one")[2]


def test_the_page_of_a_run_says_first_what_matters_most() -> None:
    view = layout_run(build_report_data(contents()), TRACE)
    assert ids(view)[:2] == ["head", "tiles"]
    said = words(view)
    for part in ("done", "Every sample counted once", "yes", "80 of 80 expected", "8.0/s", "ababababab", "gpt.py",
                 "3 pipelines x 1 stage", "strategy reroute", "exact", "suspect_after 5 s", "it went"):  # fmt: skip
        assert part in said
    assert set(charts(view)) == {"loss-steps", "loss-time", "pace", "nodes", "timeline"}
    assert {"recoveries", "split", "happened", "details"} <= set(ids(view))
    assert "now " not in said.partition("exact")[0]
    marked = {trace["name"] for trace in charts(view)["pace"]["data"]}
    assert marked == {"pace", "goodput so far", "lost", "recovered", "joined", "notice"}
    kinds = [trace["name"] for trace in charts(view)["timeline"]["data"]]
    assert kinds[0] == "forward (F)"
    assert len(kinds) == 6


def test_a_verified_run_says_how_many_steps_were_retrained() -> None:
    verified = contents(summary={**SUMMARY, "verified": 4})
    said = " ".join(words(layout_run(build_report_data(verified), TRACE)).split())
    assert "Verified 4 steps retrained to the same bits" in said
    assert "Verified" not in words(layout_run(build_report_data(contents()), TRACE))


def test_the_page_of_a_failed_run_begins_with_the_error_and_what_is_saved() -> None:
    end = {"t": 8.0, "kind": "failed", "error": "NodeLost", "message": "node 1 is gone"}
    view = layout_run(build_report_data(contents(summary=None, events=[*EVENTS, end], damaged_lines=2)))
    assert ids(view)[1] == "alarm"
    assert "Failed: NodeLost: node 1 is gone. The newest checkpoint is of step 4. 2 damaged lines" in words(view)


@pytest.mark.parametrize(
    "given", [RunContents(), RunContents(summary=SUMMARY), RunContents(steps=steps(1)), RunContents(events=EVENTS)]
)
def test_there_is_a_page_whatever_is_missing(given: RunContents) -> None:
    assert words(layout_run(build_report_data(given), given.trace))


def test_no_text_of_a_run_becomes_part_of_the_page() -> None:
    event = {"t": 1.0, "kind": EVIL, "node": EVIL, "why": EVIL}
    joined = {"t": 0.5, "kind": "node_joined", "node": EVIL}
    given = contents(name=EVIL, events=[{**EVENTS[0], "job": EVIL}, joined, event], summary=None)
    for view in (
        layout_run(build_report_data(given)),
        layout_comparison([build_report_data(given), build_report_data(contents())]),
    ):
        made = html_page.live_page(view)
        assert "<img" not in made
        assert made.count("</script") == 3
        assert "<b>" not in re.sub(r"<b>[^<]*</b>", "", made)


def test_a_report_is_one_file_that_may_load_nothing() -> None:
    made = html_page.standalone_page(layout_run(build_report_data(contents())))
    body = made.replace(html_page.plotly_script_path().read_text(), "")
    assert "default-src 'none'" in body
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", body)
    assert "refresh" not in body
    assert len(body) < 100_000
    assert 'http-equiv="refresh" content="10"' in html_page.standalone_page(
        layout_run(build_report_data(contents())), refresh_s=10
    )


def test_what_is_embedded_is_what_the_script_draws() -> None:
    view = layout_run(build_report_data(contents()))
    data = re.search(r'id="data">(.*?)</script>', html_page.live_page(view))
    assert data is not None
    assert json.loads(data[1]) == json.loads(view.data)
    other = layout_run(build_report_data(contents(steps=steps(9))))
    assert view.version != other.version
    assert view.version == layout_run(build_report_data(contents())).version


def test_a_page_of_a_long_run_is_no_larger_than_what_can_be_seen() -> None:
    long = [StepMetrics(n, 0.01 * n, 1.0 / (n + 1), 8, eval_loss=1.0 if n % 10 == 0 else None) for n in range(30_000)]
    came = [{"t": 0.1 * n, "kind": "node_joined", "node": n} for n in range(4, 1000)]
    gone = [{"t": 100 + 0.1 * n, "kind": "lost", "node": n, "step": n} for n in range(4, 900)]
    view = layout_run(build_report_data(contents(steps=long, events=[*EVENTS, *came, *gone])))
    assert len(view.data) < 400_000
    assert "The last 120 of 1000 that joined." in words(view)
    assert max(charts(view)["crowd"]["data"][0]["y"]) == 999


def test_several_runs_stand_beside_each_other() -> None:
    same, other = (
        build_report_data(contents(name="b")),
        build_report_data(contents(name="c", summary={**SUMMARY, "weights_sha256": "ef" * 32})),
    )
    alike, unlike = (
        layout_comparison([build_report_data(contents()), same]),
        layout_comparison([build_report_data(contents()), same, other]),
    )
    assert "Same weights yes a = b" in words(alike)
    assert "Same weights NO a = b; c" in words(unlike)
    assert [trace["name"] for trace in charts(unlike)["loss-steps"]["data"]] == ["a", "b", "c"]
    assert "every sample counted once" in words(unlike)


def graph_run(**changes: Any) -> ReportData:
    events = [
        {"t": 0.1, "kind": "run_started", "graph": "cora", "model": "gcn", "mode": "pipe", "servers": 2, "epochs": 9},
        {"t": 0.4, "kind": "server-up", "node": "graph-0"},
        {"t": 1.0, "kind": "queues", "workers": 3, "queue": 5, "running": 2, "spread": 1},
        {"t": 1.5, "kind": "evaluation", "epoch": 4, "train": 0.9, "val": 0.8, "test": 0.7},
        {"t": 2.0, "kind": "server-lost", "node": "graph-0"},
    ]
    told = {"name": "g", "steps": steps(5), "events": events, "live": True}
    return build_report_data(RunContents(**{**told, **changes}))


def test_the_page_of_a_graph_run_has_epochs_accuracies_queues_and_state() -> None:
    view = layout_run(graph_run())
    assert {"accuracy", "tasks", "workers", "spread", "nodes"} <= set(charts(view))
    said = words(view)
    assert "now: 3 workers, 5 tasks waiting, 2 with workers, 1 passes between" in said
    assert "epoch 5 of 9" in said
    assert "70.00%" in said
    ended = words(layout_run(graph_run(summary={"epochs": 9, "steps": 9, "test_accuracy": 0.75}, live=False)))
    assert "now:" not in ended
    assert "75.00%" in ended


def test_prometheus_gets_every_figure_that_there_is_and_no_other() -> None:
    told = prometheus_text(prometheus_figures(build_report_data(contents(name='a"b\\'))))
    values = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    name = 'run="a\\"b\\\\"'
    assert values[f"culm_steps_total{{{name}}}"] == "10"
    assert values[f"culm_preemptions_total{{{name}}}"] == "1"
    assert values[f'culm_state{{{name},state="done"}}'] == "1"
    assert "evaluation_loss" not in told
    assert told.count("# TYPE culm_state gauge") == 1


KINDS = re.findall(
    r"\S+",
    "run_started node_joined lost left notice epoch recovered reshaped checkpoint ready evaluation queues server-up "
    "server-lost generation failed finished suspected odd",
)
FIELDS = re.findall(
    r"\S+",
    "node step steps start number members slots lost seconds bytes why source detect_ms global_batch epochs timeouts "
    "test val queue workers message",
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from("ab"), st.integers(), max_size=2),
)
ODD = st.builds(
    lambda t, kind, rest: {"t": t, "kind": kind, **rest},
    st.floats(0, 20),
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
)


def odd_step(step: int, t: float, loss: object, value: object) -> StepMetrics:
    return StepMetrics.from_fields({"step": step, "t": t, "loss": loss, "samples": 8, "own": value})


@given(
    st.lists(ODD, max_size=12),
    st.lists(st.builds(odd_step, st.integers(0, 9), st.floats(0, 20), VALUES, VALUES), max_size=8),
    st.one_of(st.none(), st.dictionaries(st.sampled_from([*SUMMARY, "epochs", "memory", "of_ideal"]), VALUES)),
    st.booleans(),
)
def test_any_content_of_the_files_of_a_run_can_be_shown(
    events: list[Any], lines: list[StepMetrics], summary: dict[str, Any] | None, live: bool
) -> None:
    """Whoever wrote them: an older version, another program, a disk that was full."""
    found = build_report_data(RunContents(name="odd", summary=summary, steps=lines, events=events, live=live))
    assert json.loads(layout_run(found).data)
    assert json.loads(layout_comparison([found, found]).data)
    assert prometheus_text(prometheus_figures(found))
