"""What is known of a job: it is found out once in each process of the tests, however many runs are made of the job."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import msgspec

from culm.cluster.prepare import Request, look, prepare
from culm.cluster.setup import Setup
from culm.job import Job
from culm.plan.haste import hastened
from culm.runtime.blueprint import Blueprint
from culm.schedule import Plan
from culm.testing import Faults, Simulated, Trained, reference
from culm.testing.survive import LATENCY_S, Cost, endure


@dataclass(frozen=True)
class _Known:
    job: Job

    @functools.cached_property
    def truth(self) -> Trained:
        return reference(self.job)

    @functools.cached_property
    def blueprint(self) -> Blueprint:
        return look(self.job)


_KNOWN: dict[int, _Known] = {}
"""By the id of a job, which lives as long: jobs have no hash."""


def _known(job: Job) -> _Known:
    return _KNOWN.setdefault(id(job), _Known(job))


def truth(job: Job) -> Trained:
    """What one process learns."""
    return _known(job).truth


def ready(job: Job, *, like: Job | None = None, **request: Any) -> Setup:
    """A run as it is asked for; `like` is a job with the same layers, which may be known already."""
    return prepare(job, Request(**request), blueprint=_known(like or job).blueprint)


def hasty(setup: Setup) -> Setup:
    """The same run where halves of a backward cost nothing, as with layers larger than those of tests."""
    layers = tuple(msgspec.structs.replace(layer, weight_s=1.0, halving_s=0.0) for layer in setup.layers)
    cuts = tuple(first for first, _ in setup.segments[1:])
    plan = hastened(Plan.from_text(setup.plan), layers, cuts).to_text()
    assert plan != setup.plan
    return msgspec.structs.replace(setup, layers=layers, plan=plan)


def hurt(
    job: Job, faults: Faults, *, cost: Cost | None = None, latency: float = LATENCY_S, **request: Any
) -> Simulated:
    """A run that all these faults struck, and that learned what one process does."""
    run = endure(job, ready(job, **request), faults, 0, truth(job), cost=cost, latency=latency)
    assert not run.missed(faults), run.history
    return run
