"""The phases of a run as its leader sees them, and the legal transitions between them. Pure."""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from culm.errors import RunError


class Phase(StrEnum):
    """What the leader waits for."""

    STARTING = "starting"
    """This node has just become the leader and has not read the store yet."""
    WAITING = "waiting for nodes"
    BUILDING = "building"
    """Members build or receive their layers."""
    TRAINING = "training"
    RECOVERING = "recovering"
    """Members complete the steps that were open at a loss."""
    HALTING = "halting"
    """Members leave the epoch and report what they hold."""
    REPLACING = "waiting for replacements"
    DECIDING = "deciding"
    """All have reported, and the next epoch is planned."""
    FINISHING = "finishing"
    """All steps are committed; the last reports, checkpoints and lines are awaited."""
    ENDED = "ended"


_EPOCH = {Phase.BUILDING, Phase.TRAINING, Phase.RECOVERING, Phase.FINISHING}
_HALT = {Phase.HALTING, Phase.REPLACING, Phase.DECIDING}
TRANSITIONS: dict[Phase, set[Phase]] = {
    Phase.STARTING: {Phase.WAITING, Phase.ENDED} | _EPOCH | _HALT,
    Phase.WAITING: {Phase.BUILDING, Phase.FINISHING, Phase.ENDED},
    Phase.BUILDING: {Phase.TRAINING, Phase.RECOVERING, Phase.FINISHING, Phase.ENDED} | _HALT,
    Phase.TRAINING: {Phase.FINISHING, Phase.BUILDING, Phase.ENDED} | _HALT,
    Phase.RECOVERING: {Phase.TRAINING, Phase.BUILDING, Phase.FINISHING, Phase.ENDED} | _HALT,
    Phase.HALTING: {Phase.REPLACING, Phase.DECIDING, Phase.ENDED} | _EPOCH,
    Phase.REPLACING: {Phase.HALTING, Phase.DECIDING, Phase.ENDED} | _EPOCH,
    Phase.DECIDING: {Phase.HALTING, Phase.REPLACING, Phase.ENDED} | _EPOCH,
    Phase.FINISHING: {Phase.BUILDING, Phase.ENDED} | _HALT,
    Phase.ENDED: set(),
}
"""The phases that may follow each phase. A halt of several nodes may pass through a phase within one event."""


class InvalidTransition(RunError):
    """The leader has moved between two phases that do not follow each other."""

    def __init__(self, before: Phase, after: Phase, history: deque[str]) -> None:
        super().__init__(f"the leader went from {before} to {after}; the last events were {', '.join(history)}")


class PhaseHistory:
    """The current phase and the last events."""

    def __init__(self) -> None:
        self.current = Phase.STARTING
        self._events: deque[str] = deque(maxlen=12)

    def record(self, event: str, phase: Phase) -> None:
        """Record the phase after an event. Raises InvalidTransition if it cannot follow the one before."""
        self._events.append(f"{event} ({phase})")
        if phase is not self.current and phase not in TRANSITIONS[self.current]:
            raise InvalidTransition(self.current, phase, self._events)
        self.current = phase
