"""Does a job survive? Its final state after faults beside that of the undisturbed run."""

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

from culm.cluster.prepare import Request, prepare
from culm.schedule import Plan
from culm.testing.cluster import LEASE_S, Cluster, Simulated, enact
from culm.testing.draw import draw_faults
from culm.testing.faults import Faults
from culm.testing.loop import Deadlock

if TYPE_CHECKING:
    from torch import Tensor

    from culm.cluster.setup import Setup
    from culm.job import Job
    from culm.runtime.state import Snapshot
    from culm.testing.reference import Trained

Cost: TypeAlias = Callable[[int, int, str], float]
LATENCY_S = 0.001
PATIENCE_S = 3600.0
"""Virtual seconds without any news in the store: a run in which only heartbeats go on hangs, too."""
ENDLESS = 50
"""Epochs without a step: so does one that recovers again and again."""
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
"""How far an element may be off, relative to the largest of its kind in the model, where sums were added up in another
order. Differences of the last bit grow from step to step, and where bf16 rounds them they grow at once."""


@dataclass(frozen=True)
class Survived:
    """A run that came to what the undisturbed one did."""

    faults: Faults
    seed: int
    run: Simulated


def survives(
    job: Job,
    *,
    faults: Faults | Iterable[Faults] | None = None,
    seeds: Iterable[int] | None = None,
    cost: Cost | None = None,
    latency: float = LATENCY_S,
    lease_s: float = LEASE_S,
    **request: Any,
) -> list[Survived]:
    """Run a job on simulated clusters that are hurt, and check that it learns what the undisturbed run does.

    With `exact` the weights and the optimizer state must be the same to the last bit, else within summation error; and
    every sample must have been counted once. `faults` is one schedule or several, and each must strike; None draws
    one for each of `seeds` (10) that the strategy can survive. Actions take random times out of the seed, unless `cost`
    is given; the other arguments are those of `simulate`.
    Raises AssertionError with the faults, the seed and the history of the run that failed.
    """
    setup = prepare(job, Request(**request))
    undisturbed = enact(job, _in_own_folder(setup, "undisturbed"), latency=latency)
    found = []
    for number, (schedule, seed) in enumerate(_schedules(setup, faults, seeds, lease_s)):
        own = _in_own_folder(setup, f"run-{number}")
        run = endure(job, own, schedule, seed, undisturbed, cost=cost, latency=latency, lease_s=lease_s)
        missed = run.missed(schedule)
        if missed and faults is not None:
            raise AssertionError(f"the moment of {' and '.join(missed)} never came: the run was not hurt by it")
        found.append(Survived(schedule, seed, run))
    return found


def endure(
    job: Job,
    setup: Setup,
    faults: Faults,
    seed: int,
    truth: Simulated | Trained,
    *,
    cost: Cost | None = None,
    latency: float = LATENCY_S,
    lease_s: float = LEASE_S,
    zones: Sequence[str] = (),
) -> Simulated:
    """One run with faults, which must come to what another one did. Raises AssertionError with its history."""
    cost = cost or varied(seed)
    try:
        ways: dict[str, Any] = {"cost": cost, "latency": latency, "lease_s": lease_s, "zones": zones}
        run = enact(job, setup, faults=faults, seed=seed, script=_impatient, **ways)
    except Exception as error:
        history = "\n".join(getattr(error, "__notes__", ()))
        raise AssertionError(f"the run ended with {type(error).__name__}: {error}\n{history}") from error
    wrong = list(differences(job, run, truth))
    if wrong:
        raise AssertionError(f"{'; '.join(wrong)}\n{faults}, seed {seed}:\n{run.history}")
    return run


def differences(job: Job, run: Simulated, truth: Simulated | Trained) -> Iterator[str]:
    """What is wrong with a run, beside one that was not disturbed."""
    summary = run.summary
    for name in ("samples_lost", "samples_duplicated"):
        if summary[name]:
            yield f"{name} is {summary[name]}"
    if summary["samples"] != summary["samples_expected"] or summary["steps"] != job.steps:
        yield f"{summary['samples']} samples in {summary['steps']} steps, not {job.steps * job.global_batch}"
    if not job.exact:
        apart = _first_apart(run.snapshot, truth.snapshot, TOLERANCE[job.precision])
        if apart:
            yield apart
        return
    if run.state_sha256 != truth.state_sha256:
        apart = _first_apart(run.snapshot, truth.snapshot, 0.0)
        yield f"the state is not the same to the last bit: {apart or 'its digest differs'}"
    if truth.losses and not _equal(summary["final_loss"], truth.losses[-1]):
        yield f"the final loss is {summary['final_loss']}, not {truth.losses[-1]}"
    for step, loss in run.told:
        if step < len(truth.losses) and not _equal(loss, truth.losses[step]):
            yield f"the loss of step {step} is {loss}, not {truth.losses[step]}"
    if not _all_equal(run.evaluations, truth.evaluations):
        yield f"the evaluations are {run.evaluations}, not {truth.evaluations}"


def _equal(one: float | None, other: float | None) -> bool:
    """What is no number is equal to what is none."""
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def _all_equal(some: Mapping[int, float], others: Mapping[int, float]) -> bool:
    return some.keys() == others.keys() and all(_equal(loss, others[step]) for step, loss in some.items())


def _first_apart(found: Snapshot, wanted: Snapshot, tolerance: float) -> str:
    """The first tensor that differs by more than summation error."""
    if found.tensors.keys() != wanted.tensors.keys() or found.scalars.keys() != wanted.scalars.keys():
        return f"it has other tensors: {sorted(found.tensors.keys() ^ wanted.tensors.keys())}"
    scales: dict[str, float] = collections.defaultdict(lambda: 1e-12)
    for name, tensor in wanted.tensors.items():
        scales[_kind(name)] = max(scales[_kind(name)], _largest(tensor))
    for name, tensor in wanted.tensors.items():
        off = _largest(found.tensors[name].double() - tensor.double())
        if not off <= tolerance * scales[_kind(name)]:
            return f"{name} is off by {off:.3g}"
    apart = [name for name, value in wanted.scalars.items() if found.scalars[name] != value]
    return f"{apart[0]} is {found.scalars[apart[0]]}, not {wanted.scalars[apart[0]]}" if apart else ""


def _kind(name: str) -> str:
    """exp_avg of optimizer.2.weight.exp_avg; parameters and buffers are of one kind."""
    return name.rpartition(".")[2] if name.startswith("optimizer.") else ""


def _largest(tensor: Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


def varied(seed: int) -> Cost:
    """Virtual seconds for each action, different for each and the same each time: an interleaving for each seed."""

    return functools.partial(_drawn_s, seed)


@functools.lru_cache(100_000)
def _drawn_s(seed: int, node: int, step: int, action: str) -> float:
    _dice.seed(f"{seed} {node} {step} {action}")
    return _dice.uniform(0.005, 0.02)


_dice = random.Random()
"""Seeded for each draw: to make a generator takes longer than to seed one."""


def _schedules(
    setup: Setup, faults: Faults | Iterable[Faults] | None, seeds: Iterable[int] | None, lease_s: float
) -> Iterator[tuple[Faults, int]]:
    if faults is None:
        plan = Plan.from_text(setup.plan)
        for seed in range(10) if seeds is None else seeds:
            dice = random.Random(f"faults {seed}")
            yield draw_faults(dice, plan, strategy=setup.strategy, steps=setup.steps, lease_s=lease_s), seed
        return
    for schedule in (faults,) if isinstance(faults, Faults) else faults:
        for seed in (0,) if seeds is None else seeds:
            yield schedule, seed


def _in_own_folder(setup: Setup, name: str) -> Setup:
    """Runs that keep files keep them apart."""
    return msgspec.structs.replace(setup, out=f"{setup.out}/{name}") if setup.out else setup


async def _impatient(cluster: Cluster) -> None:
    """Beside a run: nothing may stand still for ever, nor go round in a circle."""
    news = cluster.store.subscribe("")
    epochs = 0
    while epochs < ENDLESS:
        try:
            async with asyncio.timeout(PATIENCE_S):  # wait_for makes a task for each of them
                key, _ = await news.get()
        except TimeoutError:
            raise Deadlock(f"nothing has happened for {PATIENCE_S:g} s of virtual time{cluster.waits()}") from None
        epochs = 0 if key == "step" else epochs + (key == "epoch")
    raise Deadlock(f"{ENDLESS} epochs have come and gone without a step{cluster.waits()}")
