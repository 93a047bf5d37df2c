"""Learning rates as functions of the step: a user's function, or one of torch's schedulers.

A scheduler object has state and one optimizer; every layer has its own optimizer and may move to another worker. So a
scheduler is run on a stand-in with the same parameter groups, from step 0 on, and the settings of each step (learning
rate, and momentum where the scheduler changes it) are read from there. The result is that of the scheduler in a plain
loop, and depends on the step only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from culm.errors import CulmError, JobError, LayerFailed, message_suffix
from culm.runtime.compute.user_errors import ASYNC_USER_EXCEPTIONS

if TYPE_CHECKING:
    from culm.job import Job

GroupSettings: TypeAlias = dict[str, Any]
"""A parameter group of an optimizer without its parameters."""


class LearningRates:
    """The settings of parameter groups in each step, as a job's schedule says."""

    def __init__(self, job: Job) -> None:
        self._schedule: Callable[[Any], Any] | None = job.lr_schedule
        self._is_scheduler: bool | None = None if job.lr_schedule is not None else False
        self._runs: list[_SchedulerRun] = []

    def settings_at(self, step: int, optimizer: Optimizer, base: Sequence[GroupSettings]) -> list[GroupSettings]:
        """What changes in each group of an optimizer for a step. `base`: the settings that its factory gave them.

        Raises LayerFailed if the schedule fails or does not return a number.
        """
        if self._schedule is None:
            return [{"lr": group["lr"]} if group.get("lr") is not None else {} for group in base]
        if self._uses_scheduler(optimizer, base):
            return self._run_of(optimizer, base).settings_at(step)
        factor = self._factor(step)
        return [{"lr": group["lr"] * factor} if group.get("lr") is not None else {} for group in base]

    def _uses_scheduler(self, optimizer: Optimizer, base: Sequence[GroupSettings]) -> bool:
        """Decided by calling the schedule with an optimizer: a function of the step fails, or returns no scheduler."""
        if self._is_scheduler is None:
            assert self._schedule is not None
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    scheduler = self._schedule(_StandIn(optimizer, base))
            except ASYNC_USER_EXCEPTIONS:  # a function of the step: with a step it raises what is really wrong
                self._is_scheduler = _fails_with_a_step(self._schedule)
            else:
                _check_scheduler(scheduler)
                self._is_scheduler = isinstance(scheduler, LRScheduler)
        return self._is_scheduler

    def _run_of(self, optimizer: Optimizer, base: Sequence[GroupSettings]) -> _SchedulerRun:
        """Layers with equal settings share a run."""
        for run in self._runs:
            if run.fits(type(optimizer), base):
                return run
        assert self._schedule is not None
        self._runs.append(_SchedulerRun(self._schedule, optimizer, base))
        return self._runs[-1]

    def _factor(self, step: int) -> float:
        assert self._schedule is not None
        try:
            factor = float(self._schedule(step))
        except ASYNC_USER_EXCEPTIONS as error:
            raise _schedule_failed(error, step) from error
        if not math.isfinite(factor):
            raise LayerFailed(f"Job.lr_schedule is {factor} for step {step}: return a finite factor")
        return factor


def _fails_with_a_step(schedule: Callable[[Any], Any]) -> bool:
    """Whether a schedule that failed with an optimizer also fails with a step number because it wants an optimizer: a
    scheduler's constructor, which then raises TypeError. The error with the optimizer is the one to report."""
    try:
        schedule(0)
    except TypeError as error:
        return "is not an Optimizer" in str(error)
    except ASYNC_USER_EXCEPTIONS:
        return False
    return False


def _check_scheduler(made: object) -> None:
    if isinstance(made, ReduceLROnPlateau):
        raise JobError(
            "Job.lr_schedule makes a ReduceLROnPlateau, which depends on past losses and not on the step alone: use a "
            "schedule that is a function of the step, such as CosineAnnealingLR"
        )


def _schedule_failed(error: BaseException, step: int) -> LayerFailed:
    return LayerFailed(f"Job.lr_schedule raised {type(error).__name__} for step {step}{message_suffix(error)}")


class _StandIn(Optimizer):
    """An optimizer with the settings of another one and nothing to train."""

    def __init__(self, optimizer: Optimizer, base: Sequence[GroupSettings]) -> None:
        groups = [{**copied(group), "params": [torch.zeros(())]} for group in base]
        super().__init__(groups, optimizer.defaults)

    def step(self, closure: Any = None) -> Any:
        """Schedulers warn unless it is called before them."""


class _SchedulerRun:
    """One scheduler on a stand-in, and the settings that it gave each step so far."""

    def __init__(self, schedule: Callable[[Any], Any], optimizer: Optimizer, base: Sequence[GroupSettings]) -> None:
        self._kind, self._base = type(optimizer), [copied(group) for group in base]
        self._stand_in = _StandIn(optimizer, base)
        self._settings: list[list[GroupSettings]] = []
        self._scheduled = set(_SCHEDULED)
        """Settings that this scheduler may change. Others are left alone: some optimizers keep their state there."""
        try:
            self._scheduler = schedule(self._stand_in)
        except CulmError:
            raise
        except ASYNC_USER_EXCEPTIONS as error:
            raise _schedule_failed(error, 0) from error
        _check_scheduler(self._scheduler)
        self._record()

    def fits(self, kind: type[Optimizer], base: Sequence[GroupSettings]) -> bool:
        return kind is self._kind and self._base == list(base)

    def settings_at(self, step: int) -> list[GroupSettings]:
        while len(self._settings) <= step:
            try:
                self._stand_in.step()
                self._scheduler.step()
            except ASYNC_USER_EXCEPTIONS as error:
                raise _schedule_failed(error, len(self._settings)) from error
            self._record()
        return [
            copied({name: value for name, value in group.items() if name in self._scheduled})
            for group in self._settings[step]
        ]

    def _record(self) -> None:
        pairs = list(zip(self._stand_in.param_groups, self._base, strict=True))
        self._scheduled.update(name for group, base in pairs for name in base if _differ(group[name], base[name]))
        self._settings.append([copied({name: group[name] for name in base}) for group, base in pairs])


_SCHEDULED = ("lr", "momentum", "betas")
"""Settings that schedulers of torch change."""


def _differ(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    return one is not other and bool(one != other)


def copied(settings: Mapping[str, Any]) -> GroupSettings:
    """The same settings. A learning rate that is a tensor is copied: schedulers write into it."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in settings.items()}
