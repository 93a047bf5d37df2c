"""One unit of work of a training step, and its text form: 2F0, 1I3, 1W3, 1B3, 1R, 1S."""

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
    """Backward, first half: the gradient of the input, which the previous segment waits for."""
    W = "W"
    """Backward, second half: the gradient of the weights, which no other segment waits for. Frees the activation."""
    B = "B"
    """Both halves of the backward in one action."""
    R = "R"
    """Reduce: sum the segment's gradient over all its holders."""
    S = "S"
    """Optimizer step of the segment."""


# The names of the same kinds in torch.distributed.pipelining.
_TORCH_KINDS = {
    "FORWARD": Kind.F,
    "BACKWARD_INPUT": Kind.I,
    "BACKWARD_WEIGHT": Kind.W,
    "FULL_BACKWARD": Kind.B,
    "REDUCE_GRAD": Kind.R,
}
_KINDS = {**{str(kind): kind for kind in Kind}, **_TORCH_KINDS}
_PATTERN = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{1,9})?")
_COMMUNICATION = re.compile(r"[0-9]+(SEND|RECV|UNSHARD|RESHARD)")


class Action(NamedTuple):
    """`kind` of segment `segment` for micro-batch `micro` (None for R and S). The plan assigns it to a worker."""

    segment: int
    kind: Kind
    micro: int | None = None

    def __str__(self) -> str:
        return f"{self.segment}{self.kind}" if self.micro is None else f"{self.segment}{self.kind}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse `text` into an action. Also reads torch's long spellings (0REDUCE_GRAD). Raises ScheduleError."""
        match = _PATTERN.fullmatch(text)
        kind = _KINDS.get(match[2]) if match else None
        if match is None or kind is None:
            raise ScheduleError(_explain_unreadable(text))
        micro = None if match[3] is None else int(match[3])
        if (micro is None) != (kind in SEGMENT_KINDS):
            raise ScheduleError(_explain_micro_batch(text, kind, match[1]))
        return cls(int(match[1]), kind, micro)


SEGMENT_KINDS = frozenset((Kind.R, Kind.S))
"""Kinds that apply to a whole segment and have no micro-batch."""
INPUT_GRAD_KINDS = frozenset((Kind.I, Kind.B))
"""Kinds that compute the gradient of the segment's input."""
WEIGHT_GRAD_KINDS = frozenset((Kind.W, Kind.B))
"""Kinds that add to the gradient of the weights and free the activation."""


def _explain_unreadable(text: str) -> str:
    if _COMMUNICATION.match(text):
        return f"{text!r} is communication, which culm derives from the plan: use the compute-only schedule"
    return f"{text!r} is not an action: write segment, kind and micro-batch as in 2F0 (kinds F, I, W, B), or 1R, 1S"


def _explain_micro_batch(text: str, kind: Kind, segment: str) -> str:
    if kind in SEGMENT_KINDS:
        return f"{text!r} has a micro-batch, but {kind} is for a whole segment: write {segment}{kind}"
    return f"{text!r} has no micro-batch: write {segment}{kind}0 for the first one"
