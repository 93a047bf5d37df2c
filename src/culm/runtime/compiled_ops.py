"""A worker's list of actions with senders and receivers resolved. Compiled once per epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.plan.recover.recovery_plan import produced_tensor, required_tensor
from culm.schedule import Action, Kind, Plan, derive_transfers

if TYPE_CHECKING:
    from culm.runtime.compute.segment import Segment
    from culm.runtime.epoch import Epoch


@dataclass(slots=True)
class CompiledOp:
    """An action with its input and output resolved to frames, addresses and local values."""

    action: Action
    segment: Segment
    label: str
    output_name: str | None
    """Name of its output: 2F0, or 1I3 for an input gradient, whether I or B computes it. None: it has no output."""
    input_frame: str | None
    """Name of the frame that it waits for. None: its input is local, or comes from the data set."""
    local_input: str | None
    """Name of its input where that is on this worker: an earlier action computed it, or it was kept."""
    target_addresses: tuple[str, ...]
    """Addresses that its output is sent to."""
    keep_local: bool
    """Whether a later action of this worker uses its output."""
    output_only: bool = False
    """Run only for its output: the micro-batch is not counted, and its result is not recorded."""
    splits_backward: bool = False
    """For an F: whether this worker splits the backward into I and W."""

    work_name: str = field(init=False)
    """Its segment and kind, as in 2F: actions of one name take the same time."""
    reads_data: bool = field(init=False)
    """Whether it is an F that needs the input or the target of its micro-batch."""

    def __post_init__(self) -> None:
        kind, segment = self.action.kind, self.action.segment
        self.work_name = f"{segment}{kind.value}"
        self.reads_data = kind is Kind.F and (segment == 0 or self.segment.is_last)


def compile_ops(plan: Plan, epoch: Epoch, slot: int, segments: Mapping[int, Segment]) -> list[CompiledOp]:
    """What a slot runs in a plan, in order. Sends and receives follow from the placement of the plan."""
    lowered = derive_transfers(plan)[slot] if slot < len(plan.workers) else ()
    split_cells = split_backward_cells(action for action, _, _ in lowered)
    ops = []
    for action, receives, sends in lowered:
        needs, makes = required_tensor(action, plan.segments), produced_tensor(action)
        is_used = makes is not None and (
            action.segment + 1 < plan.segments if action.kind is Kind.F else action.segment > 0
        )
        ops.append(
            CompiledOp(
                action=action,
                segment=segments[action.segment],
                label=str(action),
                output_name=None if makes is None else str(makes),
                input_frame=str(needs) if receives else None,
                local_input=str(needs) if needs is not None and not receives else None,
                target_addresses=tuple(epoch.address(edge.target) for edge in sends),
                keep_local=is_used and not sends,
                splits_backward=(action.segment, action.micro) in split_cells,
            )
        )
    return ops


def split_backward_cells(actions: Iterable[Action]) -> set[tuple[int, int | None]]:
    """(segment, micro-batch) of each I in a list."""
    return {(action.segment, action.micro) for action in actions if action.kind is Kind.I}
