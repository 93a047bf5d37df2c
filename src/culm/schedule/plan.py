"""A plan: the actions of one training step, assigned to workers in order. A plain value with a readable text form."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from culm.errors import ScheduleError
from culm.schedule.action import SEGMENT_KINDS, WEIGHT_GRAD_KINDS, Action, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

_HEADER = re.compile(
    r"plan (?P<name>\S+): pipelines=(?P<pipelines>[0-9]{1,9}) stages=(?P<stages>[0-9]{1,9}) "
    r"segments=(?P<segments>[0-9]{1,9}) micro_batches=(?P<micro_batches>[0-9]{1,9})"
    r"(?: failed=(?P<failed>[0-9]{1,9}\.[0-9]{1,9}(?:,[0-9]{1,9}\.[0-9]{1,9})*))?"
    r"(?: held=(?P<held>[0-9]{1,9}\.[0-9]{1,9}:[0-9+]+(?:,[0-9]{1,9}\.[0-9]{1,9}:[0-9+]+)*))?"
    r"(?: shares=(?P<shares>[0-9]{1,9}(?:\+[0-9]{1,9})*))?"
)


@dataclass(frozen=True)
class Plan:
    """The order in which every worker runs its actions. The shape is checked here, the rest by `check_plan`."""

    name: str
    """One word: gpipe, 1f1b, zb, interleaved, or any other."""
    pipelines: int
    """D."""
    stages: int
    """P: workers per pipeline."""
    segments: int
    """A multiple of P. Segment g belongs to stage g % P of every pipeline."""
    micro_batches: int
    """M, over all pipelines, numbered 0..M-1."""
    workers: tuple[tuple[Action, ...], ...]
    """By slot number: pipeline * P + stage."""
    failed: tuple[int, ...] = ()
    """Empty slots, ascending. Other holders of the stage run their micro-batches, and their action lists are empty."""
    stage_overrides: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(slot, stages) for workers that run stages other than exactly their own, because they replace failed workers."""
    micro_batch_shares: tuple[int, ...] = ()
    """How many micro-batches each pipeline runs; (): as even as possible. Shorter pipelines get fewer."""

    def __post_init__(self) -> None:
        if self.name.split() != [self.name] or not self.name.isprintable():
            raise ScheduleError(f"Plan.name is {self.name!r}: use one word")
        check_plan_counts(self.pipelines, self.stages, self.micro_batches)
        if self.segments < 1 or self.segments % self.stages:
            raise ScheduleError(f"Plan.segments is {self.segments}: use a multiple of the {self.stages} stages")
        if len(self.workers) != self.pipelines * self.stages:
            raise ScheduleError(
                f"Plan.workers has {len(self.workers)} lists: "
                f"use one for each of {self.pipelines} pipelines x {self.stages} stages"
            )
        if self.micro_batch_shares and (
            len(self.micro_batch_shares) != self.pipelines or sum(self.micro_batch_shares) != self.micro_batches
        ):
            raise ScheduleError(
                f"Plan.micro_batch_shares is {self.micro_batch_shares!r}: "
                f"use one number for each of {self.pipelines} pipelines, {self.micro_batches} in total"
            )
        self._check_failed()

    def _check_failed(self) -> None:
        slots = range(len(self.workers))
        if list(self.failed) != sorted(set(self.failed)) or not all(slot in slots for slot in self.failed):
            raise ScheduleError(f"Plan.failed is {self.failed!r}: use slot numbers below {len(slots)}, ascending")
        for slot, stages in self.stage_overrides:
            if slot not in slots or slot in self.failed or not all(stage in range(self.stages) for stage in stages):
                raise ScheduleError(
                    f"Plan.stage_overrides has {(slot, stages)!r}: use live slots and stages below {self.stages}"
                )
        for stage in range(self.stages):
            if not self.holders_of(stage):
                raise ScheduleError(f"Plan.failed has every worker of stage {stage}: leave at least one alive")

    def placement(self) -> dict[Action, int]:
        """The worker of each F, I, W and B. R and S are not included: they run on every holder of their segment."""
        return {
            action: worker
            for worker, actions in enumerate(self.workers)
            for action in actions
            if action.kind not in SEGMENT_KINDS
        }

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that a worker runs: its own, unless it failed or replaces a failed worker."""
        return () if worker in self.failed else dict(self.stage_overrides).get(worker, (worker % self.stages,))

    def segments_of(self, worker: int) -> tuple[int, ...]:
        """The segments that a worker runs, in model order."""
        if not self.stage_overrides:
            return tuple(range(worker % self.stages, self.segments, self.stages))
        stages = self.stages_of(worker)
        return tuple(segment for segment in range(self.segments) if segment % self.stages in stages)

    def most_activations(self, worker: int) -> int:
        """The most micro-batches in flight on a worker, summed over its segments and divided by their number."""
        live = most = 0
        for action in self.workers[worker]:
            live += (action.kind is Kind.F) - (action.kind in WEIGHT_GRAD_KINDS)
            most = max(most, live)
        return -(-most // max(1, len(self.segments_of(worker))))

    def holders_of(self, segment: int) -> tuple[int, ...]:
        """The workers that run a segment: the live ones of its stage, and workers that replace failed ones."""
        stage = segment % self.stages
        if not self.stage_overrides:
            peers = range(stage, self.pipelines * self.stages, self.stages)
            return tuple(worker for worker in peers if worker not in self.failed)
        return tuple(worker for worker in range(len(self.workers)) if stage in self.stages_of(worker))

    def micros_of(self, worker: int) -> range:
        """The micro-batches of a worker's pipeline."""
        return self.micros_by_pipeline[worker // self.stages]

    @property
    def all_backwards_split(self) -> bool:
        """Whether every backward is split into I and W."""
        return not any(action.kind is Kind.B for row in self.workers for action in row)

    @property
    def micros_by_pipeline(self) -> tuple[range, ...]:
        """The micro-batches of each pipeline, as contiguous ranges."""
        if not self.micro_batch_shares:
            return split_micro_batches(self.pipelines, self.micro_batches)
        return tuple(range(a, b) for a, b in pairwise(accumulate(self.micro_batch_shares, initial=0)))

    def orphans_of(self, stage: int) -> tuple[int, ...]:
        """The micro-batches whose own worker no longer runs the stage: any worker that runs the stage may run them."""
        own = range(stage, len(self.workers), self.stages)
        lost = [
            worker
            for worker in own
            if worker in self.failed or (self.stage_overrides and stage not in self.stages_of(worker))
        ]
        return tuple(micro for worker in lost for micro in self.micros_of(worker))

    def slot_label(self, worker: int) -> str:
        """A worker's slot, as pipeline.stage."""
        return f"{worker // self.stages}.{worker % self.stages}"

    def with_reduce_and_step(self) -> Plan:
        """The plan with R after the last W or B of each segment and S at the end; existing R and S are removed."""
        return replace(self, workers=tuple(_add_reduce_and_step(actions) for actions in self.workers))

    def to_text(self) -> str:
        """A header line, then a line for each worker: `0.2: 2F0 2F1 2B0 ...`."""
        counts = f"pipelines={self.pipelines} stages={self.stages}"
        failed = f" failed={','.join(map(self.slot_label, self.failed))}" if self.failed else ""
        held = ",".join(
            f"{self.slot_label(slot)}:{'+'.join(map(str, stages))}" for slot, stages in self.stage_overrides
        )
        shares = f" shares={'+'.join(map(str, self.micro_batch_shares))}" if self.micro_batch_shares else ""
        rest = failed + (f" held={held}" if held else "") + shares
        lines = [f"plan {self.name}: {counts} segments={self.segments} micro_batches={self.micro_batches}{rest}"]
        lines += [
            f"{self.slot_label(w)}: {' '.join(map(str, actions))}".rstrip() for w, actions in enumerate(self.workers)
        ]
        text = "\n".join(lines) + "\n"
        _remember(text, self)
        return text

    @staticmethod
    def from_text(text: str) -> Plan:
        """Parse the output of `to_text`. Blank lines and lines that start with # are skipped; errors name the cell."""
        plan = _known_plans.get(text)
        if plan is None:
            plan = _parse_text(text)
            _remember(text, plan)
        return plan

    def to_csv(self) -> str:
        """The CSV form of torch.distributed.pipelining: a row for each worker, an action in each cell."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(self.workers)
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str, *, name: str = "csv") -> Plan:
        """Parse the output of `to_csv` or of torch's compute-only dump. Skips empty cells; errors name line and cell.

        A CSV has no header, so the shape is inferred: each pipeline has one row with segment 0. Failed slots cannot
        be inferred: store plans that have some as text.
        torch writes no S: `with_reduce_and_step` adds the missing actions.
        """
        rows = _read_csv_rows(text)
        workers = tuple(_parse_actions(f"line {number}", row) for number, row in enumerate(rows, 1))
        firsts = sum(any(action.segment == 0 for action in actions) for actions in workers)
        if firsts == 0 or len(rows) % firsts:
            raise ScheduleError(
                f"{firsts} of {len(rows)} rows have actions of segment 0: "
                "write one such row for each pipeline, and the same number of rows for all pipelines"
            )
        segments = 1 + max(action.segment for actions in workers for action in actions)
        micros = 1 + max((a.micro for actions in workers for a in actions if a.micro is not None), default=0)
        return cls(name, firsts, len(rows) // firsts, segments, micros, workers)


def split_micro_batches(pipelines: int, micro_batches: int) -> tuple[range, ...]:
    """The micro-batches of each pipeline: contiguous, the first M % D pipelines have one more."""
    size, more = divmod(micro_batches, pipelines)
    starts = [d * size + min(d, more) for d in range(pipelines + 1)]
    return tuple(range(a, b) for a, b in pairwise(starts))


def check_plan_counts(pipelines: int, stages: int, micro_batches: int) -> None:
    """Raise ScheduleError for counts that no plan can have."""
    for field, count in (("pipelines", pipelines), ("stages", stages), ("micro_batches", micro_batches)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ScheduleError(f"{field} is {count!r}: use a whole number of at least 1")
    if micro_batches < pipelines:
        raise ScheduleError(
            f"micro_batches is {micro_batches}, fewer than the {pipelines} pipelines: "
            f"use at least {pipelines} micro-batches, or fewer pipelines"
        )


_KNOWN_PLANS = 8
_known_plans: dict[str, Plan] = {}
"""The plans of the newest texts: the leader needs the plan of an epoch again for each of its decisions."""


def _remember(text: str, plan: Plan) -> None:
    _known_plans.pop(text, None)
    _known_plans[text] = plan
    while len(_known_plans) > _KNOWN_PLANS:
        _known_plans.pop(next(iter(_known_plans), ""), None)


def clear_known_plans() -> None:
    """Forget parsed texts, so that a benchmark measures parsing."""
    _known_plans.clear()


def _parse_text(text: str) -> Plan:
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1)]
    lines = [(n, line) for n, line in lines if line and line[0] != "#"]
    number, first = lines[0] if lines else (1, "")
    header = _HEADER.fullmatch(first)
    if header is None:
        raise ScheduleError(
            f"line {number}: {first[:80]!r} does not describe a plan: "
            "write 'plan 1f1b: pipelines=2 stages=4 segments=4 micro_batches=8'"
        )
    name, *numbers, failed, held, parts = header.groups()
    pipelines, stages, segments, micro_batches = map(int, numbers)
    workers = _parse_worker_lines(lines[1:], pipelines, stages)
    slots = tuple(_parse_slot(label, pipelines, stages) for label in failed.split(",")) if failed else ()
    pairs = [pair.split(":") for pair in held.split(",")] if held else []
    roles = tuple((_parse_slot(label, pipelines, stages), tuple(map(int, of.split("+")))) for label, of in pairs)
    shares = tuple(map(int, parts.split("+"))) if parts else ()
    return Plan(name, pipelines, stages, segments, micro_batches, workers, slots, roles, shares)


def _add_reduce_and_step(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    kept = [action for action in actions if action.kind not in SEGMENT_KINDS]
    last = {action.segment: index for index, action in enumerate(kept) if action.kind in WEIGHT_GRAD_KINDS}
    ends = {index: segment for segment, index in last.items()}
    out: list[Action] = []
    for index, action in enumerate(kept):
        out.append(action)
        if index in ends:
            out.append(Action(ends[index], Kind.R))
    return (*out, *(Action(segment, Kind.S) for segment in sorted(last)))


def _parse_actions(place: str, cells: Iterable[str]) -> tuple[Action, ...]:
    out: list[Action] = []
    for number, cell in enumerate(cells, 1):
        try:
            out += [Action.parse(cell.strip())] if cell.strip() else []
        except ScheduleError as error:
            raise ScheduleError(f"{place}, cell {number}: {error}") from None
    return tuple(out)


def _parse_worker_lines(lines: list[tuple[int, str]], pipelines: int, stages: int) -> tuple[tuple[Action, ...], ...]:
    """The action lists by slot number; the lines may be in any order."""
    if len(lines) != pipelines * stages:
        raise ScheduleError(
            f"there are {len(lines)} worker lines: write one for each of {pipelines} pipelines x {stages} stages"
        )
    rows: dict[str, tuple[Action, ...] | None] = {f"{d}.{s}": None for d in range(pipelines) for s in range(stages)}
    for number, line in lines:
        label, colon, cells = line.partition(":")
        if not colon or rows.get(label, ()) is not None:
            raise ScheduleError(
                f"line {number}: {line[:40]!r} does not belong to a worker without a line: "
                f"write each of 0.0 to {pipelines - 1}.{stages - 1} once, as in '0.0: 0F0 0B0'"
            )
        rows[label] = _parse_actions(f"line {number}", cells.split())
    return tuple(actions for actions in rows.values() if actions is not None)


def _parse_slot(label: str, pipelines: int, stages: int) -> int:
    """The slot number of `pipeline.stage`."""
    pipeline, stage = map(int, label.split("."))
    if pipeline >= pipelines or stage >= stages:
        raise ScheduleError(f"the failed slot {label} does not exist: use 0.0 to {pipelines - 1}.{stages - 1}")
    return pipeline * stages + stage


def _read_csv_rows(text: str) -> list[list[str]]:
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ScheduleError(f"this is not a CSV of actions: {error}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return rows
