"""From a job and a request to the setup of a run: shape, cuts, plans, where to start. All that can be refused is."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import TYPE_CHECKING

from culm.checkpoint import Catalog, Manifest, Storage
from culm.checkpoint.export import OPTIMIZER
from culm.cluster.blows import Kill
from culm.cluster.setup import Request, Setup
from culm.cluster.strategy import Terms, settle
from culm.errors import CheckpointError, PlanError, UsageError
from culm.plan.choose import choose
from culm.plan.haste import hastened
from culm.plan.partition import count, partition, spans
from culm.plan.profile import LayerCost, Profile
from culm.plan.relayout import activations, segment_costs
from culm.runtime.blueprint import Blueprint, probe
from culm.runtime.data import evaluation_batches
from culm.runtime.fingerprint import fingerprint
from culm.runtime.measure import Told, measure
from culm.schedule import Plan, forward_only, generate

if TYPE_CHECKING:
    from culm.job import Job

__all__ = ["Request", "look", "prepare"]


def prepare(
    job: Job, request: Request, *, blueprint: Blueprint | None = None, progress: Told = lambda *_: None
) -> Setup:
    """Decide everything that can be decided before the first node comes. Raises UsageError in one sentence.

    `blueprint` is what `look` says of these layers, for who knows it already.
    """
    _check(job, request)
    blueprint = blueprint or look(job)
    profile = _profile(job, request, blueprint, progress)
    _check_profile(profile, blueprint.profile)
    pipelines, stages, cuts, why = _shape(job, request, profile)
    ranges = request.ranges if request.schedule == "interleaved" else 1
    schedule = generate(
        request.schedule, pipelines=pipelines, stages=stages, micro_batches=job.micro_batches, ranges=ranges
    )
    plan = hastened(schedule, profile.layers, cuts)
    if plan != schedule:
        why += "; gradients that others wait for go on before the weights are done (I, then W)"
    manifest, rejected = _newest(request.resume) if request.resume else (None, ())
    facts = _facts(job, blueprint)
    if manifest is not None:
        _check_facts(manifest, facts)
        _check_names(manifest, blueprint.names)
    settled = settle(request, Terms(plan, profile, cuts, _joint(job), job.steps))
    why += f"; {settled.why}"
    why += "".join(f"; checkpoint {step} was passed over: {reason}" for step, reason in rejected)
    return Setup(
        nodes=pipelines * stages,
        pipelines=pipelines,
        stages=stages,
        schedule=request.schedule,
        strategy=settled.strategy,
        segments=tuple((r.start, r.stop) for r in spans(cuts, len(job.layers))),
        plan=plan.to_text(),
        evaluation=_evaluation(job, pipelines, stages, ranges),
        evaluation_parts=evaluation_batches(job),
        weighted=blueprint.weighted,
        steps=job.steps,
        start=manifest.step if manifest is not None else 0,
        gate=request.gate or ("hook" if job.on_step is not None else "open"),
        checkpoint_every=settled.checkpoint_every,
        keep_last=request.keep_last,
        out=request.out,
        resume=manifest.step if manifest is not None else None,
        resume_from=_checkpoints(request.resume) if request.resume else None,
        facts=facts,
        suspect_after=request.suspect_after,
        restart=request.restart,
        replace_within=request.suspect_after if request.replace_within is None else request.replace_within,
        eager=settled.eager,
        joint=_joint(job),
        costs=segment_costs(profile.layers, cuts),
        activations=activations(request.memory, profile.layers, cuts, plan) if settled.strategy != "none" else None,
        layers=profile.layers,
        memory=request.memory,
        reconfigure=request.reconfigure,
        kills=_kills(job, request, plan, manifest.step if manifest is not None else 0),
        why=why,
    )


def _kills(job: Job, request: Request, plan: Plan, start: int) -> tuple[str, ...]:
    kills = [Kill.parse(kill) for kill in request.kills]
    return tuple(kill.settled(plan, steps=job.steps, start=start, seed=job.seed).text for kill in kills)


def _joint(job: Job) -> bool:
    return job.clip_norm is not None or job.nonfinite == "skip"


def look(job: Job) -> Blueprint:
    """Try the layers out. What fits nowhere is refused in one sentence; torch would log a trace of it beforehand."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return probe(job)
    finally:
        log.setLevel(level)


def _check(job: Job, request: Request) -> None:
    if request.cuts is not None:
        _check_cuts(job, request, request.cuts)
    if request.pipelines is not None and request.pipelines > job.micro_batches:
        raise UsageError(
            f"--pipelines {request.pipelines} is more than the {job.micro_batches} micro-batches of a step: "
            f"use at most {job.micro_batches}, or a smaller micro_batch"
        )


def _check_cuts(job: Job, request: Request, cuts: tuple[int, ...]) -> None:
    segments = (request.stages or 1) * (request.ranges if request.schedule == "interleaved" else 1)
    rising = all(a < b for a, b in pairwise((0, *cuts, len(job.layers))))
    if len(cuts) != segments - 1 or not rising:
        raise UsageError(
            f"--cuts {','.join(map(str, cuts))} does not cut {len(job.layers)} layers into {segments} segments: "
            f"give {segments - 1} rising layer numbers between 1 and {len(job.layers) - 1}"
        )


def _profile(job: Job, request: Request, blueprint: Blueprint, progress: Told) -> Profile:
    """The given one; a measured one where the shape is to be chosen; else the estimate, which is enough to cut by."""
    if request.profile:
        return Profile.load(request.profile)
    if request.nodes is not None and (request.pipelines is None or request.stages is None):
        return measure(job, progress=progress)
    return blueprint.profile


def _check_profile(profile: Profile, seen: Profile) -> None:
    """A profile must be of the job's own layers, as they were seen here."""
    if len(profile.layers) != len(seen.layers):
        raise PlanError(
            f"the profile has {len(profile.layers)} layers, the job {len(seen.layers)}: make a new one with "
            "culm profile"
        )
    for index, (given, mine) in enumerate(zip(profile.layers, seen.layers, strict=True)):
        if (given.name, given.parameter_bytes) != (mine.name, mine.parameter_bytes):
            raise PlanError(
                f"layer {index} is {_sized(given)} in the profile and {_sized(mine)} in the job: make a new one with "
                "culm profile"
            )


def _sized(layer: LayerCost) -> str:
    return f"{layer.name} with {layer.parameter_bytes:,} bytes of parameters"


def _shape(job: Job, request: Request, profile: Profile) -> tuple[int, int, tuple[int, ...], str]:
    """(D, P, cuts, why): as asked, or chosen for the number of nodes."""
    ranges = request.ranges if request.schedule == "interleaved" else 1
    fixed = request.nodes is None or (request.pipelines is not None and request.stages is not None)
    pipelines, stages = (request.pipelines or 1, request.stages or 1) if fixed else (request.pipelines, request.stages)
    asked = f"{count(pipelines or 1, 'pipeline')} x {count(stages or 1, 'stage')}, as asked"
    if pipelines and stages and request.nodes is not None and pipelines * stages != request.nodes:
        raise UsageError(
            f"--nodes {request.nodes} is not --pipelines {pipelines} x --stages {stages}: leave one of them out"
        )
    if pipelines and stages and (request.cuts is not None or request.memory is None):
        return pipelines, stages, request.cuts or partition(profile.layers, stages, ranges=ranges), asked
    choice = choose(
        profile,
        nodes=request.nodes or (pipelines or 1) * (stages or 1),
        micro_batches=job.micro_batches,
        schedule=request.schedule,
        memory=request.memory,
        pipelines=pipelines,
        stages=stages,
        ranges=request.ranges,
    )
    return choice.pipelines, choice.stages, choice.cuts, asked if fixed else choice.why


def _evaluation(job: Job, pipelines: int, stages: int, ranges: int) -> str | None:
    """The F-only plan over the evaluation set; with fewer micro-batches than pipelines the last ones sit it out."""
    if not job.evaluate_every:
        return None
    parts = evaluation_batches(job)
    plan = forward_only(pipelines=min(parts, pipelines), stages=stages, micro_batches=parts, ranges=ranges)
    return plan.to_text()


def _checkpoints(folder: str) -> str:
    return f"{folder.rstrip('/')}/checkpoints"


def _newest(folder: str) -> tuple[Manifest, tuple[tuple[int, str], ...]]:
    try:
        found = Catalog(Storage(_checkpoints(folder))).newest()
    except CheckpointError as error:
        raise UsageError(f"--resume {folder!r}: {error}") from None
    return found.manifest, found.rejected


def _facts(job: Job, blueprint: Blueprint) -> dict[str, str | int | float | bool | list[list[str]] | None]:
    return {
        "layers": len(job.layers),
        "seed": job.seed,
        "global_batch": job.global_batch,
        "micro_batch": job.micro_batch,
        "exact": job.exact,
        "precision": job.precision,
        "fingerprint": fingerprint(job),
        "tied": sorted(sorted(group) for group in job.tied),
        "optimizer": blueprint.optimizers,
    }


def _check_facts(manifest: Manifest, facts: dict[str, str | int | float | bool | list[list[str]] | None]) -> None:
    """A resumed run learns what the uninterrupted one would have: what decides that must be the same."""
    earlier = {"optimizer": facts["optimizer"]}  # checkpoints of an early culm do not tell
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


def _check_names(manifest: Manifest, names: frozenset[str]) -> None:
    """A half-loaded model is a trap."""
    saved = {name for name in manifest.weight_map if not name.startswith(OPTIMIZER)}
    missing, surplus = sorted(names - saved), sorted(saved - names)
    if missing or surplus:
        which = f"has no tensor {missing[0]!r}" if missing else f"has a tensor {surplus[0]!r}, which no layer has"
        raise UsageError(
            f"the checkpoint of step {manifest.step} {which}: it is from another model; resume with the same layers, "
            "or start a new run"
        )
