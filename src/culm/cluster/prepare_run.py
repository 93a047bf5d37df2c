"""Make the RunSetup of a job and a RunConfig: shape, cuts, plans, first step. Everything that is wrong raises here."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from culm.checkpoint import CheckpointCatalog, Manifest, Storage
from culm.checkpoint.export import OPTIMIZER_PREFIX
from culm.cluster.node_faults import KillNode
from culm.cluster.resolve_strategy import StrategyInputs, resolve_strategy
from culm.cluster.run_setup import RunSetup, StepGate
from culm.config import RunConfig
from culm.data.stream import Stream
from culm.errors import CheckpointError, PlanError, UsageError
from culm.market.catalogue import load_catalogue
from culm.market.rental_cost import MINIMUM_S, Rental, rental_terms
from culm.observe.event_hooks import HOOK_OF_KIND
from culm.observe.report.cost_reader import earlier_rentals
from culm.observe.writers.run_folder import local_path
from culm.observe.writers.writer_registry import check_writers
from culm.plan.model.accelerators import USABLE_MEMORY_SHARE
from culm.plan.model.layer_partition import partition_layers, segment_layer_ranges
from culm.plan.model.model_profile import LayerCost, Profile
from culm.plan.model.shape_prediction import peak_in_flight
from culm.plan.model.shape_search import DEFAULT_BANDWIDTH, choose_shape, shared_cores_step_s
from culm.plan.rent.fleet_decision import FleetLimits
from culm.plan.rent.link_costs import NodeLinks, links_of_instance
from culm.plan.rent.memory_model import WorkerMemory, explain_memory_misfit, worker_memories
from culm.plan.replan.planned_schedule import PLANNED
from culm.plan.reshape.run_schedule import ScheduledStep, choose_schedule
from culm.plan.reshape.segment_costs import activation_capacity, segment_costs, segment_layers
from culm.runtime.compute.batch_loading import evaluation_micro_batches
from culm.runtime.compute.deterministic import check_determinism, chooses_kernels
from culm.runtime.compute.device import fingerprint, select_device, usable_device_bytes
from culm.runtime.compute.layer_profiler import ProgressCallback, profile_layers
from culm.runtime.compute.model_check import ModelInfo, check_model
from culm.runtime.compute.profile_cache import cached_profile
from culm.schedule import PROFILED_SCHEDULES, Kind, Plan, forward_only
from culm.text_format import count_noun

if TYPE_CHECKING:
    from culm.job import Job
    from culm.strategies import Strategy

_SOLVER_S = 20.0
"""How long a solver improves the plan of a run in the background, by default."""


def prepare_run(
    job: Job,
    config: RunConfig,
    *,
    model_info: ModelInfo | None = None,
    gate: StepGate | None = None,
    measure: bool = True,
    progress: ProgressCallback = lambda *_: None,
) -> RunSetup:
    """Decide everything that can be decided before the first node starts. Raises UsageError if the job and the config
    do not fit together.

    `model_info`: the result of `inspect_layers` for these layers, if it is known already. `gate`: what a step waits
    for; default: the job's on_step hook, if it has one. `measure`: whether the schedules that depend on a profile may
    measure the layers; a simulation uses the estimate instead, so that it is the same each time.
    """
    _check_config(job, config)
    model_info = model_info or inspect_layers(job)
    profile = _layer_profile(job, config, model_info, progress, measure=measure)
    _check_profile(profile, model_info.profile)
    links = _links(config)
    pipelines, stages, cuts, why = _choose_shape(job, config, profile, links)
    if measure and profile is not model_info.profile and not config.is_shared:
        why += _explain_shared_cores(job, profile, pipelines, stages)
    _check_nodes_filled(pipelines, stages, config.node_workers)
    ranges = config.ranges if config.schedule == "interleaved" else 1
    schedule = choose_schedule(
        config.schedule,
        ScheduledStep(
            layers=profile.layers,
            cuts=cuts,
            pipelines=pipelines,
            stages=stages,
            micro_batches=job.micro_batches,
            ranges=ranges,
            may_use_two_ranges=config.ranges > 1 and config.cuts is None,
            memory=config.memory,
            max_activations=config.max_activations,
            synchronous=_has_synchronous_step(job),
            splits_backward=not job.compile,
            links=links,
        ),
    )
    _check_compiled(job, config, schedule.plan)
    plan, cuts = schedule.plan, schedule.cuts
    ranges = plan.segments // plan.stages
    why += f"; {schedule.why}" if schedule.why else ""
    manifest, rejected = _newest_manifest(config.resume) if config.resume else (None, ())
    facts = job_facts(job, model_info)
    if manifest is not None:
        _check_job_facts(manifest, facts)
        _check_tensor_names(manifest, model_info.tensor_names)
    inputs = StrategyInputs(plan, profile, cuts, _has_synchronous_step(job), job.steps, config.node_workers)
    resolved = resolve_strategy(config, inputs)
    why += f"; {resolved.why}"
    memories = _predict_memory(job, profile, cuts, plan, resolved.strategy)
    _check_memory(job, config, plan, memories, resolved.strategy)
    if job.exact and chooses_kernels(device := select_device(job)) and not config.is_shared:
        check_determinism(job, device)
    if isinstance(job.data, Stream) and not job.data.is_resumable:
        why += (
            "; Job.data has no state_dict: after a loss or a resume the stream is read again from its beginning, add "
            "state_dict and load_state_dict to it"
        )
    elif not isinstance(job.data, Stream) and len(job.data) < job.global_batch:
        why += f"; Job.data has {len(job.data)} items for a global_batch of {job.global_batch}: each step repeats items"
    why += "".join(f"; checkpoint {step} was passed over: {reason}" for step, reason in rejected)
    earlier = earlier_rentals(config.resume) if config.resume else ()
    _check_budget(config, earlier, pipelines * stages // config.node_workers)
    return RunSetup(
        nodes=pipelines * stages // config.node_workers,
        workers_per_node=config.node_workers,
        pipelines=pipelines,
        stages=stages,
        schedule=schedule.name,
        schedule_prediction=schedule.prediction,
        max_activations=config.max_activations,
        improve_plan=_solver_seconds(config, measure=measure) if schedule.name == PLANNED and not job.compile else 0.0,
        strategy=resolved.strategy.name,
        segments=tuple((r.start, r.stop) for r in segment_layer_ranges(cuts, len(job.layers))),
        plan=plan.to_text(),
        evaluation=_evaluation_plan(job, pipelines, stages, ranges),
        evaluation_parts=evaluation_micro_batches(job),
        weighted=model_info.weighted_loss,
        steps=job.steps,
        start=manifest.step if manifest is not None else 0,
        gate=gate or ("hook" if job.on_step is not None else "open"),
        checkpoint_every=resolved.checkpoint_every,
        checkpoint_interval_s=resolved.checkpoint_interval_s,
        keep_last=config.keep_last,
        storage_timeout=config.storage_timeout,
        out=config.out,
        resume=manifest.step if manifest is not None else None,
        resume_from=_checkpoint_folder(config.resume) if config.resume else None,
        earlier_evaluations=manifest.evaluation_values if manifest is not None else {},
        job_facts=facts,
        suspect_after=config.suspect_after,
        rejoin_within=config.rejoin_within,
        blocked_after=config.blocked_after,
        slow_factor=config.slow_factor,
        start_after=config.start_after if resolved.strategy.survives_losses else None,
        restart=config.restart,
        replace_within=config.suspect_after if config.replace_within is None else config.replace_within,
        eager_shadows=resolved.eager,
        has_event_hooks=any(getattr(job, field) is not None for field in HOOK_OF_KIND.values()),
        splits_backward=not job.compile,
        synchronous_step=_has_synchronous_step(job),
        costs=segment_costs(profile.layers, cuts),
        profile_is_measured=profile is not model_info.profile,
        activations=activation_capacity(config.memory, profile.layers, cuts, plan)
        if resolved.strategy.survives_losses
        else None,
        layer_inputs=model_info.layer_inputs if job.compile else (),
        layers=profile.layers,
        links=links,
        memory=config.memory,
        worker_memories=memories,
        reconfigure=config.reconfigure,
        kills=_resolve_kills(job, config, plan, manifest.step if manifest is not None else 0),
        encrypt=config.encrypt,
        reduce=_reduce_library(job, config),
        hook_timeout=config.hook_timeout,
        writers=config.writers,
        limits=run_limits(config),
        earlier_rentals=earlier,
        reason=why,
        config=dataclasses.replace(config, workers_per_node=config.node_workers).to_dict(),
    )


def _predict_memory(
    job: Job, profile: Profile, cuts: tuple[int, ...], plan: Plan, strategy: Strategy
) -> tuple[WorkerMemory, ...]:
    """What a worker of each stage needs, on its device and in host memory."""
    return tuple(
        worker_memories(
            segment_layers(profile.layers, cuts),
            len(plan.micros_of(0)),
            pipelines=plan.pipelines,
            strategy=strategy,
            on_accelerator=select_device(job).type != "cpu",
            stages=plan.stages,
            in_flight=peak_in_flight(plan),
            exact=job.exact,
            splits_backward=_splits_backward(plan),
        )
    )


def _check_memory(
    job: Job, config: RunConfig, plan: Plan, memories: Sequence[WorkerMemory], strategy: Strategy
) -> None:
    """Raise PlanError if a stage does not fit into --memory or, without it, into the GPUs of this machine. Local nodes
    share them: worker i of each node uses GPU i."""
    available, where = config.memory, "--memory"
    device = select_device(job)
    if available is None and device.type == "cuda" and not config.is_shared:
        available, where = usable_device_bytes(device), f"the GPU ({USABLE_MEMORY_SHARE:.0%} of its memory)"
        for number in range(config.node_workers):
            sharing = range(number, len(plan.workers), config.node_workers)
            if len(sharing) > 1 and sum(memories[slot % plan.stages].total for slot in sharing) > available:
                available, where = available // len(sharing), f"each of {len(sharing)} workers on a GPU"
                break
    if available is None:
        return
    misfit = explain_memory_misfit(memories, available, where=where, strategy=strategy.name, layers=len(job.layers))
    if misfit is not None:
        raise PlanError(misfit)


def _check_compiled(job: Job, config: RunConfig, plan: Plan) -> None:
    """Raise UsageError if a plan splits the backward of compiled layers."""
    if job.compile and _splits_backward(plan):
        raise UsageError(
            f"--schedule {config.schedule} splits the backward, and a compiled layer (Job.compile) has one fused "
            "backward: use --schedule 1f1b, gpipe, interleaved or planned"
        )


def _splits_backward(plan: Plan) -> bool:
    return any(action.kind is Kind.I for actions in plan.workers for action in actions)


def _reduce_library(job: Job, config: RunConfig) -> Literal["gloo", "nccl"]:
    """What sums gradients, as far as it is decided before the run: with NCCL the workers find out whether all of them
    can use it. Raises UsageError if none of them can."""
    may_have_gpus = job.device != "cpu" if config.is_shared else select_device(job).type == "cuda"
    if config.reduce == "nccl" and not may_have_gpus:
        raise UsageError("--reduce nccl sums on GPUs, and the workers compute on the CPU: use --reduce gloo or auto")
    return "nccl" if may_have_gpus and config.reduce != "gloo" and config.encrypt != "on" else "gloo"


def _solver_seconds(config: RunConfig, *, measure: bool) -> float:
    """How long a solver improves the plan: as configured, else the default where OR-Tools is installed. A simulation
    has no default: it runs the solver only if asked, because it waits for it."""
    if config.improve_plan is not None:
        return config.improve_plan
    return _SOLVER_S if measure and importlib.util.find_spec("ortools") is not None else 0.0


def _resolve_kills(job: Job, config: RunConfig, plan: Plan, start: int) -> tuple[str, ...]:
    kills = [KillNode.parse(kill) for kill in config.kills]
    moment: dict[str, int] = {"steps": job.steps, "start": start, "seed": job.seed}
    K = config.node_workers
    return tuple(kill.resolve_action(plan, **moment, workers_per_node=K).spec_text for kill in kills)


def _has_synchronous_step(job: Job) -> bool:
    return job.clip_norm is not None or job.nonfinite == "skip"


def inspect_layers(job: Job) -> ModelInfo:
    """Run the layers on fake tensors, without torch's log of errors. Raises JobError if they do not fit together."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return check_model(job)
    finally:
        log.setLevel(level)


def _check_config(job: Job, config: RunConfig) -> None:
    check_writers(config.writers, config.out)
    if config.cuts is not None:
        _check_cuts(job, config, config.cuts)
    if config.pipelines is not None and config.pipelines > job.micro_batches:
        raise UsageError(
            f"--pipelines {config.pipelines} is more than the {job.micro_batches} micro-batches of a step: "
            f"use at most {job.micro_batches}, or a smaller micro_batch"
        )


def _check_cuts(job: Job, config: RunConfig, cuts: tuple[int, ...]) -> None:
    segments = (config.stages or 1) * (config.ranges if config.schedule == "interleaved" else 1)
    rising = all(a < b for a, b in pairwise((0, *cuts, len(job.layers))))
    if len(cuts) != segments - 1 or not rising:
        raise UsageError(
            f"--cuts {','.join(map(str, cuts))} does not cut {len(job.layers)} layers into {segments} segments: "
            f"give {segments - 1} rising layer numbers between 1 and {len(job.layers) - 1}"
        )


def _layer_profile(
    job: Job, config: RunConfig, model_info: ModelInfo, progress: ProgressCallback, *, measure: bool
) -> Profile:
    """The profile of the config; measured if the shape or the schedule depends on it; else the estimate, which suffices
    for cuts."""
    if config.profile:
        return Profile.load(config.profile)
    if config.schedule in PROFILED_SCHEDULES and measure:
        return cached_profile(job, model_info.profile, progress)
    if config.nodes is not None and (config.pipelines is None or config.stages is None):
        return profile_layers(job, progress=progress)
    return model_info.profile


def _check_profile(profile: Profile, inspected: Profile) -> None:
    """Raise PlanError unless the profile describes the layers of the job."""
    if len(profile.layers) != len(inspected.layers):
        raise PlanError(
            f"the profile has {len(profile.layers)} layers, the job {len(inspected.layers)}: make a new one with "
            "culm profile"
        )
    for index, (given, mine) in enumerate(zip(profile.layers, inspected.layers, strict=True)):
        if (given.name, given.parameter_bytes) != (mine.name, mine.parameter_bytes):
            raise PlanError(
                f"layer {index} is {_layer_with_size(given)} in the profile and {_layer_with_size(mine)} in the job: "
                "make a new one with culm profile"
            )


def _layer_with_size(layer: LayerCost) -> str:
    return f"{layer.name} with {layer.parameter_bytes:,} bytes of parameters"


def _choose_shape(
    job: Job, config: RunConfig, profile: Profile, links: NodeLinks | None
) -> tuple[int, int, tuple[int, ...], str]:
    """(D, P, cuts, why): as configured, or chosen for the number of nodes."""
    ranges = config.ranges if config.schedule == "interleaved" else 1
    fixed = config.nodes is None or (config.pipelines is not None and config.stages is not None)
    pipelines, stages = (config.pipelines or 1, config.stages or 1) if fixed else (config.pipelines, config.stages)
    reason = f"{count_noun(pipelines or 1, 'pipeline')} x {count_noun(stages or 1, 'stage')}, as asked"
    K = config.node_workers
    if pipelines and stages and config.nodes is not None and pipelines * stages != config.nodes * K:
        workers = "" if K == 1 else f" x --workers-per-node {K}"
        raise UsageError(
            f"--nodes {config.nodes}{workers} is not --pipelines {pipelines} x --stages {stages}: leave one of them out"
        )
    if pipelines and stages and (config.cuts is not None or config.memory is None):
        return pipelines, stages, config.cuts or partition_layers(profile.layers, stages, ranges=ranges), reason
    choice = choose_shape(
        profile,
        nodes=config.nodes * K if config.nodes else (pipelines or 1) * (stages or 1),
        micro_batches=job.micro_batches,
        schedule="zb" if config.schedule in PROFILED_SCHEDULES else config.schedule,
        memory=config.memory,
        pipelines=pipelines,
        stages=stages,
        ranges=config.ranges,
        bandwidth=DEFAULT_BANDWIDTH if links is None else links.between_nodes,
    )
    return choice.pipelines, choice.stages, choice.cuts, reason if fixed else choice.why


def _links(config: RunConfig) -> NodeLinks | None:
    """The network of the instance that the config names; None: it names none, or one without known figures."""
    if config.instance is None:
        return None
    try:
        machine = load_catalogue().find(config.instance)
        return links_of_instance(machine.instance, machine.gpu, config.node_workers)
    except (UsageError, PlanError):  # an instance of the user's own, with a price
        return None


def _explain_shared_cores(job: Job, profile: Profile, pipelines: int, stages: int) -> str:
    """What the cores of this machine mean for a step, if its workers have to share them; predictions assume that every
    worker has its own."""
    if select_device(job).type != "cpu":
        return ""
    cores = len(os.sched_getaffinity(0))
    least_s = shared_cores_step_s(
        profile,
        pipelines=pipelines,
        stages=stages,
        threads=job.threads,
        micro_batches=job.micro_batches,
        cores=cores,
    )
    if least_s is None:
        return ""
    return f"; {pipelines * stages} workers share {cores} cores here, so a step takes at least {least_s:.3g} s"


def _check_nodes_filled(pipelines: int, stages: int, workers_per_node: int) -> None:
    """Raise UsageError if a node would have workers without a slot."""
    if pipelines * stages % workers_per_node:
        raise UsageError(
            f"--workers-per-node {workers_per_node} does not divide the {pipelines * stages} workers of {pipelines} x "
            f"{stages} (pipelines x stages): give --pipelines and --stages whose product is a multiple of it"
        )


def _evaluation_plan(job: Job, pipelines: int, stages: int, ranges: int) -> str | None:
    """The F-only plan over the evaluation set; with fewer micro-batches than pipelines the last pipelines are idle."""
    if not job.evaluate_every:
        return None
    parts = evaluation_micro_batches(job)
    plan = forward_only(pipelines=min(parts, pipelines), stages=stages, micro_batches=parts, ranges=ranges)
    return plan.to_text()


def _check_budget(config: RunConfig, earlier: Sequence[Rental], nodes: int) -> None:
    """Raise UsageError if the budget does not pay for the start of the run."""
    if config.budget is None:
        return
    spent = math.fsum(each.usd for each in earlier)
    terms = rental_terms(instance=config.instance, market=config.market, usd_h=config.node_price)
    if terms is None and not config.is_shared and not spent:
        raise UsageError("--budget needs the price of a node: add --price USD_PER_HOUR or --instance NAME")
    least = 0.0 if terms is None or config.is_shared else nodes * terms.usd_h * MINIMUM_S / 3600
    if spent + least >= config.budget:
        before = f"${spent:,.4g} were spent before the resume, and " if spent else ""
        raise UsageError(
            f"--budget {config.budget:g} is too low: {before}the shortest time that is billed for {nodes} nodes costs "
            f"${least:,.4g}; use more than {spent + least:.4g}"
        )


def run_limits(config: RunConfig) -> FleetLimits:
    """The limits that the config sets."""
    given = {"budget_usd": config.budget, "deadline_s": config.deadline, "max_price_usd_h": config.max_price}
    return FleetLimits(**{name: value for name, value in given.items() if value is not None})


def _checkpoint_folder(folder: str) -> str:
    return f"{folder.rstrip('/')}/checkpoints"


def _newest_manifest(folder: str) -> tuple[Manifest, tuple[tuple[int, str], ...]]:
    try:
        found = CheckpointCatalog(Storage(_checkpoint_folder(folder))).newest()
    except CheckpointError as error:
        raise UsageError(f"--resume {folder!r}: {error}{_run_folders_hint(folder)}") from None
    return found.manifest, found.rejected


def _run_folders_hint(folder: str) -> str:
    """If a local folder is the parent of run folders, or is inside of one: which to name instead, as a sentence."""
    path = local_path(folder)
    if path is None or (path / "checkpoints").is_dir():
        return ""
    inside = [each for each in (path, *path.parents[:2]) if each.name == "checkpoints"]
    found = [each.parent for each in inside] or [each.parent for each in path.glob("*/checkpoints") if each.is_dir()]
    newest = max(found, key=lambda each: (each / "checkpoints").stat().st_mtime, default=None)
    return "" if newest is None else f"; run folders have a folder 'checkpoints': the newest here is {newest}"


def job_facts(job: Job, model_info: ModelInfo) -> dict[str, str | int | float | bool | list[list[str]] | None]:
    """The fields of the job and the machine that decide the weights; every checkpoint contains them."""
    return {
        "layers": len(job.layers),
        "seed": job.seed,
        "global_batch": job.global_batch,
        "micro_batch": job.micro_batch,
        "exact": job.exact,
        "precision": job.precision,
        "fingerprint": fingerprint(job),
        "tied": sorted(sorted(group) for group in job.tied),
        "save_frozen": job.save_frozen,
        "optimizer": model_info.optimizer_classes,
    }


def _check_job_facts(manifest: Manifest, facts: dict[str, str | int | float | bool | list[list[str]] | None]) -> None:
    """Raise UsageError if a field differs that decides the weights: a resumed run must equal an uninterrupted one."""
    earlier = {"optimizer": facts["optimizer"]}  # missing in checkpoints of early versions
    for name in ("layers", "seed", "global_batch", "micro_batch", "exact", "precision", "tied", "optimizer"):
        if (earlier | manifest.facts).get(name) != facts[name]:
            raise UsageError(
                f"the checkpoint was made with {name}={manifest.facts.get(name)!r}, the job has {facts[name]!r}: "
                "resume with the same, or start a new run from its weights (culm export, then Job.init)"
            )
    if facts["exact"] and manifest.facts.get("fingerprint") != facts["fingerprint"]:
        raise UsageError(
            f"the exact checkpoint was made on {manifest.facts.get('fingerprint')}, this machine is "
            f"{facts['fingerprint']}: resume on the same kind, or with --set exact=false"
        )


def _check_tensor_names(manifest: Manifest, names: frozenset[str]) -> None:
    """Raise UsageError unless the checkpoint has exactly the tensors of the model."""
    saved = {name for name in manifest.weight_map if not name.startswith(OPTIMIZER_PREFIX)}
    missing, surplus = sorted(names - saved), sorted(saved - names)
    if missing or surplus:
        which = f"has no tensor {missing[0]!r}" if missing else f"has a tensor {surplus[0]!r}, which no layer has"
        raise UsageError(
            f"the checkpoint of step {manifest.step} {which}: it is from another model; resume with the same layers, "
            "or start a new run"
        )
