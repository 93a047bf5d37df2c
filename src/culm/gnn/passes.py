"""What a run walks through: passes over the graph, and the tasks of a pass. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """One walk over the graph."""

    number: int
    epoch: int
    train: bool

    @property
    def version(self) -> int:
        """The newest version of the weights that can exist when it starts."""
        return self.epoch if self.train else self.epoch + 1

    def behind(self, version: int) -> int:
        """Updates between a version and the one that the gradients of this pass meet; an evaluation reads the last."""
        return self.version - version


def passes(epochs: int, evaluate_every: int) -> tuple[Pass, ...]:
    """All passes of a run: every epoch, an evaluation after every so many and after the last."""
    found: list[Pass] = []
    for epoch in range(epochs):
        found.append(Pass(len(found), epoch, True))
        if (epoch + 1) % evaluate_every == 0 or epoch + 1 == epochs:
            found.append(Pass(len(found), epoch, False))
    return tuple(found)


class Task(NamedTuple):
    """One step of one interval in one pass: the key under which it counts, once."""

    number: int
    at: int
    interval: int
