"""`culm bench memory`: the predicted memory of the fullest worker against the peak of real workers on the CPU.

A worker has memory of its own (interpreter, torch, code): the peak of the same run with a tiny model, which is taken
off. The prediction comes from the layers alone, as `culm run` checks them before the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

import culm
from culm.job import Job
from culm.models import RandomTokens, gpt, gpt_loss
from culm.plan.model.layer_partition import partition_layers, segment_layer_ranges
from culm.plan.rent.memory_model import WorkerMemory, fullest_worker
from culm.providers.local_provider import ForkServerClient
from culm.runtime.compute.model_check import check_model
from culm.strategies import registry

MICRO_BATCHES, STEPS = 8, 4


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """A model, a shape and a strategy."""

    kind: str
    """"linear": layers of a square matrix; "gpt": blocks of a transformer."""
    width: int
    layers: int
    micro_batch: int
    tokens: int = 1
    pipelines: int = 2
    stages: int = 2
    strategy: str = "reroute"

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.layers} of width {self.width}, {self.pipelines} x {self.stages}, {self.strategy}"

    def job(self) -> Job:
        rest: dict[str, Any] = {
            "optimizer": _adam,
            "global_batch": self.micro_batch * MICRO_BATCHES,
            "micro_batch": self.micro_batch,
            "steps": STEPS,
            "device": "cpu",
            "threads": 1,
        }
        if self.kind == "gpt":
            layers = gpt(width=self.width, blocks=self.layers, heads=4, context=self.tokens, vocab=256, dropout=0.0)
            data = RandomTokens(vocab=256, length=self.tokens, count=64, seed=0)
            return Job(layers=layers, loss=gpt_loss, data=data, **rest)
        items = [(torch.ones(self.width), torch.zeros(self.width))] * 64
        factory = lambda: nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU())  # noqa: E731
        return Job(layers=[factory] * self.layers, loss=_mean_square, data=items, **rest)

    @property
    def tiny(self) -> MemoryCase:
        """The same run with a model of next to no memory."""
        return replace(self, width=16, micro_batch=1, tokens=min(self.tokens, 8))


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


CASES = tuple(
    MemoryCase(kind="linear", width=width, layers=layers, micro_batch=16, pipelines=D, stages=P, strategy=strategy)
    for width, layers, D, P, strategies in (
        (2048, 8, 2, 2, ("none", "reroute", "shadow")),
        (1024, 32, 2, 2, ("none", "reroute", "shadow")),
        (1024, 32, 1, 2, ("none", "shadow")),
        (1536, 16, 2, 4, ("reroute", "shadow-lazy")),
    )
    for strategy in strategies
) + tuple(
    MemoryCase(kind="gpt", width=512, layers=8, micro_batch=4, tokens=128, strategy=strategy)
    for strategy in ("none", "reroute", "shadow")
)


def predict(case: MemoryCase) -> WorkerMemory:
    """The memory of the fullest worker, with the cuts that a run makes."""
    layers = check_model(case.job()).profile.layers
    cuts = partition_layers(layers, case.stages)
    segments = [layers[span.start : span.stop] for span in segment_layer_ranges(cuts, len(layers))]
    return fullest_worker(
        segments,
        MICRO_BATCHES // case.pipelines,
        pipelines=case.pipelines,
        strategy=registry.get(case.strategy),
        on_accelerator=False,
    )


def measure(case: MemoryCase, fork_server: ForkServerClient) -> int:
    """The peak of the fullest worker in bytes, less that of the tiny run."""
    own, model = (_peak_rss(one, fork_server) for one in (case.tiny, case))
    return model - own


def _peak_rss(case: MemoryCase, fork_server: ForkServerClient) -> int:
    shape: dict[str, Any] = {"pipelines": case.pipelines, "stages": case.stages, "schedule": "1f1b"}
    done = culm.train(case.job(), progress=False, fork_server=fork_server, strategy=case.strategy, **shape)
    return done.memory["peak_rss_bytes"]


def run(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Predict and measure each case."""
    rows: list[dict[str, Any]] = []
    with ForkServerClient() as fork_server:
        for case in CASES[:: 4 if quick else 1]:
            predicted, measured = predict(case).total, measure(case, fork_server)
            rows.append({"case": case.name, "predicted": predicted, "measured": measured})
            progress(f"{case.name}: predicted {predicted / 1e6:.0f} MB, measured {measured / 1e6:.0f}")
    errors = [row["predicted"] / row["measured"] - 1 for row in rows]
    return {"rows": rows, "error_mean": fmean(map(abs, errors)), "error_low": min(errors), "error_high": max(errors)}


def render_table(result: dict[str, Any]) -> Table:
    table = Table("case", "predicted", "measured", "error", box=box.SIMPLE, pad_edge=False)
    for row in result["rows"]:
        error = row["predicted"] / row["measured"] - 1
        table.add_row(row["case"], f"{row['predicted'] / 1e6:.0f}", f"{row['measured'] / 1e6:.0f}", f"{error:+.1%}")
    table.caption = (
        f"MB of the fullest worker beside its own; error {result['error_mean']:.1%} on average, "
        f"{result['error_low']:+.1%} to {result['error_high']:+.1%}"
    )
    return table
