"""A plan: the actions of one training step, placed on workers in order; a plain value, and a file that people read."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from culm.errors import ScheduleError
from culm.schedule.action import RELEASE, WHOLE, Action, Kind

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
    """The order in which every worker runs its actions. Its shape is checked here, its sense by `check`."""

    name: str
    """One word: gpipe, 1f1b, zb, interleaved, or any other."""
    pipelines: int
    """D."""
    stages: int
    """P: workers per pipeline."""
    segments: int
    """A multiple of P. Segment g sits on stage g % P of every pipeline."""
    micro_batches: int
    """M, over all pipelines: numbered 0..M-1."""
    workers: tuple[tuple[Action, ...], ...]
    """By slot number: pipeline * P + stage."""
    failed: tuple[int, ...] = ()
    """Slots that nobody fills, in ascending order: other holders run their micro-batches, and their lists are empty."""
    held: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(slot, stages): workers that run other stages than their own alone, because they stand in for failed ones."""
    shares: tuple[int, ...] = ()
    """How many micro-batches each pipeline runs; (): as evenly as can be. Shorter pipelines are given fewer."""

    def __post_init__(self) -> None:
        if self.name.split() != [self.name] or not self.name.isprintable():
            raise ScheduleError(f"Plan.name is {self.name!r}: use one word")
        check_shape(self.pipelines, self.stages, self.micro_batches)
        if self.segments < 1 or self.segments % self.stages:
            raise ScheduleError(f"Plan.segments is {self.segments}: use a multiple of the {self.stages} stages")
        if len(self.workers) != self.pipelines * self.stages:
            raise ScheduleError(
                f"Plan.workers has {len(self.workers)} lists: "
                f"use one for each of {self.pipelines} pipelines x {self.stages} stages"
            )
        if self.shares and (len(self.shares) != self.pipelines or sum(self.shares) != self.micro_batches):
            raise ScheduleError(
                f"Plan.shares is {self.shares!r}: use one number for each of {self.pipelines} pipelines, "
                f"{self.micro_batches} in all"
            )
        self._check_failed()

    def _check_failed(self) -> None:
        slots = range(len(self.workers))
        if list(self.failed) != sorted(set(self.failed)) or not all(slot in slots for slot in self.failed):
            raise ScheduleError(f"Plan.failed is {self.failed!r}: use slot numbers below {len(slots)}, ascending")
        for slot, stages in self.held:
            if slot not in slots or slot in self.failed or not all(stage in range(self.stages) for stage in stages):
                raise ScheduleError(f"Plan.held has {(slot, stages)!r}: use live slots and stages below {self.stages}")
        for stage in range(self.stages):
            if not self.holders_of(stage):
                raise ScheduleError(f"Plan.failed has every worker of stage {stage}: leave one that is alive")

    def placement(self) -> dict[Action, int]:
        """Who runs each F, I, W and B. R and S are missing: they run on every holder of their segment."""
        return {
            action: worker
            for worker, actions in enumerate(self.workers)
            for action in actions
            if action.kind not in WHOLE
        }

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages whose segments a worker runs: its own, unless it failed or stands in for others."""
        return () if worker in self.failed else dict(self.held).get(worker, (worker % self.stages,))

    def segments_of(self, worker: int) -> tuple[int, ...]:
        """The segments that a worker runs, in the order of the model."""
        if not self.held:
            return tuple(range(worker % self.stages, self.segments, self.stages))
        stages = self.stages_of(worker)
        return tuple(segment for segment in range(self.segments) if segment % self.stages in stages)

    def holders_of(self, segment: int) -> tuple[int, ...]:
        """The workers that run a segment: one in each pipeline, less those that failed, and who stands in for them."""
        stage = segment % self.stages
        if not self.held:
            peers = range(stage, self.pipelines * self.stages, self.stages)
            return tuple(worker for worker in peers if worker not in self.failed)
        return tuple(worker for worker in range(len(self.workers)) if stage in self.stages_of(worker))

    def micros_of(self, worker: int) -> range:
        """The micro-batches of a worker's pipeline."""
        return self.by_pipeline[worker // self.stages]

    @property
    def halved(self) -> bool:
        """Whether every backward comes in halves."""
        return not any(action.kind is Kind.B for row in self.workers for action in row)

    @property
    def by_pipeline(self) -> tuple[range, ...]:
        """The micro-batches of each pipeline: contiguous."""
        if not self.shares:
            return blocks(self.pipelines, self.micro_batches)
        return tuple(range(a, b) for a, b in pairwise(accumulate(self.shares, initial=0)))

    def orphans_of(self, stage: int) -> tuple[int, ...]:
        """The micro-batches whose own worker of the stage is gone from it: any worker that runs the stage may."""
        own = range(stage, len(self.workers), self.stages)
        lost = [
            worker for worker in own if worker in self.failed or (self.held and stage not in self.stages_of(worker))
        ]
        return tuple(micro for worker in lost for micro in self.micros_of(worker))

    def label(self, worker: int) -> str:
        """A worker's slot, written pipeline.stage."""
        return f"{worker // self.stages}.{worker % self.stages}"

    def with_updates(self) -> Plan:
        """The plan with R right after the last W or B of each segment and S at the end of each list; old ones go."""
        return replace(self, workers=tuple(_updated(actions) for actions in self.workers))

    def to_text(self) -> str:
        """A line that describes the plan, then a line for each worker: `0.2: 2F0 2F1 2B0 ...`."""
        counts = f"pipelines={self.pipelines} stages={self.stages}"
        failed = f" failed={','.join(map(self.label, self.failed))}" if self.failed else ""
        held = ",".join(f"{self.label(slot)}:{'+'.join(map(str, stages))}" for slot, stages in self.held)
        shares = f" shares={'+'.join(map(str, self.shares))}" if self.shares else ""
        rest = failed + (f" held={held}" if held else "") + shares
        lines = [f"plan {self.name}: {counts} segments={self.segments} micro_batches={self.micro_batches}{rest}"]
        lines += [f"{self.label(w)}: {' '.join(map(str, actions))}".rstrip() for w, actions in enumerate(self.workers)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_text(text: str) -> Plan:
        """Read what `to_text` wrote. Blank lines and lines that start with # are skipped; errors name line and cell."""
        return _read(text)

    def to_csv(self) -> str:
        """The shape of torch.distributed.pipelining: a row for each worker, an action in each cell."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(self.workers)
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str, *, name: str = "csv") -> Plan:
        """Read what `to_csv` or torch's compute-only dump wrote; empty cells are skipped, errors name line and cell.

        A CSV carries no header, so the shape is inferred: each pipeline has one row with segment 0. Failed slots can
        not be told that way: keep such plans as text.
        torch writes no S: `with_updates` adds what is missing.
        """
        rows = _csv_rows(text)
        workers = tuple(_actions(f"line {number}", row) for number, row in enumerate(rows, 1))
        firsts = sum(any(action.segment == 0 for action in actions) for actions in workers)
        if firsts == 0 or len(rows) % firsts:
            raise ScheduleError(
                f"{firsts} of {len(rows)} rows have actions of segment 0: "
                "each pipeline has one such row, and all have equally many rows"
            )
        segments = 1 + max(action.segment for actions in workers for action in actions)
        micros = 1 + max((a.micro for actions in workers for a in actions if a.micro is not None), default=0)
        return cls(name, firsts, len(rows) // firsts, segments, micros, workers)


def blocks(pipelines: int, micro_batches: int) -> tuple[range, ...]:
    """The micro-batches of each pipeline: contiguous, and the first M % D pipelines have one more."""
    size, more = divmod(micro_batches, pipelines)
    starts = [d * size + min(d, more) for d in range(pipelines + 1)]
    return tuple(range(a, b) for a, b in pairwise(starts))


def check_shape(pipelines: int, stages: int, micro_batches: int) -> None:
    """Refuse counts that no plan can have."""
    for field, count in (("pipelines", pipelines), ("stages", stages), ("micro_batches", micro_batches)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ScheduleError(f"{field} is {count!r}: use a whole number of at least 1")
    if micro_batches < pipelines:
        raise ScheduleError(
            f"micro_batches is {micro_batches}, fewer than the {pipelines} pipelines: "
            f"use at least {pipelines} micro-batches, or fewer pipelines"
        )


@lru_cache(maxsize=8)
def _read(text: str) -> Plan:
    """Kept for a while: whoever leads reads the plan of an epoch again for each thing that it decides."""
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
    workers = _by_slot(lines[1:], pipelines, stages)
    slots = tuple(_slot(label, pipelines, stages) for label in failed.split(",")) if failed else ()
    pairs = [pair.split(":") for pair in held.split(",")] if held else []
    roles = tuple((_slot(label, pipelines, stages), tuple(map(int, of.split("+")))) for label, of in pairs)
    shares = tuple(map(int, parts.split("+"))) if parts else ()
    return Plan(name, pipelines, stages, segments, micro_batches, workers, slots, roles, shares)


def _updated(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    kept = [action for action in actions if action.kind not in WHOLE]
    last = {action.segment: index for index, action in enumerate(kept) if action.kind in RELEASE}
    ends = {index: segment for segment, index in last.items()}
    out: list[Action] = []
    for index, action in enumerate(kept):
        out.append(action)
        if index in ends:
            out.append(Action(ends[index], Kind.R))
    return (*out, *(Action(segment, Kind.S) for segment in sorted(last)))


def _actions(place: str, cells: Iterable[str]) -> tuple[Action, ...]:
    out: list[Action] = []
    for number, cell in enumerate(cells, 1):
        try:
            out += [Action.parse(cell.strip())] if cell.strip() else []
        except ScheduleError as error:
            raise ScheduleError(f"{place}, cell {number}: {error}") from None
    return tuple(out)


def _by_slot(lines: list[tuple[int, str]], pipelines: int, stages: int) -> tuple[tuple[Action, ...], ...]:
    """The lists of the workers by slot number; the lines may come in any order."""
    if len(lines) != pipelines * stages:
        raise ScheduleError(
            f"there are {len(lines)} lines of workers: give one for each of {pipelines} pipelines x {stages} stages"
        )
    rows: dict[str, tuple[Action, ...] | None] = {f"{d}.{s}": None for d in range(pipelines) for s in range(stages)}
    for number, line in lines:
        label, colon, cells = line.partition(":")
        if not colon or rows.get(label, ()) is not None:
            raise ScheduleError(
                f"line {number}: {line[:40]!r} is not for a worker that has no line yet: "
                f"write each of 0.0 to {pipelines - 1}.{stages - 1} once, as in '0.0: 0F0 0B0'"
            )
        rows[label] = _actions(f"line {number}", cells.split())
    return tuple(actions for actions in rows.values() if actions is not None)


def _slot(label: str, pipelines: int, stages: int) -> int:
    """The slot number of `pipeline.stage`."""
    pipeline, stage = map(int, label.split("."))
    if pipeline >= pipelines or stage >= stages:
        raise ScheduleError(f"the failed slot {label} does not exist: use 0.0 to {pipelines - 1}.{stages - 1}")
    return pipeline * stages + stage


def _csv_rows(text: str) -> list[list[str]]:
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ScheduleError(f"this is not a CSV of actions: {error}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return rows
