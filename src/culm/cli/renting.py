"""What is to be trained, and on which machines: from options to profiles and an offer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from culm.errors import PlanError, UsageError
from culm.plan.choose import BANDWIDTH
from culm.plan.instances import USABLE, device, network
from culm.plan.models import model
from culm.plan.offers import Offer
from culm.plan.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from culm.market.catalogue import Machine
    from culm.plan.models import Model

_SIZES = (1, 2, 4, 8, 16, 32)
"""Micro-batches that are tried where nobody names one."""


@dataclass(frozen=True)
class Source:
    """What is trained: the profiles by micro-batch, and the samples of a step."""

    name: str
    profiles: Mapping[int, Profile]
    batch: int
    notes: tuple[str, ...] = ()
    lean: Mapping[int, Profile] = field(default_factory=dict)
    """The same with activations computed again, for memories in which nothing fits otherwise."""


def machine_of(instance: str, prices: Path | None = None, on: str | None = None) -> Machine:
    """The machine of that name, at the prices of a day or the newest.

    Raises UsageError, with the nearest, for one that is not in the catalogue or has nothing to train on.
    """
    from culm.market.catalogue import catalogue

    found = catalogue(prices).find(instance, on)
    if not found.gpu_count:
        raise UsageError(f"--instance {instance} has no accelerator to train on: use one that has, as g5.xlarge")
    return found


def offer_of(machine: Machine | None, *, spot: bool) -> Offer:
    """What a node is and costs. Without a machine it is this one: no price and no limit of memory."""
    if machine is None:
        return Offer(instance="this machine", memory=2**62, bandwidth=BANDWIDTH, usd_h=0.0)
    return Offer(
        instance=machine.instance,
        memory=int(device(machine.gpu).memory * USABLE),
        bandwidth=network(machine.instance, machine.gpu_count),
        usd_h=machine.price(spot=spot),
        workers=machine.gpu_count,
        zones=max(1, len(machine.zones)) if machine.zones else 3,
    )


def price_note(machine: Machine | None, *, spot: bool) -> str:
    """What the price is of."""
    if machine is None:
        return "no --instance: times are as measured, and nothing is said of memory and money"
    kind = "spot, the median of its zones" if spot else "on demand"
    when = machine.as_of.isoformat() if machine.as_of else "no date"
    return f"{machine.instance}: {machine.price(spot=spot):.4g} $/h {kind} ({when})"


class Trained(NamedTuple):
    """Where the layers come from: one of these."""

    file: str | None
    model: str | None
    profile: str | None


class Sizes(NamedTuple):
    """What was said of the batch; of what was not, the usual is taken."""

    batch: int | None
    micro_batch: int | None
    micro_batches: int | None


def source_of(
    trained: Trained, sizes: Sizes, machine: Machine | None, *, precision: str, recompute: bool, nodes: int
) -> Source:
    """What is trained. Raises UsageError when it is said twice, or can not be read."""
    names = zip(("FILE", "--model", "--profile"), trained, strict=True)
    given = [name for name, value in names if value is not None]
    for name, value in zip(("--batch", "--micro-batch", "--micro-batches"), sizes, strict=True):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}: use a whole number of at least 1")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both say what is trained: give one of them")
    if trained.model is not None:
        return _from_model(trained.model, sizes, machine, precision, recompute)
    if trained.profile is not None:
        return _from_profile(trained.profile, sizes, nodes)
    assert trained.file is not None, "one is given"
    return _from_job(trained.file)


def _from_model(name: str, sizes: Sizes, machine: Machine | None, precision: str, recompute: bool) -> Source:
    """A well-known model, estimated for the accelerator of the machine."""
    if machine is None:
        raise UsageError("--model needs an instance to estimate its times: name one, as in --instance p3.2xlarge")
    known, accelerator = model(name), device(machine.gpu)
    samples, tried = _cut(sizes, known)
    made = {
        again: {size: known.profile(accelerator, size, precision=precision, recompute=again) for size in tried}
        for again in (recompute, True)
    }
    notes = (_counted(known, accelerator.name, precision),)
    return Source(known.name, made[recompute], samples, notes, {} if recompute else made[True])


def _cut(sizes: Sizes, known: Model) -> tuple[int, list[int]]:
    """Samples of a step, and the micro-batches to try."""
    batch, micro_batch, micro_batches = sizes
    if micro_batches is not None:
        micro_batch = micro_batch or known.micro_batch
        batch = micro_batch * micro_batches
    samples = known.batch if batch is None else batch
    if samples < 1 or (micro_batch is not None and (micro_batch < 1 or samples % micro_batch)):
        raise PlanError(
            f"a step of {samples} samples can not be cut into micro-batches of {micro_batch}: "
            f"use a divisor of {samples}"
        )
    return samples, [size for size in ((micro_batch,) if micro_batch else _SIZES) if not samples % size]


def _counted(known: Model, accelerator: str, precision: str) -> str:
    counts = f"{known.parameters / 1e6:,.0f}M parameters, {known.flop / 1e9:,.0f} GFLOP a sample"
    return f"{known.name}: {counts} ({known.note}); times are estimated for {accelerator} in {precision}"


def _from_profile(path: str, sizes: Sizes, nodes: int) -> Source:
    """A measured profile. Where nothing is said of the batch, four micro-batches for each node."""
    found = Profile.load(path)
    M = sizes.micro_batches or (sizes.batch // found.micro_batch if sizes.batch else 4 * nodes)
    said = sizes.micro_batches or sizes.batch
    assumed = () if said else (f"{M} micro-batches a step are assumed: say --micro-batches",)
    notes = (f"{Path(path).name}: times as {found.source} on {found.device}", *assumed)
    return Source(Path(path).stem, {found.micro_batch: found}, M * found.micro_batch, notes)


def _from_job(file: str) -> Source:
    """The job of a file, measured here."""
    from culm.cluster.prepare import look
    from culm.job import load
    from culm.runtime.measure import measure

    job = load(file)
    look(job)
    found = measure(job)
    return Source(Path(file.partition(":")[0]).stem, {found.micro_batch: found}, job.global_batch, ("measured here",))


def budget_of(text: str | None) -> float:
    """`--budget 40/h`: dollars per hour; infinite if there is none."""
    if text is None:
        return math.inf
    match = re.fullmatch(r"\$?\s*([0-9]+(?:\.[0-9]+)?)\s*(?:\$|usd)?\s*(?:/\s*h(?:our)?)?", text.strip().lower())
    if match is None or not float(match[1]):
        raise UsageError(f"--budget {text!r} is no price: write dollars per hour, as in --budget 40/h")
    return float(match[1])


def nodes_of(text: str | None, most: int = 64) -> tuple[int, int]:
    """`--nodes 16..64`, or a number."""
    if text is None:
        return 1, most
    match = re.fullmatch(r"([0-9]{1,6})(?:\s*(?:\.\.|-)\s*([0-9]{1,6}))?", text.strip())
    if match is None:
        raise UsageError(f"--nodes {text!r} is no number of nodes: write one, or a range, as in --nodes 16..64")
    low = int(match[1])
    return low, int(match[2]) if match[2] else low
