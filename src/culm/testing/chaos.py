"""Random runs that go wrong in random ways, each out of one seed: what nobody thought of.

A seed decides the job, the shape of the cluster, the strategy, how long every action takes, and the faults. Faults may
be any that the strategy can survive, and the run must come to what a single process does: to the last bit with `exact`,
within summation error without. In a quarter of the runs the shape changes on the way.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import torch
from torch import Tensor, nn

from culm.cluster.blows import Blow, Kill, Warn
from culm.cluster.prepare import Request, look, prepare
from culm.cluster.setup import STRATEGIES
from culm.errors import UsageError
from culm.job import Job
from culm.runtime.blueprint import Blueprint
from culm.schedule import generate
from culm.testing.cluster import LEASE_S
from culm.testing.draw import PEERS, SHADOWS, draw_faults
from culm.testing.fate import Strike
from culm.testing.faults import Faults, Outage
from culm.testing.reference import Trained, reference
from culm.testing.reshape import SHAPES as CHANGING_SHAPES
from culm.testing.reshape import draw_changes
from culm.testing.survive import endure

FEATURES = ("clip", "tied", "batch norm", "dropout", "weighted loss", "bf16", "evaluation", "checkpoints")
UNEQUAL = "unequal layers"
"""A feature of runs whose shape changes: other depths are cut at other layers."""
_LOOKS = frozenset((*FEATURES, UNEQUAL)) - {"clip", "evaluation", "checkpoints"}
"""Features of the layers and of the loss: of these hangs what a job looks like."""
SHAPES = ((1, 2), (1, 3), (2, 2), (2, 3), (3, 2))
CHANGING = 0.25
"""The share of runs whose shape changes."""
_WIDTH, _LAYERS, _STEPS = 4, 6, 4
_SAVED_FROM = 3
"""In this step the first checkpoint is complete, where there are any."""
_LEADS = re.compile(r" node \d+ leads")
_MADE = re.compile(r" epoch \d+, made ")


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
    steps: int = _STEPS
    reconfigure: str = "cost"
    zones: tuple[str, ...] = ()

    def __str__(self) -> str:
        zones = f"{len(self.zones)} zones, " if self.zones else ""
        exact = "exact" if self.exact else "within summation error"
        return (
            f"seed {self.seed}: {self.pipelines} x {self.stages}, {zones}{self.steps} steps of {self.micro_batches} "
            f"micro-batches, {self.schedule}, strategy {self.strategy}, reconfigure {self.reconfigure}, {exact}, "
            f"with {', '.join(self.features) or 'no extras'}\n{self.faults}"
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
    changes: int = 0
    """How often the shape became another one."""
    failure: str = ""
    history: str = ""


def known(strategies: Iterable[str] = ()) -> tuple[str, ...]:
    """The strategies to draw from: those asked for, or all that this version has. Raises UsageError."""
    able = tuple(name for name in STRATEGIES if name in PEERS or name in ("none", "templates"))
    for name in strategies:
        if name not in able:
            raise UsageError(f"--strategy {name!r} is nothing that chaos knows: use {' or '.join(able)}")
    return tuple(strategies) or able


def draw(seed: int, strategies: Iterable[str] = (), *, changing: bool = False) -> Scenario:
    """The scenario of a seed. Pure: the same each time. `changing`: of those whose shape changes. Raises UsageError for
    strategies that there are not, or under which no shape changes."""
    able = known(strategies)
    mobile, steady = ([name for name in able if name != other] for other in ("none", "templates"))
    if changing and not mobile:
        raise UsageError("--changing needs a strategy that goes on after a loss: add one, as in --strategy reroute")
    dice = random.Random(f"changing {seed}")  # of its own: the other runs are what they would be without
    changes = dice.random() < CHANGING or changing or not steady
    return _draw_changing(seed, dice, mobile) if changes and mobile else _draw_steady(seed, steady)


def _draw_steady(seed: int, strategies: Sequence[str]) -> Scenario:
    dice = random.Random(f"chaos {seed}")
    strategy = dice.choice(strategies)
    pipelines, stages = dice.choice([shape for shape in SHAPES if shape[0] > 1 or strategy != "reroute"])
    schedule = dice.choice(("gpipe", "1f1b", "1f1b", "zb", "zb"))
    micro_batches = dice.choice((4, 6))
    features = tuple(sorted(dice.sample(FEATURES, dice.choice((0, 1, 1, 2, 2, 3)))))
    plan = generate(schedule, pipelines=pipelines, stages=stages, micro_batches=micro_batches)
    saved_from = _SAVED_FROM if "checkpoints" in features else None
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


def _draw_changing(seed: int, dice: random.Random, strategies: Sequence[str]) -> Scenario:
    """Whoever has one pipeline, or may come to that, has checkpoints: its layers may have one holder for a while."""
    strategy = dice.choice(strategies)
    pipelines, stages = dice.choice([shape for shape in CHANGING_SHAPES if shape[0] > 1 or strategy in SHADOWS])
    reconfigure = dice.choice(("cost", "cost", "bamboo", "never"))
    alone = pipelines == 1 or (strategy in SHADOWS and reconfigure == "cost")
    kept = ("checkpoints",) if alone or dice.random() < 0.6 else ()
    extras = [name for name in FEATURES if name != "checkpoints"]
    features = tuple(sorted((*dice.sample([*extras, UNEQUAL, UNEQUAL], dice.choice((0, 1, 1, 2, 2))), *kept)))
    steps, saved_from = dice.choice((8, 10, 14)), _SAVED_FROM if kept else None
    parts = ("interleaved",) if 2 * stages <= _LAYERS else ()
    return Scenario(
        seed=seed,
        features=tuple(dict.fromkeys(features)),
        exact=dice.random() < 0.75,
        micro_batches=dice.choice((4, 6)),
        pipelines=pipelines,
        stages=stages,
        schedule=dice.choice(("gpipe", "1f1b", "1f1b", "zb", "zb", *parts)),
        strategy=strategy,
        faults=draw_changes(dice, pipelines, pipelines * stages, steps=steps, lease_s=LEASE_S, saved_from=saved_from),
        steps=steps,
        reconfigure=reconfigure,
        zones=dice.choice(((), (), ("a", "b"), ("a", "b", "c"))),
    )


def face(scenario: Scenario) -> Outcome:
    """Run a scenario. Never raises for what the run does: whatever is wrong is the failure of the outcome."""
    learns = tuple(name for name in scenario.features if name != "checkpoints")
    job = job_of(learns, scenario.exact, scenario.micro_batches, scenario.steps)
    truth = _truth(learns, scenario.exact, scenario.micro_batches, scenario.steps)
    with _folder(scenario.seed) as folder:
        try:
            setup = prepare(
                job, _request(scenario, folder), blueprint=_blueprint(frozenset(learns) & _LOOKS, job.exact)
            )
            run = endure(job, setup, scenario.faults, scenario.seed, truth, zones=scenario.zones)
        except AssertionError as error:
            return Outcome(scenario, failure=str(error))
    recoveries = tuple(recovery["source"] for recovery in run.summary["recoveries"])
    history = str(run.history)
    leaders, changes = (len(found.findall(history)) for found in (_LEADS, _MADE))
    return Outcome(scenario, run.strikes, recoveries, leaders, changes, history=history)


@contextlib.contextmanager
def _folder(seed: int) -> Iterator[str]:
    """In memory: on a disk, which checkpoints wait for, a run takes a quarter longer."""
    files, folder = fsspec.filesystem("memory"), f"/culm-chaos-{seed}"
    try:
        yield f"memory:/{folder}"
    finally:
        if files.exists(folder):
            files.rm(folder, recursive=True)


def _request(scenario: Scenario, folder: str) -> Request:
    kept = "checkpoints" in scenario.features
    return Request(
        pipelines=scenario.pipelines,
        stages=scenario.stages,
        schedule=scenario.schedule,
        strategy=scenario.strategy,
        reconfigure=scenario.reconfigure,
        out=folder if kept else None,
        checkpoint_every=1 if kept else 0,
    )


@functools.cache
def _blueprint(features: frozenset[str], exact: bool) -> Blueprint:
    """What the layers look like: the same however many steps and micro-batches there are. By what they are trained
    hangs on how they are summed up."""
    return look(job_of(tuple(sorted(features)), exact, micro_batches=4))


@functools.cache
def _truth(features: tuple[str, ...], exact: bool, micro_batches: int, steps: int) -> Trained:
    """What one process comes to: the same for all clusters that a job may run on."""
    return reference(job_of(features, exact, micro_batches, steps))


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
        counts["changes of shape"][str(outcome.changes)] += 1
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
        self.after = nn.BatchNorm1d(_WIDTH) if norm else nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.after(torch.tanh(self.linear(x)))
        return made


class _Wide(_Dense):
    """Several times the work of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(_WIDTH, 6 * _WIDTH), nn.Tanh(), nn.Linear(6 * _WIDTH, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x) + 0.1 * self.wide(x)
        return made


def _layers(features: tuple[str, ...]) -> list[Callable[[], nn.Module]]:
    layers: list[Callable[[], nn.Module]] = [_Dense] * _LAYERS
    if "batch norm" in features:
        layers[2] = functools.partial(_Dense, norm=True)
    if "dropout" in features:
        layers[3] = functools.partial(_Dense, dropout=0.5)
    if UNEQUAL in features:
        layers[1] = _Wide
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
        return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True)
    return lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def job_of(features: tuple[str, ...], exact: bool, micro_batches: int, steps: int = _STEPS) -> Job:
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
        "steps": steps,
        "exact": exact,
    }
    for name in features:
        fields.update(extras.get(name, {}))
    return Job(**fields)
