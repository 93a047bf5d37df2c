"""Cost of each layer: time, memory and bytes to send. This is all that the planner knows about a model.

A profile is a JSON file, so that a model measured on one machine can be planned on another.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from culm.errors import PlanError

VERSION = 1

Source = Literal["measured", "estimated"]


class LayerCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of one layer, per micro-batch where that applies. Times in seconds, memory in bytes.

    Raises PlanError when a number is negative or not finite.
    """

    name: str
    forward_s: float
    """F: the forward."""
    input_s: float
    """I: the half of the backward that computes the gradient of the input."""
    weight_s: float
    """W: the half that computes the gradients of the parameters."""
    parameter_bytes: int
    state_bytes: int
    """Gradients and optimizer state."""
    activation_bytes: int
    """Kept from F until W, for each micro-batch in flight."""
    output_bytes: int
    """Bytes sent to the next stage if the model is cut after this layer; the gradient comes back with as many."""
    deferred_bytes: int = 0
    """Kept from I until W beside them where the backward is split: gradients that W needs."""
    buffer_bytes: int = 0
    largest_parameter_bytes: int = 0
    """Bytes of the largest parameter; 0: not known."""
    step_s: float = 0.0
    """S: the optimizer step, once per step."""
    halving_s: float | None = None
    """Extra time of I and W run separately, compared with B; None: not measured."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__[1:]:
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise PlanError(f"layer {self.name!r}: {field} is {value!r}: use a finite number of at least 0")

    @property
    def time_s(self) -> float:
        """Work of one micro-batch: F + I + W."""
        return self.forward_s + self.input_s + self.weight_s

    @property
    def resident_bytes(self) -> int:
        """Bytes that a holder of the layer always keeps."""
        return self.parameter_bytes + self.state_bytes + self.buffer_bytes


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layers of a model in order, and the conditions of the measurement."""

    layers: tuple[LayerCost, ...]
    device: str
    """Free text, for example "cpu: AMD EPYC 7B13"."""
    micro_batch: int
    threads: int
    source: Source
    version: int = VERSION

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("Profile.layers is empty: a model has at least one layer")
        for field in ("micro_batch", "threads"):
            if getattr(self, field) < 1:
                raise PlanError(f"Profile.{field} is {getattr(self, field)}: use a whole number of at least 1")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile. Raises PlanError if the file is missing, invalid or of another version."""
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise PlanError(f"the profile {str(path)!r} could not be read: {error.strerror}") from error
        try:
            decoded = msgspec.json.decode(raw)
            _check_version(decoded)
            return msgspec.convert(decoded, cls)
        except (msgspec.DecodeError, UnicodeDecodeError, PlanError) as error:
            raise PlanError(f"{str(path)!r} is not a profile: {error}; write a new one with 'culm profile'") from error

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, atomically. Raises PlanError if the path cannot be written."""
        target = Path(path)
        part = target.with_name(f"{target.name}.part")
        try:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
            part.replace(target)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise PlanError(f"the profile could not be written to {str(path)!r}: {error.strerror}") from error


def _check_version(decoded: Any) -> None:
    version = decoded.get("version") if isinstance(decoded, dict) else None
    if version != VERSION:
        raise PlanError(f"its version is {version!r}, but this culm reads version {VERSION}")
