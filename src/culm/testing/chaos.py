"""Random runs with random faults, each from one seed.

A seed determines the job, the shape of the cluster, the strategy, the duration of every action, and the faults. Faults
are limited to those that the strategy survives, and the run must reach the result of a single process: bit for bit with
`exact`, within summation error without. In a quarter of the runs the shape changes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import msgspec
import torch
from torch import Tensor, nn

from culm.cluster.node_faults import KillNode, NodeFault, NoticeToNode
from culm.cluster.prepare_run import inspect_layers, prepare_run
from culm.config import RunConfig
from culm.errors import UsageError
from culm.job import Job
from culm.plan.replan.planned_schedule import PLANNED
from culm.runtime.compute.model_check import ModelInfo
from culm.schedule import generate_plan
from culm.strategies import RunShape, Strategy, registry
from culm.testing.fault_runner import InjectedFault
from culm.testing.fault_schedule import Faults, Outage
from culm.testing.random_faults import random_faults
from culm.testing.random_platform_faults import PlatformLimits, add_platform_faults, lost_nodes
from culm.testing.random_reshape_faults import RESHAPE_SHAPES as CHANGING_SHAPES
from culm.testing.random_reshape_faults import random_reshape_faults
from culm.testing.reference_loop import ReferenceResult, reference
from culm.testing.simulated_cluster import LEASE_S
from culm.testing.survival_check import run_and_compare

FEATURES = ("clip", "tied", "batch norm", "dropout", "weighted loss", "bf16", "evaluation", "checkpoints")
UNEQUAL_LAYERS = "unequal layers"
"""A feature of runs whose shape changes: pipelines of another depth are cut at other layers."""
_MODEL_FEATURES = frozenset((*FEATURES, UNEQUAL_LAYERS)) - {"clip", "evaluation", "checkpoints"}
"""Features that change the layers or the loss."""
STEADY_SHAPES = ((1, 2), (1, 3), (2, 2), (2, 3), (3, 2))
SHARED_NODE_SHAPES = ((1, 4), (2, 2), (2, 3), (2, 4), (3, 2))
"""The shapes of runs with several workers per node."""
WORKERS_PER_NODE = (1, 2, 3)
RESHAPE_SHARE = 0.25
"""The share of runs whose shape changes."""
PLATFORM_SHARE = 0.5
"""The share of runs with faults of storage, store, frames, memory, slow nodes or exceptions."""
PLANNED_SHARE = 0.15
"""The share of runs with the planned schedule, for layers of random costs."""
_WIDTH, _LAYERS, _STEPS = 4, 6, 4
_SAVED_FROM = 3
"""The first checkpoint is complete in this step, if the run writes any."""
_LEADER_LINE = re.compile(r" node \d+ leads")
_RESHAPE_LINE = re.compile(r" epoch \d+, made ")


@dataclass(frozen=True)
class Scenario:
    """A job, its cluster and the faults that are injected into it."""

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
    workers_per_node: int = 1

    def __str__(self) -> str:
        zones = f"{len(self.zones)} zones, " if self.zones else ""
        zones += f"{self.workers_per_node} workers per node, " if self.workers_per_node > 1 else ""
        exact = "exact" if self.exact else "within summation error"
        return (
            f"seed {self.seed}: {self.pipelines} x {self.stages}, {zones}{self.steps} steps of {self.micro_batches} "
            f"micro-batches, {self.schedule}, strategy {self.strategy}, reconfigure {self.reconfigure}, {exact}, "
            f"with {', '.join(self.features) or 'no extras'}\n{self.faults}"
        )


@dataclass(frozen=True)
class ChaosResult:
    """How a scenario ended. `failure` is empty if the run survived; else it has the reason and the history."""

    scenario: Scenario
    injected_faults: tuple[InjectedFault, ...] = ()
    recoveries: tuple[str, ...] = ()
    """Where each recovery found the lost layers: peers, shadow or checkpoint; or notice."""
    leader_count: int = 1
    """How many leaders the run had."""
    reshape_count: int = 0
    """How often the shape changed."""
    failure: str = ""
    history: str = ""


def check_strategies(strategies: Iterable[str] = ()) -> tuple[str, ...]:
    """The strategies to draw from: those given, or all that chaos can test. Raises UsageError for another one."""
    names = tuple(strategies)
    for name in names:
        if not (name in registry.known_names() or ":" in name) or not _is_testable(registry.get(name)):
            able = " or ".join(check_strategies())
            raise UsageError(f"--strategy {name!r} cannot be tested by chaos: use {able}, or module:Class")
    return names or tuple(name for name in registry.known_names() if _is_testable(registry.get(name)))


def _is_testable(strategy: Strategy) -> bool:
    """Whether a run with the strategy has to reach the result of a failure-free run without restarts."""
    return not (strategy.chooses_another or strategy.restarts_from_checkpoint or strategy.changes_training)


def random_scenario(
    seed: int, strategies: Iterable[str] = (), *, reshaping: bool = False, workers_per_node: int = 1
) -> Scenario:
    """The scenario of a seed, the same each time. Pure. `reshaping`: only scenarios whose shape changes. Raises
    UsageError for strategies that cannot be tested, if `reshaping` and none of them changes its shape, or if no shape
    has this many workers per node."""
    if workers_per_node not in WORKERS_PER_NODE:
        able = " or ".join(map(str, WORKERS_PER_NODE))
        raise UsageError(f"--workers-per-node {workers_per_node} is not tested by chaos: use {able}")
    names = check_strategies(strategies)
    mobile = [name for name in names if registry.get(name).reshapes]
    steady = [name for name in names if not registry.get(name).rebuilds_pipelines]
    if reshaping and not mobile:
        raise UsageError("--changing needs a strategy that goes on after a loss: add one, as in --strategy reroute")
    dice = random.Random(f"changing {seed}")  # a generator of its own keeps the scenarios of other seeds as they are
    changes = dice.random() < RESHAPE_SHARE or reshaping or not steady
    if changes and mobile:
        scenario = _random_reshape_scenario(seed, dice, mobile, workers_per_node)
    else:
        scenario = _random_steady_scenario(seed, steady, workers_per_node)
    return _with_platform_faults(scenario)


def random_workers_per_node(seed: int, strategies: Iterable[str] = (), *, reshaping: bool = False) -> int:
    """The workers per node of a seed, where the caller does not choose them: one, or sometimes several."""
    K = random.Random(f"workers {seed}").choices(WORKERS_PER_NODE, (8, 1, 1))[0]
    try:
        random_scenario(seed, strategies, reshaping=reshaping, workers_per_node=K)
    except (UsageError, IndexError):  # no shape has this many workers per node
        return 1
    return K


def _with_platform_faults(scenario: Scenario) -> Scenario:
    """The scenario with more faults in a part of the seeds. A generator of its own keeps the others as they are."""
    dice = random.Random(f"platform {scenario.seed}")
    if dice.random() >= PLATFORM_SHARE:
        return scenario
    limits = _platform_limits(scenario)
    return dataclasses.replace(scenario, faults=add_platform_faults(dice, scenario.faults, limits))


def _platform_limits(scenario: Scenario) -> PlatformLimits:
    strategy, K = registry.get(scenario.strategy), scenario.workers_per_node
    nodes = scenario.pipelines * scenario.stages // K
    reshapes, kept = scenario.steps > _STEPS, "checkpoints" in scenario.features

    def survives(lost: Iterable[int]) -> bool:
        """Whether a run without a checkpoint survives the loss of these nodes of the start."""
        nodes_lost = {node for node in lost if node < nodes}
        if reshapes:  # see random_reshape_faults
            return len(nodes_lost) <= 1 and not kept
        named = "1f1b" if scenario.schedule == PLANNED else scenario.schedule
        plan = generate_plan(
            named, pipelines=scenario.pipelines, stages=scenario.stages, micro_batches=scenario.micro_batches
        )
        slots = [node * K + index for node in nodes_lost for index in range(K)]
        options = {} if K == 1 else {"workers_per_node": K}
        return strategy.survives(plan, slots, **options)

    storage_from = (0 if survives(lost_nodes(scenario.faults, LEASE_S)) else _SAVED_FROM) if kept else None
    return PlatformLimits(
        nodes=nodes,
        steps=scenario.steps,
        lease_s=LEASE_S,
        survives=survives,
        recovers=strategy.recovers_in_place,
        storage_from=storage_from,
        compares_holders=kept and scenario.exact and not reshapes and scenario.pipelines > 1 and K == 1,
    )


def _allowed_shapes(strategy: Strategy, shapes: Iterable[tuple[int, int]], K: int) -> list[tuple[int, int]]:
    """The shapes that meet the requirements of a strategy, on nodes with K workers. They have at least two nodes, and
    with several workers per node enough of them that faults between nodes can be drawn."""

    def is_allowed(shape: tuple[int, int]) -> bool:
        try:
            strategy.check(RunShape(*shape, workers_per_node=K))
        except UsageError:
            return False
        return K == 1 or (shape[0] * shape[1] % K == 0 and shape[0] * shape[1] > K)

    return [shape for shape in shapes if is_allowed(shape)]


def _random_steady_scenario(seed: int, strategies: Sequence[str], workers_per_node: int) -> Scenario:
    dice = random.Random(f"chaos {seed}")
    name = dice.choice(strategies)
    strategy = registry.get(name)
    pipelines, stages = dice.choice(
        _allowed_shapes(strategy, STEADY_SHAPES if workers_per_node == 1 else SHARED_NODE_SHAPES, workers_per_node)
    )
    schedule = _or_planned(seed, dice.choice(("gpipe", "1f1b", "1f1b", "zb", "zb")))
    micro_batches = dice.choice((4, 6))
    features = tuple(sorted(dice.sample(FEATURES, dice.choice((0, 1, 1, 2, 2, 3)))))
    # Faults name whole backwards, which stand for the W where a planned schedule splits them.
    named = "1f1b" if schedule == PLANNED else schedule
    plan = generate_plan(named, pipelines=pipelines, stages=stages, micro_batches=micro_batches)
    saved_from = _SAVED_FROM if "checkpoints" in features else None
    return Scenario(
        seed=seed,
        features=features,
        exact=dice.random() < 0.75,
        micro_batches=micro_batches,
        pipelines=pipelines,
        stages=stages,
        schedule=schedule,
        strategy=name,
        faults=random_faults(
            dice,
            plan,
            strategy=strategy,
            steps=_STEPS,
            lease_s=LEASE_S,
            saved_from=saved_from,
            workers_per_node=workers_per_node,
        ),
        workers_per_node=workers_per_node,
    )


def _random_reshape_scenario(
    seed: int, dice: random.Random, strategies: Sequence[str], workers_per_node: int
) -> Scenario:
    """A run that has one pipeline, or may shrink to one, writes checkpoints: a layer may have a single holder."""
    name = dice.choice(strategies)
    strategy = registry.get(name)
    pipelines, stages = dice.choice(_allowed_shapes(strategy, CHANGING_SHAPES, workers_per_node))
    reconfigure = dice.choice(("cost", "cost", "bamboo", "never"))
    alone = pipelines == 1 or (strategy.allows_one_pipeline and reconfigure == "cost")
    kept = ("checkpoints",) if alone or dice.random() < 0.6 else ()
    extras = [feature for feature in FEATURES if feature != "checkpoints"]
    features = tuple(
        sorted((*dice.sample([*extras, UNEQUAL_LAYERS, UNEQUAL_LAYERS], dice.choice((0, 1, 1, 2, 2))), *kept))
    )
    steps, saved_from = dice.choice((8, 10, 14)), _SAVED_FROM if kept else None
    parts = ("interleaved",) if 2 * stages <= _LAYERS else ()
    return Scenario(
        seed=seed,
        features=tuple(dict.fromkeys(features)),
        exact=dice.random() < 0.75,
        micro_batches=dice.choice((4, 6)),
        pipelines=pipelines,
        stages=stages,
        schedule=_or_planned(seed, dice.choice(("gpipe", "1f1b", "1f1b", "zb", "zb", *parts))),
        strategy=name,
        faults=random_reshape_faults(
            dice,
            pipelines,
            pipelines * stages // workers_per_node,
            steps=steps,
            lease_s=LEASE_S,
            saved_from=saved_from,
            workers_per_node=workers_per_node,
        ),
        workers_per_node=workers_per_node,
        steps=steps,
        reconfigure=reconfigure,
        zones=dice.choice(((), (), ("a", "b"), ("a", "b", "c"))),
    )


def _or_planned(seed: int, schedule: str) -> str:
    """The planned schedule in a part of the scenarios. A generator of its own keeps the others as they are."""
    return PLANNED if random.Random(f"planned {seed}").random() < PLANNED_SHARE else schedule


def _uneven_costs(seed: int, model_info: ModelInfo) -> ModelInfo:
    """The model with random costs of its layers, in which splitting a backward costs nothing: the planner then splits
    some of them, which it would not do for layers as small as those of a test."""
    dice = random.Random(f"costs {seed}")
    layers = tuple(
        msgspec.structs.replace(
            layer, **{name: dice.uniform(0.5, 2.0) for name in ("forward_s", "input_s", "weight_s")}, halving_s=0.0
        )
        for layer in model_info.profile.layers
    )
    return dataclasses.replace(model_info, profile=msgspec.structs.replace(model_info.profile, layers=layers))


def run_scenario(scenario: Scenario, out: str | None = None) -> ChaosResult:
    """Run a scenario. If the run fails or differs from the expected result, that is the `failure` of the outcome.

    `out`: keep the files of the run in this folder.
    """
    job_features = tuple(name for name in scenario.features if name != "checkpoints")
    job = make_job(job_features, scenario.exact, scenario.micro_batches, scenario.steps)
    expected = _expected_result(job_features, scenario.exact, scenario.micro_batches, scenario.steps)
    with _memory_folder(scenario.seed) if out is None else contextlib.nullcontext(out) as folder:
        try:
            model_info = _model_check(frozenset(job_features) & _MODEL_FEATURES, job.exact)
            setup = prepare_run(
                job,
                _request(scenario, folder, keeps_files=out is not None),
                model_info=_uneven_costs(scenario.seed, model_info) if scenario.schedule == PLANNED else model_info,
                measure=False,
            )
            run = run_and_compare(job, setup, scenario.faults, scenario.seed, expected, zones=scenario.zones)
        except AssertionError as error:
            return ChaosResult(scenario, failure=str(error))
    recoveries = tuple(recovery["source"] for recovery in run.summary["recoveries"])
    history = str(run.history)
    leaders, changes = (len(found.findall(history)) for found in (_LEADER_LINE, _RESHAPE_LINE))
    return ChaosResult(scenario, run.injected_faults, recoveries, leaders, changes, history=history)


@contextlib.contextmanager
def _memory_folder(seed: int) -> Iterator[str]:
    """A run folder in memory: on a disk a run takes a quarter longer, because checkpoints wait for it."""
    files, folder = fsspec.filesystem("memory"), f"/culm-chaos-{seed}"
    try:
        yield f"memory:/{folder}"
    finally:
        if files.exists(folder):
            files.rm(folder, recursive=True)


def _request(scenario: Scenario, folder: str, *, keeps_files: bool) -> RunConfig:
    kept = "checkpoints" in scenario.features
    return RunConfig(
        pipelines=scenario.pipelines,
        stages=scenario.stages,
        workers_per_node=scenario.workers_per_node,
        schedule=scenario.schedule,
        strategy=scenario.strategy,
        reconfigure=scenario.reconfigure,
        out=folder if kept or keeps_files else None,
        checkpoint_every=1 if kept else 0,
    )


@functools.cache
def _model_check(features: frozenset[str], exact: bool) -> ModelInfo:
    """The inspected layers. They do not depend on the number of steps and micro-batches; the optimizer depends on
    `exact`."""
    return inspect_layers(make_job(tuple(sorted(features)), exact, micro_batches=4))


@functools.cache
def _expected_result(features: tuple[str, ...], exact: bool, micro_batches: int, steps: int) -> ReferenceResult:
    """The result of a single process: the same for all clusters."""
    return reference(make_job(features, exact, micro_batches, steps))


def coverage(outcomes: Iterable[ChaosResult]) -> dict[str, dict[str, int]]:
    """How often each property occurred in the runs. Only faults that occurred count."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in outcomes:
        scenario = outcome.scenario
        counts["strategy"][scenario.strategy] += 1
        counts["shape"][f"{scenario.pipelines} x {scenario.stages}"] += 1
        counts["schedule"][scenario.schedule] += 1
        counts["workers per node"][str(scenario.workers_per_node)] += 1
        counts["result"]["to the last bit" if scenario.exact else "within summation error"] += 1
        counts["job"].update(scenario.features or ("no extras",))
        counts["fault"].update(map(_fault_words, outcome.injected_faults))
        counts["moment"].update(
            _moment_words(injected) for injected in outcome.injected_faults if isinstance(injected.fault, NodeFault)
        )
        counts["recoveries"][str(len(outcome.recoveries))] += 1
        counts["recovered from"].update(outcome.recoveries)
        counts["leaders"][str(outcome.leader_count)] += 1
        counts["changes of shape"][str(outcome.reshape_count)] += 1
    return {name: dict(sorted(counter.items())) for name, counter in counts.items()}


def _fault_words(injected: InjectedFault) -> str:
    fault = injected.fault
    if isinstance(fault, KillNode):
        return f"kill of {len(fault.nodes)}" + (", sent messages lost" if fault.silence else "")
    if isinstance(fault, NoticeToNode):
        return f"notice of {len(fault.nodes)}" + ("" if fault.seconds else ", 0 s")
    if isinstance(fault, Outage):
        return "outage of the store" + (" beyond the lease" if fault.seconds > LEASE_S else "")
    outlasts_lease = isinstance(fault, NodeFault) and getattr(fault, "seconds", 0.0) > LEASE_S
    return fault.call_name.replace("_", " ") + (" beyond the lease" if outlasts_lease else "")


def _moment_words(injected: InjectedFault) -> str:
    """The kind of an action: F of 2F0, S+ of 1S+; other moments as they are."""
    return re.sub(r"^(evaluate )?\d+([A-Z]\+?)\d*$", r"\1\2", injected.at) or "after a while"


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
    """A layer with several times the work of the others."""

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
    if UNEQUAL_LAYERS in features:
        layers[1] = _Wide
    return layers


def _weighted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A loss in which samples have different weights."""
    weight = 1.0 + target[:, 0].abs()
    return (((output - target) ** 2).mean(1) * weight).sum(), weight.sum()


def _random_samples(count: int) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(1)
    return [(torch.randn(_WIDTH, generator=dice), torch.randn(_WIDTH, generator=dice)) for _ in range(count)]


def _optimizer(exact: bool) -> Callable[[Any], torch.optim.Optimizer]:
    """AdamW with `exact`, else SGD: Adam amplifies summation error where a gradient is almost zero."""
    if exact:
        return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True)
    return lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def make_job(features: tuple[str, ...], exact: bool, micro_batches: int, steps: int = _STEPS) -> Job:
    """A job with these features that trains in milliseconds."""
    extras: Mapping[str, dict[str, Any]] = {
        "clip": {"clip_norm": 0.1},
        "tied": {"tied": [("0.linear.weight", "5.linear.weight")]},
        "weighted loss": {"loss": _weighted_loss},
        "bf16": {"precision": "bf16"},
        "evaluation": {"evaluate": _random_samples(10), "evaluate_every": 2},
    }
    fields: dict[str, Any] = {
        "layers": _layers(features),
        "loss": nn.functional.mse_loss,
        "optimizer": _optimizer(exact),
        "data": _random_samples(40),
        "global_batch": 4 * micro_batches,
        "micro_batch": 4,
        "steps": steps,
        "exact": exact,
    }
    for name in features:
        fields.update(extras.get(name, {}))
    return Job(**fields)
