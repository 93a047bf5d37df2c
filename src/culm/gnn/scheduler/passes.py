"""Passes over the graph and their tasks. Pure.

`epoch` counts training epochs; a pass is one training epoch or one evaluation after it.
"""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """One pass over the graph."""

    number: int
    epoch: int
    train: bool

    @property
    def newest_version(self) -> int:
        """The newest version of the weights that can exist when the pass starts."""
        return self.epoch if self.train else self.epoch + 1

    def updates_behind(self, version: int) -> int:
        """Return the number of updates between a version and the one that this pass's gradients are applied to. It
        is 0 for an evaluation, which reads the newest version."""
        return self.newest_version - version


def list_passes(epochs: int, evaluate_every: int) -> tuple[Pass, ...]:
    """Return all passes of a run: every training epoch, and an evaluation after every `evaluate_every` epochs and
    after the last."""
    passes: list[Pass] = []
    for epoch in range(epochs):
        passes.append(Pass(len(passes), epoch, True))
        if (epoch + 1) % evaluate_every == 0 or epoch + 1 == epochs:
            passes.append(Pass(len(passes), epoch, False))
    return tuple(passes)


class IntervalTask(NamedTuple):
    """One step of one interval in one pass. Its result counts once."""

    pass_number: int
    step_index: int
    interval: int
