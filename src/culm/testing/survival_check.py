"""Survival check: compares the final state of a run with faults to that of the failure-free run."""

from __future__ import annotations

import asyncio
import collections
import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from culm.cluster.prepare_run import prepare_run
from culm.config import RunConfig
from culm.schedule import Plan
from culm.testing.fault_schedule import Faults
from culm.testing.random_faults import random_faults
from culm.testing.simulated_cluster import LEASE_S, Cluster, SimulatedRun, run_prepared
from culm.testing.virtual_time import Deadlock

if TYPE_CHECKING:
    from torch import Tensor

    from culm.cluster.run_setup import RunSetup
    from culm.device.simulated_streams import SimulatedDevice
    from culm.job import Job
    from culm.runtime.compute.snapshot import Snapshot
    from culm.testing.reference_loop import ReferenceResult

ActionCost: TypeAlias = Callable[[int, int, str], float]
LATENCY_S = 0.001
NO_PROGRESS_S = 3600.0
"""Virtual seconds without a change in the store after which a run counts as hung, even if heartbeats continue."""
MAX_EPOCHS_WITHOUT_STEP = 50
"""Epochs without a committed step after which a run counts as hung."""
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
"""How far an element may be off, relative to the largest of its kind in the model, if sums were added in another order.
Differences in the last bit grow from step to step, and with bf16 rounding at once."""


@dataclass(frozen=True)
class SurvivedRun:
    """A run with faults that reached the result of the failure-free run."""

    faults: Faults
    seed: int
    run: SimulatedRun


def survives(
    job: Job,
    *,
    faults: Faults | Iterable[Faults] | None = None,
    seeds: Iterable[int] | None = None,
    cost: ActionCost | None = None,
    latency: float = LATENCY_S,
    lease_s: float = LEASE_S,
    **request: Any,
) -> list[SurvivedRun]:
    """Run a job on simulated clusters with faults, and check that it learns what the failure-free run does.

    With `exact`, weights and optimizer state must be identical to the last bit, otherwise equal within summation error;
    and every sample must be counted once. `faults` is one schedule or several, and every fault in them must be
    injected; None draws one schedule that the strategy can survive for each of `seeds` (default: 10). Actions take
    random times from the seed unless `cost` is given; the other arguments are those of `simulate`. Raises
    AssertionError with the faults, the seed and the history of the run that failed.
    """
    setup = prepare_run(job, RunConfig(**request), measure=False)
    failure_free = run_prepared(job, _in_own_folder(setup, "failure-free"), latency=latency)
    survived = []
    for number, (schedule, seed) in enumerate(_fault_schedules(setup, faults, seeds, lease_s)):
        run_setup = _in_own_folder(setup, f"run-{number}")
        run = run_and_compare(job, run_setup, schedule, seed, failure_free, cost=cost, latency=latency, lease_s=lease_s)
        not_reached = run.faults_not_reached(schedule)
        if not_reached and faults is not None:
            raise AssertionError(f"the moment of {' and '.join(not_reached)} never came: the fault was not injected")
        survived.append(SurvivedRun(schedule, seed, run))
    return survived


def run_and_compare(
    job: Job,
    setup: RunSetup,
    faults: Faults,
    seed: int,
    expected: SimulatedRun | ReferenceResult,
    *,
    cost: ActionCost | None = None,
    latency: float = LATENCY_S,
    lease_s: float = LEASE_S,
    zones: Sequence[str] = (),
    device: SimulatedDevice | None = None,
) -> SimulatedRun:
    """Run once with faults and compare with an expected result. Raises AssertionError with the run's history."""
    cost = cost or random_action_cost(seed)
    try:
        options: dict[str, Any] = {"cost": cost, "latency": latency, "lease_s": lease_s, "zones": zones}
        options["device"] = device
        run = run_prepared(job, setup, faults=faults, seed=seed, script=_watch_for_hang, **options)
    except Exception as error:
        history = "\n".join(getattr(error, "__notes__", ()))
        raise AssertionError(f"the run ended with {type(error).__name__}: {error}\n{history}") from error
    problems = list(differences(job, run, expected))
    if problems:
        raise AssertionError(f"{'; '.join(problems)}\n{faults}, seed {seed}:\n{run.history}")
    return run


def differences(job: Job, run: SimulatedRun, expected: SimulatedRun | ReferenceResult) -> Iterator[str]:
    """The differences between a run and the failure-free one, as sentences."""
    summary = run.summary
    for name in ("samples_lost", "samples_duplicated"):
        if summary[name]:
            yield f"{name} is {summary[name]}"
    if summary["samples"] != summary["samples_expected"] or summary["steps"] != job.steps:
        yield f"{summary['samples']} samples in {summary['steps']} steps, not {job.steps * job.global_batch}"
    if not job.exact:
        difference = _first_difference(run.snapshot, expected.snapshot, TOLERANCE[job.precision])
        if difference:
            yield difference
        return
    if run.state_sha256 != expected.state_sha256:
        difference = _first_difference(run.snapshot, expected.snapshot, 0.0)
        yield f"the state is not the same to the last bit: {difference or 'its digest differs'}"
    if expected.losses and not _equal_or_both_nan(summary["final_loss"], expected.losses[-1]):
        yield f"the final loss is {summary['final_loss']}, not {expected.losses[-1]}"
    # A run that has returned from a corruption has reported steps with wrong weights before it ran them again.
    reported = dict(run.reported_losses).items() if summary.get("corruptions") else run.reported_losses
    for step, loss in reported:
        if step < len(expected.losses) and not _equal_or_both_nan(loss, expected.losses[step]):
            yield f"the loss of step {step} is {loss}, not {expected.losses[step]}"
    if not _all_equal(run.evaluations, expected.evaluations):
        yield f"the evaluations are {run.evaluations}, not {expected.evaluations}"


def _equal_or_both_nan(one: float | None, other: float | None) -> bool:
    """Whether two losses are equal; NaN equals NaN."""
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def _all_equal(some: Mapping[int, float], others: Mapping[int, float]) -> bool:
    return some.keys() == others.keys() and all(_equal_or_both_nan(loss, others[step]) for step, loss in some.items())


def _first_difference(actual: Snapshot, expected: Snapshot, tolerance: float) -> str:
    """The first tensor that differs by more than the tolerance, as a sentence; empty: none does."""
    if actual.tensors.keys() != expected.tensors.keys() or actual.scalars.keys() != expected.scalars.keys():
        return f"it has other tensors: {sorted(actual.tensors.keys() ^ expected.tensors.keys())}"
    scales: dict[str, float] = collections.defaultdict(lambda: 1e-12)
    for name, tensor in expected.tensors.items():
        scales[_tensor_kind(name)] = max(scales[_tensor_kind(name)], _max_abs(tensor))
    for name, tensor in expected.tensors.items():
        off = _max_abs(actual.tensors[name].double() - tensor.double())
        if not off <= tolerance * scales[_tensor_kind(name)]:
            return f"{name} is off by {off:.3g}"
    apart = [name for name, value in expected.scalars.items() if actual.scalars[name] != value]
    return f"{apart[0]} is {actual.scalars[apart[0]]}, not {expected.scalars[apart[0]]}" if apart else ""


def _tensor_kind(name: str) -> str:
    """`exp_avg` for optimizer.2.weight.exp_avg; empty for parameters and buffers."""
    return name.rpartition(".")[2] if name.startswith("optimizer.") else ""


def _max_abs(tensor: Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


def random_action_cost(seed: int) -> ActionCost:
    """A cost function with random but reproducible virtual seconds for each action: one interleaving for each seed."""

    return functools.partial(_random_seconds, seed)


@functools.lru_cache(100_000)
def _random_seconds(seed: int, node: int, step: int, action: str) -> float:
    _rng.seed(f"{seed} {node} {step} {action}")
    return _rng.uniform(0.005, 0.02)


_rng = random.Random()
"""Seeded for each draw, because creating a generator takes longer than seeding one."""


def _fault_schedules(
    setup: RunSetup, faults: Faults | Iterable[Faults] | None, seeds: Iterable[int] | None, lease_s: float
) -> Iterator[tuple[Faults, int]]:
    if faults is None:
        plan, K = Plan.from_text(setup.plan), setup.workers_per_node
        limits: dict[str, Any] = {"steps": setup.steps, "lease_s": lease_s, "workers_per_node": K}
        for seed in range(10) if seeds is None else seeds:
            rng = random.Random(f"faults {seed}")
            yield random_faults(rng, plan, strategy=setup.strategy_object, **limits), seed
        return
    for schedule in (faults,) if isinstance(faults, Faults) else faults:
        for seed in (0,) if seeds is None else seeds:
            yield schedule, seed


def _in_own_folder(setup: RunSetup, name: str) -> RunSetup:
    """The setup with a folder of its own, if the run writes files."""
    return msgspec.structs.replace(setup, out=f"{setup.out}/{name}") if setup.out else setup


async def _watch_for_hang(cluster: Cluster) -> None:
    """Script beside a run: raise Deadlock if nothing happens for too long, or epochs change without a step."""
    changes = cluster.store.subscribe("")
    epochs = 0
    while epochs < MAX_EPOCHS_WITHOUT_STEP:
        try:
            async with asyncio.timeout(NO_PROGRESS_S):  # cheaper than wait_for, which creates a task each time
                key, _ = await changes.get()
        except TimeoutError:
            raise Deadlock(
                f"nothing has happened for {NO_PROGRESS_S:g} s of virtual time{cluster.describe_waits()}"
            ) from None
        epochs = 0 if key == "step" else epochs + (key == "epoch")
    raise Deadlock(f"{MAX_EPOCHS_WITHOUT_STEP} epochs in a row have committed no step{cluster.describe_waits()}")
