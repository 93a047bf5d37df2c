"""Verification: what was found when the steps of a run were retrained. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from culm.text_format import count_noun
from culm.verification.recorded_run import CheckpointRange

ProgressCallback: TypeAlias = Callable[[str, int, int], None]
"""Called with a text, the steps done and all steps."""


@dataclass(frozen=True)
class Difference:
    """The first difference between the run and its retraining."""

    step: int
    """Completed steps of the checkpoint that differs: the cause is in the steps since `after`."""
    layer: int | None
    """None: the checkpoint is equal, but the digest in summary.json is not."""
    what: str
    """weights, buffers, optimizer, the key of summary.json, or file: a file is damaged, and its tensors cannot be
    read."""
    tensor: str | None
    """The first tensor of the layer that differs."""
    after: int
    """Completed steps of the last state that was equal, or of the start."""
    loss_step: int | None
    """The first step since the start whose loss differs from steps.jsonl; None: all losses are equal."""


@dataclass(frozen=True)
class Verification:
    """The result of `culm.verify`. str() says it in a sentence."""

    steps: CheckpointRange
    layers: int
    checkpoints: tuple[int, ...]
    """The checkpoints that were compared and are equal."""
    difference: Difference | None
    damage: str | None = None
    """If the checkpoint that differs does not have the bytes that were written: which of its files, as a sentence."""

    @property
    def equal(self) -> bool:
        """Whether everything that was compared is the same bits."""
        return self.difference is None

    @property
    def proven_steps(self) -> int:
        """Steps that were retrained to the same bits."""
        return (self.checkpoints[-1] if self.checkpoints else self.steps.first) - self.steps.first

    def to_fields(self) -> dict[str, Any]:
        """The JSON of `culm verify --json`."""
        return {
            "equal": self.difference is None,
            "steps": self.proven_steps,
            "first_difference": None if self.difference is None else asdict(self.difference),
            "range": list(self.steps),
            "checkpoints": list(self.checkpoints),
            "damage": self.damage,
        }

    def __str__(self) -> str:
        if self.difference is None:
            return (
                f"equal: {count_noun(self.proven_steps, 'step')} retrained ({self.steps}), weights and optimizer state "
                f"of {count_noun(self.layers, 'layer')} are the same bits"
            )
        at = self.difference
        damage = "" if self.damage is None else f"; {self.damage}"
        if at.what == "file":
            return f"different: the checkpoint of step {at.step} cannot be compared{damage}"
        if at.layer is None:
            place = f"the digest of step {at.step}, whose checkpoint is equal"
            return f"different: {at.what} in summary.json is not {place}"
        loss = "all losses are equal" if at.loss_step is None else f"the loss first differs in step {at.loss_step}"
        proven = f"{self.steps.first}:{at.after} is equal, " if at.after > self.steps.first else ""
        return (
            f"different: layer {at.layer}, {at.what} ({at.tensor}), in steps {at.after}:{at.step}; "
            f"{proven}{loss}{damage}"
        )
