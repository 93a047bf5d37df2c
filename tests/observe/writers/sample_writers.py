"""Writers as a user would define them, outside of the package: what they are given goes to a list."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from culm.observe.step_metrics import StepMetrics
from culm.observe.writers.writer import RunInfo, Writer

CALLS: list[tuple[str, Any]] = []
"""What all writers of this process were given, in order."""
RELEASE = threading.Event()


class ListWriter:
    """All four methods, and no base class."""

    def open(self, run: RunInfo) -> None:
        CALLS.append(("open", run))

    def write_step(self, metrics: StepMetrics) -> None:
        CALLS.append(("step", metrics))

    def write_event(self, event: Mapping[str, Any]) -> None:
        CALLS.append(("event", event))

    def close(self, summary: Mapping[str, Any] | None) -> None:
        CALLS.append(("close", summary))


class StepsOnlyWriter(Writer):
    """Derives from Writer for the methods that it does not need."""

    def write_step(self, metrics: StepMetrics) -> None:
        CALLS.append(("step", metrics))


class BrokenWriter(ListWriter):
    """Raises in the second step."""

    def write_step(self, metrics: StepMetrics) -> None:
        super().write_step(metrics)
        if metrics.step == 1:
            raise OSError("no route to the server")


class UnopenedWriter(ListWriter):
    def open(self, run: RunInfo) -> None:
        raise SystemExit(3)


class HangingWriter(ListWriter):
    """Returns from close when the test releases it."""

    def close(self, summary: Mapping[str, Any] | None) -> None:
        RELEASE.wait()


class NoWriter:
    """Lacks the methods."""


class WriterWithArguments(ListWriter):
    """Cannot be created by its name."""

    def __init__(self, path: str) -> None:
        self.path = path
