"""What a whole run leaves in its folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from tests.cached_runs import cached_setup
from torch import Tensor, nn

from culm import Job
from culm.cluster.run_setup import RunResult, encode
from culm.errors import CulmError, NodeLost
from culm.testing import Cluster, Faults, SimulatedRun
from culm.testing.simulated_cluster import NO_FAULTS, Script, run_prepared

PROMISED = {
    "steps", "samples", "samples_expected", "samples_lost", "samples_duplicated", "wall_s", "goodput", "strategy",
    "pipelines", "stages", "schedule", "exact", "final_loss", "weights_sha256", "state_sha256", "preemptions",
    "recoveries", "cost_usd", "checkpoints",
}  # fmt: skip
"""The keys of summary.json that people and scripts rely on."""
ITEMS = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.zeros(4)) for i in range(32)]


def job(**fields: Any) -> Job:
    described: dict[str, Any] = {
        "layers": [lambda: nn.Linear(4, 4)] * 4,
        "loss": nn.functional.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "data": ITEMS,
        "global_batch": 8,
        "micro_batch": 2,
        "steps": 5,
    }
    return Job(**{**described, **fields})


PLAIN = job()


def run(
    out: str, described: Job = PLAIN, *, faults: Faults = NO_FAULTS, script: Script | None = None, **request: Any
) -> SimulatedRun:
    setup = cached_setup(described, **{"pipelines": 2, "stages": 2, "out": out, "strategy": "none", **request})
    return run_prepared(described, setup, faults=faults, script=script, cost=lambda *_: 0.01)


def text(out: str, name: str) -> str:
    with fsspec.open(f"{out}/{name}", "r") as file:
        return str(file.read())


def parse_strict_json(data: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"bare {constant}")

    return json.loads(data, parse_constant=refuse)


def lines(out: str, name: str) -> list[dict[str, Any]]:
    return [parse_strict_json(line) for line in text(out, name).splitlines()]


@pytest.fixture(params=["path", "URL"])
def out(request: pytest.FixtureRequest, tmp_path: Path, memory_url: str) -> str:
    return memory_url if request.param == "URL" else str(tmp_path / "run")


def test_the_summary_has_every_key_that_was_promised_and_is_what_the_run_returned(out: str) -> None:
    found = run(out)
    summary = parse_strict_json(text(out, "summary.json"))
    assert summary.keys() >= PROMISED
    assert summary == json.loads(json.dumps(found.summary))
    assert (summary["steps"], summary["samples"], summary["samples_expected"]) == (5, 40, 40)
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
    assert summary["goodput"] == pytest.approx(summary["samples"] / summary["wall_s"], rel=1e-5)
    assert summary["weights_sha256"] == found.weights_sha256
    assert summary["final_loss"] == lines(out, "steps.jsonl")[-1]["loss"]


def test_the_steps_are_there_in_order_with_loss_samples_and_time(out: str) -> None:
    found = run(out, job(clip_norm=1.0, evaluate=ITEMS[:8], evaluate_every=2))
    steps = lines(out, "steps.jsonl")
    assert [line["step"] for line in steps] == [0, 1, 2, 3, 4]
    assert [line["loss"] for line in steps] == found.losses
    assert [line["samples"] for line in steps] == [8] * 5
    assert [line["t"] for line in steps] == sorted({line["t"] for line in steps})
    assert all(line["norm"] > 0 for line in steps)
    assert [line["step"] for line in steps if "eval_loss" in line] == [1, 3]


def test_the_events_have_a_time_a_kind_and_a_node(out: str) -> None:
    run(out, checkpoint_every=2)
    events = lines(out, "events.jsonl")
    assert all({"t", "kind", "node"} <= event.keys() for event in events)
    assert [event["t"] for event in events] == sorted(event["t"] for event in events)
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "run_started"
    assert kinds[-1] == "finished"
    assert sorted(e["node"] for e in events if e["kind"] == "node_joined") == [0, 1, 2, 3]
    assert sorted(e["node"] for e in events if e["kind"] == "ready") == [0, 1, 2, 3]
    assert [e["step"] for e in events if e["kind"] == "checkpoint"] == [2, 4, 5]


def test_the_trace_has_a_row_for_each_node_and_a_span_for_each_of_its_actions(out: str) -> None:
    run(out)
    trace = parse_strict_json(text(out, "trace.json"))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in spans} == {0, 1, 2, 3}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    forward = [event for event in spans if event["cat"] == "F" and event["args"]["step"] == 3]
    assert sorted(event["name"] for event in forward) == sorted(f"{g}F{m}" for g in range(2) for m in range(4))
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert "node 3: pipeline 1 stage 1" in names


def test_the_trace_shows_what_came_before_a_loss_and_after(tmp_path: Path) -> None:
    hurt = Faults().kill(1, at="1B1", step=2)
    run(str(tmp_path), job(steps=5), faults=hurt, strategy="reroute")
    spans = [e for e in parse_strict_json(text(str(tmp_path), "trace.json"))["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["step"] for e in spans if e["tid"] == 3} == {0, 1, 2, 3, 4}


def test_a_long_run_leaves_a_trace_of_its_last_actions_only(tmp_path: Path) -> None:
    one = [lambda: nn.Linear(4, 4)]
    run(str(tmp_path), job(layers=one, steps=160, micro_batch=1, global_batch=16), pipelines=1, stages=1)
    spans = [e for e in parse_strict_json(text(str(tmp_path), "trace.json"))["traceEvents"] if e["ph"] == "X"]
    assert 1000 < len(spans) < 160 * 32
    assert max(span["args"]["step"] for span in spans) == 159


class Nan(nn.Module):
    """A layer that spoils the loss of every step but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made: Tensor = self.linear(x)
        return made * math.nan if self.calls > 2 else made


def test_a_loss_that_is_not_a_number_is_written_so_that_any_reader_can_read_it(out: str) -> None:
    run(out, job(layers=[lambda: nn.Linear(4, 4)] * 3 + [Nan], nonfinite="skip"))
    steps = lines(out, "steps.jsonl")
    assert math.isfinite(float(steps[0]["loss"]))
    assert math.isnan(float(steps[-1]["loss"]))
    assert math.isnan(float(parse_strict_json(text(out, "summary.json"))["final_loss"]))
    assert [e["step"] for e in lines(out, "events.jsonl") if e["kind"] == "skipped"] == [1, 2, 3, 4]


def run_until_killed(out: str, after: int, **request: Any) -> CulmError:
    async def script(cluster: Cluster) -> None:
        await cluster.wait_until_committed(after)
        cluster.kill(1)

    with pytest.raises(NodeLost) as caught:
        run(out, script=script, **request)
    return caught.value


def test_a_run_that_failed_says_so_in_its_events_and_has_no_summary(out: str) -> None:
    error = run_until_killed(out, after=2)
    last = lines(out, "events.jsonl")[-1]
    assert (last["kind"], last["error"], last["message"]) == ("failed", "NodeLost", str(error))
    assert [line["step"] for line in lines(out, "steps.jsonl")] == [0, 1, 2]
    with pytest.raises(FileNotFoundError):
        text(out, "summary.json")


def test_a_resumed_run_continues_in_its_folder_and_redone_steps_are_listed_once(out: str) -> None:
    """The first part ran past its checkpoint of step 2: its lines for the steps after that are not what was learned."""
    run_until_killed(out, after=3, checkpoint_every=2)
    assert [line["step"] for line in lines(out, "steps.jsonl")] == [0, 1, 2, 3]
    run(out, resume=out)
    whole = lines(out, "steps.jsonl")
    assert [line["step"] for line in whole] == [0, 1, 2, 3, 4]
    assert [line["loss"] for line in whole] == run("memory://failure-free").losses
    assert [e["kind"] for e in lines(out, "events.jsonl")].count("run_started") == 2
    assert parse_strict_json(text(out, "summary.json"))["steps"] == 5


def test_a_run_resumed_at_its_end_has_nothing_to_do_and_says_so(out: str) -> None:
    first = run(out)
    again = run(out, resume=out)
    assert again.summary["steps"] == 5
    assert again.summary["samples"] == 0
    assert again.state_sha256 == first.state_sha256
    assert [line["step"] for line in lines(out, "steps.jsonl")] == [0, 1, 2, 3, 4]


def test_a_run_resumed_into_another_folder_leaves_the_first_one_as_it_was(tmp_path: Path) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    run(first, job(steps=3))
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    run(second, resume=first)
    assert before == {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert [line["step"] for line in lines(second, "steps.jsonl")] == [3, 4]


@pytest.mark.parametrize("how", ["well", "with an error", "by the launcher"])
def test_all_is_in_its_place_when_the_result_is_out(out: str, how: str) -> None:
    """Whoever waits for the result may read the folder at once, also where lines are kept back at first."""
    found: list[str] = []

    async def script(cluster: Cluster) -> None:
        if how != "by the launcher":
            cluster.store.listen("result", lambda _: found.append(lines(out, "events.jsonl")[-1]["kind"]))
        await cluster.wait_until_committed(3)
        if how == "with an error":
            cluster.kill(1)
        elif how == "by the launcher":
            cluster.store.write("result", encode(RunResult(error="RunError", message="enough")))

    if how == "well":
        run(out, script=script)
    else:
        with pytest.raises(CulmError):
            run(out, script=script)
    assert len(lines(out, "steps.jsonl")) >= 4
    assert found == {"well": ["finished"], "with an error": ["failed"], "by the launcher": []}[how]


def test_the_lines_so_far_are_in_place_with_every_checkpoint(out: str) -> None:
    """Whatever becomes of the leader afterwards."""
    found: list[int] = []

    async def script(cluster: Cluster) -> None:
        await cluster.wait_until_committed(3)
        found.append(len(lines(out, "steps.jsonl")))

    run(out, checkpoint_every=2, script=script)
    assert found[0] >= 2
