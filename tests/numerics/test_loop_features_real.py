"""Hooks, progress, loaders, streams and compiled layers in real runs of culm.train with a killed node."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests import tiny_jobs
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import culm
from culm.testing import reference


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.1))


@pytest.mark.real
def test_hooks_are_called_and_a_stream_survives_a_kill(
    tmp_path: Path, forked_programs: None, capfd: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")

    def rows() -> Any:
        for inputs, target in tiny_jobs.DATA:
            yield {"x": inputs.tolist(), "y": target.tolist()}

    def to_item(row: dict[str, Any]) -> Any:
        import torch

        return torch.tensor(row["x"]), torch.tensor(row["y"])

    log = tmp_path / "events.txt"

    def note(event: Any) -> None:
        with log.open("a") as file:
            file.write(f"{event['kind']} {event['node'] if event['kind'] == 'lost' else event['step']}\n")

    job = tiny_jobs.job(
        data=culm.data.Stream(datasets.IterableDataset.from_generator(rows), to_item),
        steps=6,
        exact=True,
        ema=0.9,
        evaluate=tiny_jobs.DATA[:4],
        evaluate_every=2,
        keep_best="eval_loss",
        on_evaluate=note,
        on_checkpoint=note,
        on_node_lost=note,
    )
    summary = culm.train(
        job,
        pipelines=2,
        stages=2,
        strategy="reroute",
        out=tmp_path / "run",
        kills=("node=3 step=2 at=1B2",),
        progress=True,
    )
    assert summary.state_sha256 == reference(job).state_sha256
    assert (summary.samples, summary.samples_lost, summary.samples_duplicated) == (48, 0, 0)
    seen = log.read_text().splitlines()
    assert [line for line in seen if line.startswith("evaluation")] == ["evaluation 1", "evaluation 3", "evaluation 5"]
    assert {"lost 3", "checkpoint 6"} <= set(seen)
    assert "steps 6/6" in capfd.readouterr().err


class Wide(nn.Sequential):
    """Each width is compiled separately."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(nn.Linear(first, last), nn.LayerNorm(last), nn.Dropout(0.1))


@dataclass(frozen=True)
class CompileLog:
    """A backend that notes each compilation: the process, the width of the input, and whether it was made ahead of the
    first action of the layer."""

    path: Path

    def __call__(self, graph: Any, inputs: Any) -> Any:
        frame, callers = sys._getframe(), set()
        while frame.f_back is not None:
            frame = frame.f_back
            callers.add(frame.f_code.co_name)
        width = max(value.shape[-1] for value in inputs if value.dim() == 2 and value.shape[0] == 2)
        with self.path.open("a") as file:
            file.write(f"{os.getpid()} {width} {'ahead' if 'compile_layers' in callers else 'late'}\n")
        return aot_eager(graph, inputs)


@pytest.mark.real
@pytest.mark.parametrize("strategy", ["shadow", "shadow-lazy"])
def test_the_layers_of_stand_ins_are_compiled_before_a_loss(
    tmp_path: Path, forked_programs: None, strategy: str
) -> None:
    log = tmp_path / "compiled.txt"
    layers = [partial(Wide, 4, 5), partial(Wide, 5, 6), partial(Wide, 6, 4)]
    job = tiny_jobs.job(layers=layers, compile={"backend": CompileLog(log)}, exact=True)
    summary = culm.train(job, pipelines=1, stages=3, strategy=strategy, kills=("node=1 step=2 at=1B2",))
    noted = [line.split() for line in log.read_text().splitlines()]
    assert {when for _, _, when in noted} == {"ahead"}
    by_width = {width: {pid for pid, other, _ in noted if other == width} for width in ("4", "5", "6")}
    assert {width: len(pids) for width, pids in by_width.items()} == {"4": 2, "5": 2, "6": 2}  # a runner and a shadow
    assert summary.state_sha256 == reference(replace(job, compile={"backend": "aot_eager"})).state_sha256


@pytest.mark.real
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_layers_compiled_to_machine_code_survive_a_kill(forked_programs: None) -> None:
    job = tiny_jobs.job(layers=[Block] * 4, compile=True, exact=True, loaders=1)
    summary = culm.train(job, pipelines=2, stages=2, strategy="reroute", kills=("node=3 step=1 at=1B2",))
    assert summary.state_sha256 == reference(job).state_sha256
    assert summary.preemptions == 1
