"""Market traces of every published format are read into one form; impossible events are refused with their line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import UsageError
from culm.market import MarketTrace, NodeEvent, compute_statistics, read_trace
from culm.market.market_trace import NodeCount, events_from_counts
from culm.market.trace_generator import MarketModel, generate_trace
from culm.market.trace_writer import TRACE_FORMATS, format_trace

SHARED = Path(__file__).parents[2] / "../shared/traces"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here")


def trace_of(folder: Path, text: str, name: str = "t.csv") -> MarketTrace:
    path = folder / name
    path.write_text(text)
    return read_trace(path)


def test_events_are_in_milliseconds(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, "0,add,a\r\n1500,add,b\r\n2000,remove,a\r\n")
    assert trace.events == (NodeEvent(0, "add", "a"), NodeEvent(1.5, "add", "b"), NodeEvent(2, "remove", "a"))
    assert trace.counts == (NodeCount(0, 1), NodeCount(1.5, 2), NodeCount(2, 1))


def test_culm_format_is_in_seconds_and_has_zones(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, "t_s,kind,node,zone\n0,add,a,east\n60,remove,a,east\n")
    assert trace.events[1] == NodeEvent(60, "remove", "a", "east")
    assert trace.zones == ("east",)


@pytest.mark.parametrize(
    ("text", "end"),
    [("0,4\n3600,4\n3600,2\n", 3600), ("0.000,4\n1.000,4\n1.000,2\n", 3600), ("0,4\n3600000,2\n", 3600)],
)
def test_the_unit_of_counts_is_guessed(tmp_path: Path, text: str, end: float) -> None:
    trace = trace_of(tmp_path, text)
    assert trace.counts == (NodeCount(0, 4), NodeCount(end, 2))
    assert any(note.startswith("times are assumed to be in") for note in trace.notes)


def test_a_unit_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("0,4\n10,2\n")
    assert read_trace(tmp_path / "t.csv", unit="h").span_s == 36000


def test_google_cloud_monitors_are_sorted_and_the_last_line_of_a_time_counts(tmp_path: Path) -> None:
    text = "2021-12-10, 23:59:00, 8\n2021-12-11, 00:01:00, 5\n2021-12-10, 23:59:00, 7\n"
    assert trace_of(tmp_path, text, "t.txt").counts == (NodeCount(0, 7), NodeCount(120, 5))


def test_skypilots_ticks_are_counts_in_a_zone(tmp_path: Path) -> None:
    text = json.dumps({"metadata": {"gap_seconds": 300}, "data": [4, 4, 1]})
    trace = trace_of(tmp_path, text, "us-east-1f_v100_1.json")
    assert trace.counts == (NodeCount(0, 4), NodeCount(600, 1))
    assert trace.zones == ("us-east-1f",)


def test_parcaes_lines_name_several_nodes(tmp_path: Path) -> None:
    text = '[0, "add", {"nodes": ["a", "b"]}]\n[60000, "no-op", {"nodes": []}]\n[120000, "remove", {"nodes": ["a"]}]\n'
    assert trace_of(tmp_path, text, "t.jsonl").counts == (NodeCount(0, 2), NodeCount(120, 1))


def test_time_stamps_pass_midnight_even_if_the_date_does_not(tmp_path: Path) -> None:
    text = "timestamp,number\n2021-07-26T23:58:00Z,1\n2021-07-26T00:02:00Z,2\n"
    trace = trace_of(tmp_path, text)
    assert trace.counts[0] == NodeCount(0, 3)
    assert trace.span_s == 240


def test_time_stamps_with_and_without_a_zone_are_all_of_utc(tmp_path: Path) -> None:
    text = "2021-07-26T18:42:00Z,5\n2021-07-26 18:43:00,4\n2021-07-26T20:44:00+02:00,3\n"
    assert trace_of(tmp_path, text).counts == (NodeCount(0, 5), NodeCount(60, 4), NodeCount(120, 3))


def test_comment_lines_are_skipped(tmp_path: Path) -> None:
    assert trace_of(tmp_path, "# of 2026\n0,add,a\n# then:\n5,remove,a\n").counts == (
        NodeCount(0, 1),
        NodeCount(0.005, 0),
    )


BAD = [
    ("0,add,a\n5,ad,b\n", r"line 2, has the event 'ad': use add or remove"),
    ("0,add,a\n5,remove,b\n", r"line 2, removes b, which is not present"),
    ("0,add,a\n5,add,a\n", r"line 2, adds a, which is already present"),
    ("9,add,a\n5,add,b\n", r"line 2, goes back in time"),
    ("-9,add,a\n", r"line 1, has the time"),
    ("0,add,a\nx,add,b\n", r"line 2, has the time 'x': use a number"),
    ("0,add,a\n1,add\n9,remove,q\n", r"line 2, has 2 cells.*more bad lines: 3"),
    ("0,4\n1,-3\n", r"line 2, has the count '-3'"),
    ("0,4\n1,2.5\n", r"line 2, has the count '2.5'"),
    ("0,4\ninf,2\n", r"line 2, has the time 'inf': use a number"),
    ("0,4\n1,9000000000\n", r"line 2, has 9,000,000,000 nodes alive"),
    ('[{"interval": [1, 0, 3], "duration": 9}]', r"has -2 nodes alive"),
    ('{"metadata": {"gap_seconds": Infinity}, "data": [1]}', r"needs metadata.gap_seconds"),
    ("2021-12-10, 13:07:45, 80\n2021-12-10, 25:07:45, 80\n", r"line 2, has the time"),
    ('[0, "add", {"nodes": ["a"]}]\n[5, "remove", {"nodes": ["b"]}]\n', r"line 2, removes b"),
    ('[0, "add", {"nodes": ["a"]}]\n[5, "remove"]\n', r"line 2, is not an event"),
    ('{"data": [1]}', r"needs metadata.gap_seconds"),
    ('{"metadata": {"gap_seconds": 5}, "data": [1, -1]}', r"data\[1\] is -1"),
    ('[{"interval": [1, 2]}]', r"entry 0, is not an interval"),
    ("hello\nworld\n", r"is not a trace"),
    ("", r"is empty"),
]


@pytest.mark.parametrize(("text", "says"), BAD)
def test_impossible_events_are_refused_with_their_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        trace_of(tmp_path, text)
    assert "\n" not in str(caught.value)


counted = st.lists(st.integers(0, 12), min_size=1, max_size=20)


@given(counted)
def test_counts_become_events_that_lead_to_them(alive: list[int]) -> None:
    trace = MarketTrace(events_from_counts([NodeCount(float(t), n) for t, n in enumerate(alive)]), float(len(alive)))
    there = dict(trace.counts)
    seen = 0
    for t, n in enumerate(alive):
        seen = there.get(float(t), seen)
        assert seen == n


@given(st.integers(0, 10_000), st.sampled_from(sorted(TRACE_FORMATS)))
def test_written_traces_can_be_read_again(tmp_path_factory: pytest.TempPathFactory, seed: int, form: str) -> None:
    made = generate_trace(MarketModel(nodes=6, hours=3, rate=1.0), seed)
    again = trace_of(tmp_path_factory.mktemp("again"), format_trace(made, form, gap_s=1.0))
    assert [count.alive for count in again.counts][-1] == made.counts[-1].alive
    if form in ("culm", "events", "parcae"):
        assert [(e.kind, e.node) for e in again.events] == [(e.kind, e.node) for e in made.events]
        assert all(abs(a.t - b.t) < 1e-3 for a, b in zip(again.events, made.events, strict=True))
    if form == "culm":
        assert again.zones == made.zones


@shared
@pytest.mark.parametrize(
    ("name", "adds", "removes", "alive", "group", "life"),
    [("bamboo/p3-trace.csv", 177, 167, 24.0, 2.1, 59), ("bamboo/g4dn-trace.csv", 79, 74, 12.6, 1.5, 61)],
)
def test_the_published_traces_have_their_published_numbers(
    name: str, adds: int, removes: int, alive: float, group: float, life: float
) -> None:
    result = compute_statistics(read_trace(SHARED / name))
    assert (result.adds, result.removes) == (adds, removes)
    assert result.alive == pytest.approx(alive, abs=0.05)
    assert result.group == pytest.approx(group, abs=0.05)
    assert result.life_h * 60 == pytest.approx(life, abs=0.5)


NO_TRACES = ("cloud-prices", "run-86", "throughput_by_nodes")


@shared
def test_every_published_trace_is_read() -> None:
    files = [p for p in SHARED.rglob("*") if p.suffix in (".csv", ".txt", ".json", ".jsonl")]
    traces = [path for path in files if not any(word in str(path) for word in NO_TRACES)]
    assert len(traces) >= 35
    for path in traces:
        assert read_trace(path).peak > 0, path
