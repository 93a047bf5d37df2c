"""Writers beside the run folder: selected by name, called in order, and never the end of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.observe.writers import sample_writers
from tests.tiny_jobs import job, layers, nan

from culm.cluster.leader.output.store_writer import StoreWriter
from culm.errors import NonFiniteLoss, UsageError
from culm.observe.step_metrics import StepMetrics
from culm.observe.writers import writer_group
from culm.observe.writers.prometheus import TEXTFILE
from culm.observe.writers.writer import RunInfo
from culm.observe.writers.writer_group import WriterGroup
from culm.observe.writers.writer_registry import check_writers, create_writer
from culm.testing import Faults, simulate

OWN = "tests.observe.writers.sample_writers"
METRICS: dict[str, Any] = {"absolute": lambda output, target: (output - target).abs().mean()}


@pytest.fixture(autouse=True)
def calls() -> Iterator[list[tuple[str, Any]]]:
    sample_writers.CALLS.clear()
    sample_writers.RELEASE.clear()
    yield sample_writers.CALLS
    sample_writers.RELEASE.set()


def kinds(calls: list[tuple[str, Any]], kind: str) -> list[Any]:
    return [given for what, given in calls if what == kind]


def events(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


# A writer of the user


def test_a_writer_of_the_user_gets_what_the_run_folder_gets(calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    described = job(metrics=METRICS)
    found = simulate(described, stages=2, strategy="none", out=str(tmp_path), writers=(f"{OWN}:ListWriter",))
    (run,) = kinds(calls, "open")
    assert (run.out, run.first_step, run.config["stages"]) == (str(tmp_path), 0, 2)
    assert calls[0] == ("open", run)
    assert [metrics.to_fields() for metrics in kinds(calls, "step")] == lines(tmp_path)
    assert [event["kind"] for event in kinds(calls, "event")] == [event["kind"] for event in events(tmp_path)]
    assert calls[-1][0] == "close"
    assert kinds(calls, "close") == [found.summary]


def test_a_writer_may_define_only_what_it_needs(calls: list[tuple[str, Any]]) -> None:
    simulate(job(), stages=2, strategy="none", writers=(f"{OWN}:StepsOnlyWriter",))
    assert [metrics.step for metrics in kinds(calls, "step")] == [0, 1, 2]


def test_a_run_that_fails_closes_its_writers_without_a_summary(calls: list[tuple[str, Any]]) -> None:
    with pytest.raises(NonFiniteLoss):
        simulate(job(layers=layers(1, 5, nan)), stages=2, strategy="none", writers=(f"{OWN}:ListWriter",))
    assert kinds(calls, "event")[-1]["kind"] == "failed"
    assert calls[-1] == ("close", None)


def test_another_leader_opens_writers_of_its_own_for_the_same_run(calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    shape: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute", "out": str(tmp_path)}
    simulate(job(), faults=Faults().kill(0, at="commit", step=1), writers=(f"{OWN}:ListWriter",), **shape)
    first, second = kinds(calls, "open")
    assert first.id == second.id
    assert second.first_step > 0
    assert {metrics.step for metrics in kinds(calls, "step")} == {0, 1, 2}


# Writers that fail


@pytest.mark.parametrize(
    ("writer", "why"),
    [("BrokenWriter", "OSError: no route to the server"), ("UnopenedWriter", "SystemExit: 3")],
)
def test_a_writer_that_raises_is_reported_once_and_left_out(tmp_path: Path, writer: str, why: str) -> None:
    alone = simulate(job(), stages=2, strategy="none")
    writers = (f"{OWN}:{writer}", f"{OWN}:ListWriter")
    found = simulate(job(), stages=2, strategy="none", out=str(tmp_path), writers=writers)
    assert found.state_sha256 == alone.state_sha256
    (failed,) = [event for event in events(tmp_path) if event["kind"] == "writer_failed"]
    assert (failed["writer"], failed["why"]) == (f"{OWN}:{writer}", why)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]


def test_the_terminals_of_the_run_are_told_of_a_writer_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = []
    enqueue = StoreWriter.enqueue

    def observe(self: StoreWriter, key: str, value: bytes, **options: Any) -> None:
        if key == "incident":
            sentences.append(value.decode())
        enqueue(self, key, value, **options)

    monkeypatch.setattr(StoreWriter, "enqueue", observe)
    simulate(job(), stages=2, strategy="none", writers=(f"{OWN}:BrokenWriter",))
    reason = "failed (OSError: no route to the server) and gets no more steps; the run goes on"
    assert sentences == [f"the writer {OWN}:BrokenWriter {reason}"]


def test_after_an_error_a_writer_is_called_no_more(calls: list[tuple[str, Any]]) -> None:
    simulate(job(), stages=2, strategy="none", writers=(f"{OWN}:BrokenWriter",))
    assert [metrics.step for metrics in kinds(calls, "step")] == [0, 1]
    assert not kinds(calls, "close")


def test_a_writer_that_hangs_does_not_keep_the_run_alive() -> None:
    group = WriterGroup([f"{OWN}:HangingWriter"])
    group.open(RunInfo(id="a", name="a"))
    group.close(None, timeout_s=0.05)
    assert group.take_failures() == [(f"{OWN}:HangingWriter", "it did not finish within 0.05 s")]
    assert group.take_failures() == []


def test_a_run_without_writers_starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a thread")

    monkeypatch.setattr(writer_group, "_WriterThread", refuse)
    simulate(job(), stages=2, strategy="none")


# By name


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tensorbord", "there is no --writer 'tensorbord': use prometheus, tensorboard, wandb or MODULE:CLASS"),
        (
            "nosuch:Writer",
            "--writer 'nosuch:Writer' cannot be imported (ModuleNotFoundError: No module named 'nosuch')",
        ),
        (f"{OWN}:NoWriter", f"--writer '{OWN}:NoWriter' lacks open, write_step, write_event, close: name a class with"),
        (f"{OWN}:CALLS", f"--writer '{OWN}:CALLS' is not a class: name a class with"),
        (f"{OWN}:Lister", f"--writer '{OWN}:Lister': {OWN} has no 'Lister': it has ListWriter, "),
        (
            f"{OWN}:WriterWithArguments",
            f"--writer '{OWN}:WriterWithArguments' cannot be created (missing a required argument: 'path'): its",
        ),
        ("prometheus", "--writer prometheus writes into the run folder: add --out, as in --out runs/a"),
    ],
)
def test_a_writer_that_cannot_be_created_is_refused_before_the_run(name: str, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        simulate(job(), stages=2, writers=(name,))
    assert str(error.value).startswith(sentence)


def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--writer wandb needs the package wandb: pip install wandb"):
        check_writers(["wandb"], None)


def test_a_writer_may_be_in_the_job_file(tmp_path: Path) -> None:
    file = tmp_path / "my_job_with_writer.py"
    file.write_text(f"from {OWN} import ListWriter\n\n\nclass Mine(ListWriter):\n    pass\n")
    assert type(create_writer(f"{file}:Mine")).__name__ == "Mine"


# TensorBoard, Prometheus, W&B


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(point.step, point.value) for point in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


@pytest.mark.parametrize("strategy", ["reroute", "checkpoint"])
def test_tensorboard_has_every_step_once_through_losses(tmp_path: Path, strategy: str) -> None:
    """Also where the run goes back to a checkpoint and makes steps again."""
    pytest.importorskip("tensorboard")
    shape: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": strategy, "checkpoint_every": 2}
    described = job(steps=5, metrics=METRICS, clip_norm=1.0)
    faults = Faults().kill(3, step=3, nth=1)
    found = simulate(described, faults=faults, out=str(tmp_path), writers=("tensorboard",), **shape)
    assert found.summary["preemptions"] == 1
    drawn = scalars(tmp_path / "tensorboard")
    assert drawn.keys() == {"loss", "norm", "absolute"}
    for tag, points in drawn.items():
        assert [step for step, _ in points] == [line["step"] for line in lines(tmp_path)]
        assert [value for _, value in points] == pytest.approx([line[tag] for line in lines(tmp_path)])


def prometheus_values(out: Path) -> dict[str, float]:
    text = (out / TEXTFILE).read_text()
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_prometheus_finds_the_figures_in_the_run_folder(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute", "out": str(tmp_path / "a")}
    faults = Faults().kill(3, step=1, nth=1)
    found = simulate(job(metrics=METRICS), faults=faults, writers=("prometheus",), **shape)
    values = prometheus_values(tmp_path / "a")
    assert values['culm_steps_total{run="a"}'] == 3
    assert values['culm_samples_total{run="a"}'] == found.summary["samples"]
    assert values['culm_preemptions_total{run="a"}'] == values['culm_recoveries_total{run="a"}'] == 1
    assert values['culm_nodes{run="a"}'] == 3
    assert values['culm_every_sample_once{run="a"}'] == 1
    assert values['culm_state{run="a",state="done"}'] == 1
    assert values['culm_goodput_samples_per_second{run="a"}'] == pytest.approx(found.summary["goodput"])
    last = lines(tmp_path / "a")[-1]
    assert values['culm_value{run="a",name="absolute"}'] == pytest.approx(last["absolute"])
    assert values['culm_loss{run="a"}'] == pytest.approx(last["loss"])


class FakeWandb(ModuleType):
    """The part of wandb that is used, which writes down how."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = SimpleNamespace(name="wandb")  # type: ignore[assignment]
        self.made: list[Any] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[int] = []
        self.summary: dict[str, Any] = {}

    def init(self, **how: Any) -> FakeWandb:
        self.made.append(how)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


def test_wandb_gets_every_step_and_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    found = simulate(job(metrics=METRICS), stages=2, strategy="none", writers=("wandb",))
    (how,) = fake.made
    assert (how["project"], how["resume"], how["config"]["stages"]) == ("mine", "allow", 2)
    assert [step for step, _ in fake.logged] == [0, 1, 2]
    assert fake.logged[0][1].keys() == {"loss", "samples", "t", "absolute"}
    assert fake.summary["weights_sha256"] == found.weights_sha256
    assert fake.ended == [0]


def test_step_metrics_are_what_writers_of_the_package_take(tmp_path: Path) -> None:
    """A writer can be used by itself, without a run."""
    writer = create_writer("prometheus")
    writer.open(RunInfo(id="x", name="x", out=str(tmp_path)))
    writer.write_step(StepMetrics(4, 1.0, 0.5, 8, samples_lost=2))
    writer.close(None)
    assert prometheus_values(tmp_path)[f'culm_every_sample_once{{run="{tmp_path.name}"}}'] == 0
