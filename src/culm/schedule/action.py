"""One piece of work of a training step, and how it is written: 2F0, 1I3, 1W3, 1B3, 1R, 1S."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from culm.errors import ScheduleError


class Kind(StrEnum):
    """What an action does. F, I, W and B are for one micro-batch; R and S are for a whole segment."""

    F = "F"
    """Forward."""
    I = "I"
    """Backward, the half that the segment before waits for: the gradient of the input."""
    W = "W"
    """Backward, the half that nobody waits for: the gradient of the weights. It frees the activation."""
    B = "B"
    """Both halves in one go."""
    R = "R"
    """Reduce: sum the segment's gradient over all its holders."""
    S = "S"
    """Optimizer step of the segment."""


# The names that torch.distributed.pipelining gives to the same kinds.
_LONG = {
    "FORWARD": Kind.F,
    "BACKWARD_INPUT": Kind.I,
    "BACKWARD_WEIGHT": Kind.W,
    "FULL_BACKWARD": Kind.B,
    "REDUCE_GRAD": Kind.R,
}
_KINDS = {**{str(kind): kind for kind in Kind}, **_LONG}
_PATTERN = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{1,9})?")
_DERIVED = re.compile(r"[0-9]+(SEND|RECV|UNSHARD|RESHARD)")


class Action(NamedTuple):
    """`kind` of segment `segment` for micro-batch `micro` (None for R and S). Who runs it is the plan's business."""

    segment: int
    kind: Kind
    micro: int | None = None

    def __str__(self) -> str:
        return f"{self.segment}{self.kind}" if self.micro is None else f"{self.segment}{self.kind}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `text` writes; torch's long spellings (0REDUCE_GRAD) are read too."""
        match = _PATTERN.fullmatch(text)
        kind = _KINDS.get(match[2]) if match else None
        if match is None or kind is None:
            raise ScheduleError(_unreadable(text))
        micro = None if match[3] is None else int(match[3])
        if (micro is None) != (kind in WHOLE):
            raise ScheduleError(_miscounted(text, kind, match[1]))
        return cls(int(match[1]), kind, micro)


WHOLE = frozenset((Kind.R, Kind.S))
"""Kinds that belong to a segment as a whole and so carry no micro-batch."""
BACKWARD = frozenset((Kind.I, Kind.B))
"""Kinds that make the gradient of the segment's input."""
RELEASE = frozenset((Kind.W, Kind.B))
"""Kinds that add to the gradient of the weights, and let go of the activation."""


def _unreadable(text: str) -> str:
    if _DERIVED.match(text):
        return f"{text!r} is communication, which culm derives from the plan: use the compute-only schedule"
    return f"{text!r} is not an action: write segment, kind and micro-batch as in 2F0 (kinds F, I, W, B), or 1R, 1S"


def _miscounted(text: str, kind: Kind, segment: str) -> str:
    if kind in WHOLE:
        return f"{text!r} has a micro-batch, but {kind} is for a whole segment: write {segment}{kind}"
    return f"{text!r} has no micro-batch: write {segment}{kind}0 for the first one"
