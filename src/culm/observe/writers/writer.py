"""The contract of a writer: a destination that receives the metrics and events of a run while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from culm.observe.step_metrics import StepMetrics


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that a writer is opened for."""

    id: str
    """The same for all writers of a run, also after another node has become the leader. A resumed run has a new one."""
    name: str
    """The job for people: FILE[:function], or "culm" for a Job object."""
    out: str | None = None
    """The run folder: a path or URL; None: the run has none."""
    first_step: int = 0
    """The first step to expect. Above 0 the run was resumed, or another node has become the leader."""
    samples: int = 0
    """Samples that were counted before, if another node was the leader."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the event `run_started`: shape, schedule, strategy, batch and so on."""


class Writer(Protocol):
    """What `--writer MODULE:CLASS` names: a class without constructor arguments that has these four methods.

    A process beside the leader creates the writer and calls it from one thread that belongs to this writer, in order:
    `open`, then `write_step` and `write_event`, then `close`. A slow writer therefore delays nothing. If a method
    raises, the run logs the event `writer_failed` and calls this writer no more; the run goes on.

    Steps arrive in order. A step may arrive again: after the event `rewound` (the run goes back to a checkpoint, and
    steps from its field `step` on are repeated), and after another node has become the leader, which opens a writer of
    its own with `RunInfo.first_step`. If the leader's machine vanishes, `close` is not called.

    A class may derive from Writer and define only the methods that it needs.
    """

    def open(self, run: RunInfo) -> None:
        """Begin. Called once, before everything else."""

    def write_step(self, metrics: StepMetrics) -> None:
        """Write a committed step."""

    def write_event(self, event: Mapping[str, Any]) -> None:
        """Write an event: a line of events.jsonl with the keys t, kind, node and those of its kind."""

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Finish. `summary` is that of summary.json; None: the run failed, or another node becomes the leader."""
