"""Random runs that go wrong in random ways, each out of one seed: what nobody thought of.

A seed decides the job, the shape of the cluster, the strategy, how long every action takes, and the faults. Faults may
be any that the strategy can survive, and the run must come to what a single process does: to the last bit with `exact`,
within summation error without.
"""

from __future__ import annotations

import collections
import functools
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from culm.cluster.blows import Blow, Kill, Warn
from culm.cluster.prepare import Request, prepare
from culm.cluster.setup import STRATEGIES
from culm.errors import UsageError
from culm.job import Job
from culm.schedule import generate
from culm.testing.cluster import LEASE_S
from culm.testing.draw import PEERS, draw_faults
from culm.testing.fate import Strike
from culm.testing.faults import Faults, Outage
from culm.testing.reference import Trained, reference
from culm.testing.survive import endure

FEATURES = ("clip", "tied", "batch norm", "dropout", "weighted loss", "bf16", "evaluation", "checkpoints")
SHAPES = ((1, 2), (1, 3), (2, 2), (2, 3), (3, 2))
_WIDTH, _LAYERS, _STEPS = 4, 6, 4
_LEADS = re.compile(r" node \d+ leads")


@dataclass(frozen=True)
class Scenario:
    """A run, its cluster and what befalls it."""

    seed: int
    features: tuple[str, ...]
    exact: bool
    micro_batches: int
    pipelines: int
    stages: int
    schedule: str
    strategy: str
    faults: Faults

    def __str__(self) -> str:
        exact = "exact" if self.exact else "within summation error"
        return (
            f"seed {self.seed}: {self.pipelines} x {self.stages}, {self.micro_batches} micro-batches, {self.schedule}, "
            f"strategy {self.strategy}, {exact}, with {', '.join(self.features) or 'no extras'}\n{self.faults}"
        )


@dataclass(frozen=True)
class Outcome:
    """How a scenario ended. `failure` is empty where it was survived; else it says what is wrong, and the history."""

    scenario: Scenario
    strikes: tuple[Strike, ...] = ()
    recoveries: tuple[str, ...] = ()
    """Where each recovery found the layers of the lost: peers, shadow or checkpoint; or that they had notice."""
    leaders: int = 1
    """How many nodes led, one after the other."""
    failure: str = ""
    history: str = ""


def known(strategies: Iterable[str] = ()) -> tuple[str, ...]:
    """The strategies to draw from: those asked for, or all that this version has. Raises UsageError."""
    able = tuple(name for name in STRATEGIES if name in PEERS or name == "none")
    for name in strategies:
        if name not in able:
            raise UsageError(f"--strategy {name!r} is nothing that chaos knows: use {' or '.join(able)}")
    return tuple(strategies) or able


def draw(seed: int, strategies: Iterable[str] = ()) -> Scenario:
    """The scenario of a seed. Pure: the same each time."""
    dice = random.Random(f"chaos {seed}")
    strategy = dice.choice(known(strategies))
    pipelines, stages = dice.choice([shape for shape in SHAPES if shape[0] > 1 or strategy != "reroute"])
    schedule = dice.choice(("gpipe", "1f1b", "1f1b", "zb", "zb"))
    micro_batches = dice.choice((4, 6))
    features = tuple(sorted(dice.sample(FEATURES, dice.choice((0, 1, 1, 2, 2, 3)))))
    plan = generate(schedule, pipelines=pipelines, stages=stages, micro_batches=micro_batches)
    saved_from = _STEPS - 1 if "checkpoints" in features else None  # the first one is complete by then
    return Scenario(
        seed=seed,
        features=features,
        exact=dice.random() < 0.75,
        micro_batches=micro_batches,
        pipelines=pipelines,
        stages=stages,
        schedule=schedule,
        strategy=strategy,
        faults=draw_faults(dice, plan, strategy=strategy, steps=_STEPS, lease_s=LEASE_S, saved_from=saved_from),
    )


def face(scenario: Scenario) -> Outcome:
    """Run a scenario. Never raises for what the run does: whatever is wrong is the failure of the outcome."""
    job = job_of(scenario.features, scenario.exact, scenario.micro_batches)
    learns = tuple(name for name in scenario.features if name != "checkpoints")
    truth = _truth(learns, scenario.exact, scenario.micro_batches)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = endure(job, prepare(job, _request(scenario, folder)), scenario.faults, scenario.seed, truth)
        except AssertionError as error:
            return Outcome(scenario, failure=str(error))
    recoveries = tuple(recovery["source"] for recovery in run.summary["recoveries"])
    history = str(run.history)
    return Outcome(scenario, run.strikes, recoveries, len(_LEADS.findall(history)), history=history)


def _request(scenario: Scenario, folder: str) -> Request:
    kept = "checkpoints" in scenario.features
    return Request(
        pipelines=scenario.pipelines,
        stages=scenario.stages,
        schedule=scenario.schedule,
        strategy=scenario.strategy,
        out=folder if kept else None,
        checkpoint_every=1 if kept else 0,
    )


@functools.cache
def _truth(features: tuple[str, ...], exact: bool, micro_batches: int) -> Trained:
    """What one process comes to: the same for all clusters that a job may run on."""
    return reference(job_of(features, exact, micro_batches))


def covered(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """How often the runs that were survived had what: only faults that struck count."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in outcomes:
        scenario = outcome.scenario
        counts["strategy"][scenario.strategy] += 1
        counts["shape"][f"{scenario.pipelines} x {scenario.stages}"] += 1
        counts["schedule"][scenario.schedule] += 1
        counts["result"]["to the last bit" if scenario.exact else "within summation error"] += 1
        counts["job"].update(scenario.features or ("no extras",))
        counts["fault"].update(map(_kind, outcome.strikes))
        counts["moment"].update(_moment(strike) for strike in outcome.strikes if isinstance(strike.fault, Blow))
        counts["recoveries"][str(len(outcome.recoveries))] += 1
        counts["recovered from"].update(outcome.recoveries)
        counts["leaders"][str(outcome.leaders)] += 1
    return {name: dict(sorted(counter.items())) for name, counter in counts.items()}


def _kind(strike: Strike) -> str:
    fault = strike.fault
    if isinstance(fault, Kill):
        return f"kill of {len(fault.nodes)}" + (" with what they had sent" if fault.silence else "")
    if isinstance(fault, Warn):
        return f"notice of {len(fault.nodes)}" + ("" if fault.seconds else ", and at once gone")
    if isinstance(fault, Outage):
        return "outage of the store" + (" beyond the lease" if fault.seconds > LEASE_S else "")
    if isinstance(fault, Blow) and getattr(fault, "seconds", 0.0) > LEASE_S:
        return f"{fault.word} beyond the lease"
    return fault.word.replace("_", " ")


def _moment(strike: Strike) -> str:
    """The kind of an action: F of 2F0, S+ of 1S+; others stand for themselves."""
    return re.sub(r"^(evaluate )?\d+([A-Z]\+?)\d*$", r"\1\2", strike.at) or "after a while"


# The job


class _Dense(nn.Module):
    def __init__(self, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.after = nn.BatchNorm1d(_WIDTH) if norm else nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.after(torch.tanh(self.linear(x)))
        return made


def _layers(features: tuple[str, ...]) -> list[Callable[[], nn.Module]]:
    layers: list[Callable[[], nn.Module]] = [_Dense] * _LAYERS
    if "batch norm" in features:
        layers[2] = functools.partial(_Dense, norm=True)
    if "dropout" in features:
        layers[3] = functools.partial(_Dense, dropout=0.5)
    return layers


def _weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A loss in which samples weigh differently."""
    weight = 1.0 + target[:, 0].abs()
    return (((output - target) ** 2).mean(1) * weight).sum(), weight.sum()


def _samples(count: int) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(1)
    return [(torch.randn(_WIDTH, generator=dice), torch.randn(_WIDTH, generator=dice)) for _ in range(count)]


def _optimizer(exact: bool) -> Callable[[Any], torch.optim.Optimizer]:
    """Adam makes much of little where a gradient is almost zero: summation error would not stay small under it."""
    if exact:
        return lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    return lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def job_of(features: tuple[str, ...], exact: bool, micro_batches: int) -> Job:
    """A job that trains in milliseconds and has these features."""
    extras: Mapping[str, dict[str, Any]] = {
        "clip": {"clip_norm": 0.1},
        "tied": {"tied": [("0.linear.weight", "5.linear.weight")]},
        "weighted loss": {"loss": _weighted},
        "bf16": {"precision": "bf16"},
        "evaluation": {"evaluate": _samples(10), "evaluate_every": 2},
    }
    fields: dict[str, Any] = {
        "layers": _layers(features),
        "loss": nn.functional.mse_loss,
        "optimizer": _optimizer(exact),
        "data": _samples(40),
        "global_batch": 4 * micro_batches,
        "micro_batch": 4,
        "steps": _STEPS,
        "exact": exact,
    }
    for name in features:
        fields.update(extras.get(name, {}))
    return Job(**fields)
