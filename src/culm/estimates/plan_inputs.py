"""Plan inputs: from the options of `culm plan` to model profiles and an instance offer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from culm.errors import PlanError, UsageError
from culm.plan.model.accelerators import (
    USABLE_MEMORY_SHARE,
    find_accelerator,
    within_node_bandwidth,
    worker_bandwidth,
)
from culm.plan.model.decoder_models import read_decoder_config
from culm.plan.model.model_profile import Profile
from culm.plan.model.reference_models import decoder_model, find_model
from culm.plan.model.shape_search import DEFAULT_BANDWIDTH
from culm.plan.rent import rental_options
from culm.plan.rent.rental_options import InstanceOffer, RentalOptions, RentalQuery
from culm.strategies import registry
from culm.strategies.auto import AutoStrategy
from culm.strategies.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from culm.market.catalogue import PricedInstance
    from culm.plan.model.reference_models import ReferenceModel

_DEFAULT_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
"""Micro-batch sizes that are tried if the user gives none."""


@dataclass(frozen=True)
class PlanInputs:
    """What is trained: profiles by micro-batch size, and the samples of a step."""

    name: str
    profiles: Mapping[int, Profile]
    batch: int
    notes: tuple[str, ...] = ()
    recompute_profiles: Mapping[int, Profile] = field(default_factory=dict)
    """Profiles with recomputed activations, for the case that nothing fits otherwise."""


def find_machine(instance: str, prices: Path | None = None, on: str | None = None) -> PricedInstance:
    """The machine of an instance type, at the prices of a day or the newest ones.

    Raises UsageError for an instance that is not in the catalogue, naming the nearest, or that has no accelerator.
    """
    from culm.market.catalogue import load_catalogue

    machine = load_catalogue(prices).find(instance, on)
    if not machine.gpu_count:
        raise UsageError(f"--instance {instance} has no accelerator to train on: use one that has, as g5.xlarge")
    return machine


def node_offer(machine: PricedInstance | None, *, spot: bool) -> InstanceOffer:
    """What a node offers and costs. Without a machine: this one, with no price and no memory limit."""
    if machine is None:
        return InstanceOffer(
            instance="this machine", memory=2**62, on_accelerator=False, bandwidth=DEFAULT_BANDWIDTH, usd_per_h=0.0
        )
    device = find_accelerator(machine.gpu)
    return InstanceOffer(
        instance=machine.instance,
        memory=int(device.memory * USABLE_MEMORY_SHARE),
        node_link=within_node_bandwidth(device),
        bandwidth=worker_bandwidth(machine.instance, machine.gpu_count),
        usd_per_h=machine.price(spot=spot),
        workers=machine.gpu_count,
        zones=max(1, len(machine.zone_prices)) if machine.zone_prices else 3,
    )


def price_note(machine: PricedInstance | None, *, spot: bool) -> str:
    """A sentence that says where the price comes from."""
    if machine is None:
        return "no --instance: times are as measured; memory and cost are not considered"
    kind = "spot, the median of its zones" if spot else "on demand"
    when = machine.as_of.isoformat() if machine.as_of else "no date"
    return f"{machine.instance}: {machine.price(spot=spot):.4g} $/h {kind} ({when}, {machine.source})"


class ModelSource(NamedTuple):
    """Where the layers come from: exactly one is given."""

    file: str | None
    model: str | None
    profile: str | None


class BatchSizes(NamedTuple):
    """The batch options; None: use the default."""

    batch: int | None
    micro_batch: int | None
    micro_batches: int | None


def load_plan_inputs(
    source: ModelSource,
    sizes: BatchSizes,
    machine: PricedInstance | None,
    *,
    precision: str | None,
    recompute: bool,
    nodes: int,
) -> PlanInputs:
    """Load what is trained. Raises UsageError if it is given twice or cannot be read.

    Without a precision, a well-known model is estimated in bf16 if the accelerator has it, else in fp32.
    """
    names = zip(("FILE", "--model", "--profile"), source, strict=True)
    given = [name for name, value in names if value is not None]
    for name, value in zip(("--batch", "--micro-batch", "--micro-batches"), sizes, strict=True):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}: use a whole number of at least 1")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both say what is trained: give one of them")
    if source.model is not None:
        return _from_model(source.model, sizes, machine, precision, recompute)
    if source.profile is not None:
        return _from_profile(source.profile, sizes, nodes)
    assert source.file is not None, "one is given"
    return _from_job(source.file)


def find_options_or_recompute(
    inputs: PlanInputs, query: RentalQuery, offer: InstanceOffer
) -> tuple[RentalOptions, RentalQuery, list[str]]:
    """The rental options, the query that found them, and notes, one of which says if activations are recomputed."""
    used, options = rental_options.find_options_or_recompute(query, inputs.recompute_profiles, offer)
    note = f"recompute is on: {options.table[0].strategy} fits only with recomputed activations, or trains faster so"
    return options, used, [*inputs.notes, *([note] if used is not query else [])]


def _from_model(
    name: str, sizes: BatchSizes, machine: PricedInstance | None, asked_precision: str | None, recompute: bool
) -> PlanInputs:
    """A well-known model or a config.json, with times estimated for the machine's accelerator."""
    if machine is None:
        raise UsageError("--model needs an instance to estimate its times: name one, as in --instance p3.2xlarge")
    known, accelerator = load_model(name), find_accelerator(machine.gpu)
    precision = asked_precision or accelerator.default_precision
    samples, tried = _split_batch(sizes, known)
    profiles = {
        again: {size: known.profile(accelerator, size, precision=precision, recompute=again) for size in tried}
        for again in (recompute, True)
    }
    chosen = "" if asked_precision else " (the default for it: set --precision to change that)"
    notes = (_estimate_note(known, accelerator.name, precision) + chosen,)
    return PlanInputs(known.name, profiles[recompute], samples, notes, {} if recompute else profiles[True])


def load_model(name: str) -> ReferenceModel:
    """A well-known model, or that of a Hugging Face config.json or a folder that has one. Raises PlanError."""
    path = Path(name)
    if path.suffix == ".json" or (path / "config.json").is_file():
        return decoder_model(*read_decoder_config(path))
    return find_model(name)


def _split_batch(sizes: BatchSizes, known: ReferenceModel) -> tuple[int, list[int]]:
    """Samples of a step, and the micro-batch sizes to try."""
    batch, micro_batch, micro_batches = sizes
    if micro_batches is not None:
        micro_batch = micro_batch or known.micro_batch
        batch = micro_batch * micro_batches
    samples = known.global_batch if batch is None else batch
    if samples < 1 or (micro_batch is not None and (micro_batch < 1 or samples % micro_batch)):
        raise PlanError(
            f"a step of {samples} samples cannot be cut into micro-batches of {micro_batch}: use a divisor of {samples}"
        )
    return samples, [size for size in ((micro_batch,) if micro_batch else _DEFAULT_MICRO_BATCHES) if not samples % size]


def _estimate_note(known: ReferenceModel, accelerator: str, precision: str) -> str:
    counts = f"{known.unique_parameters / 1e6:,.0f}M parameters, {known.flop / 1e9:,.0f} GFLOP a sample"
    return f"{known.name}: {counts} ({known.note}); times are estimated for {accelerator} in {precision}"


def _from_profile(path: str, sizes: BatchSizes, nodes: int) -> PlanInputs:
    """A measured profile. Without a batch size, assumes four micro-batches per node."""
    profile = Profile.load(path)
    M = sizes.micro_batches or (sizes.batch // profile.micro_batch if sizes.batch else 4 * nodes)
    given = sizes.micro_batches or sizes.batch
    assumed = () if given else (f"{M} micro-batches a step are assumed: set --micro-batches to change that",)
    notes = (f"{Path(path).name}: times as {profile.source} on {profile.device}", *assumed)
    return PlanInputs(Path(path).stem, {profile.micro_batch: profile}, M * profile.micro_batch, notes)


def _from_job(file: str) -> PlanInputs:
    """The job of a file, profiled on this machine."""
    from culm.cluster.prepare_run import inspect_layers
    from culm.job import load_job
    from culm.runtime.compute.layer_profiler import profile_layers

    job = load_job(file)
    inspect_layers(job)
    profile = profile_layers(job)
    return PlanInputs(
        Path(file.partition(":")[0]).stem, {profile.micro_batch: profile}, job.global_batch, ("profiled here",)
    )


def considered_strategies(names: Sequence[str] | None) -> Sequence[Strategy]:
    """The strategies that a plan chooses from: those named, or all. `auto` considers all of them.

    Raises UsageError for an unknown name, and for a strategy that gives no estimate.
    """
    if not names or AutoStrategy.name in names:
        return registry.by_preference()
    found = [registry.get(name) for name in names]
    for strategy in found:
        if type(strategy).estimate is Strategy.estimate:
            raise UsageError(
                f"--strategy {strategy.name} gives no estimate to plan with: compare it with culm simulate --strategy "
                f"{strategy.name}, or leave it out"
            )
    return found


def parse_budget(text: str | None) -> float:
    """Parse `--budget 40/h` to dollars per hour; infinite without it. Raises UsageError."""
    if text is None:
        return math.inf
    match = re.fullmatch(r"\$?\s*([0-9]+(?:\.[0-9]+)?)\s*(?:\$|usd)?\s*(?:/\s*h(?:our)?)?", text.strip().lower())
    if match is None or not float(match[1]):
        raise UsageError(f"--budget {text!r} is not a price: write dollars per hour, as in --budget 40/h")
    return float(match[1])


def parse_node_range(text: str | None, default_max: int = 64) -> tuple[int, int]:
    """Parse `--nodes 16..64`, or a single number. Raises UsageError."""
    if text is None:
        return 1, default_max
    match = re.fullmatch(r"([0-9]{1,6})(?:\s*(?:\.\.|-)\s*([0-9]{1,6}))?", text.strip())
    if match is None:
        raise UsageError(f"--nodes {text!r} is not a number of nodes: write one, or a range, as in --nodes 16..64")
    low = int(match[1])
    return low, int(match[2]) if match[2] else low
