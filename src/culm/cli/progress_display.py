"""The progress of a run: a bar on a terminal, a line every few seconds in a log, or nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn

from culm.cli.error_reporting import print_error
from culm.cli.run_tables import schedule_grid, setup_table

if TYPE_CHECKING:
    from culm.cluster.run_setup import RunSetup
    from culm.observe.step_metrics import StepMetrics

_WINDOW_S = 10.0
"""Throughput is averaged over this window, so that a slow start does not distort the forecast."""
_LOG_EVERY_S = 2.0
"""Time between two lines in a log."""
_SHOWN_VALUES = 3
"""Named values that fit into a line."""


class ThroughputMeter:
    """Samples per second and the remaining time, from the metrics of committed steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._recent_steps: deque[tuple[float, int, int]] = deque()
        self._samples = 0

    def add_step(self, metrics: StepMetrics) -> None:
        """Add a committed step."""
        self._samples += metrics.samples
        self._recent_steps.append((metrics.t, metrics.step + 1, self._samples))
        while len(self._recent_steps) > 2 and self._recent_steps[0][0] < metrics.t - _WINDOW_S:
            self._recent_steps.popleft()

    @property
    def samples_per_s(self) -> float | None:
        return self._per_s(2)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the last step at the current throughput."""
        speed = self._per_s(1)
        return (self._steps - self._recent_steps[-1][1]) / speed if speed else None

    def _per_s(self, field: int) -> float | None:
        if len(self._recent_steps) < 2:
            return None
        first, last = self._recent_steps[0], self._recent_steps[-1]
        return (last[field] - first[field]) / (last[0] - first[0]) if last[0] > first[0] else None


class ProgressDisplay:
    """Shows nothing: the display of --quiet, and the base of the others."""

    redraws = False
    """Whether the display redraws its lines: then other output must go through `print_line`."""

    def show_progress(self, text: str, done: int, total: int) -> None:
        """Show work before the first step; a total of 0 means that its length is unknown."""

    def show_setup(self, setup: RunSetup) -> None:
        """Show the setup, before anything is started."""

    def show_step(self, metrics: StepMetrics) -> None:
        """Show a committed step."""

    def show_event(self, text: str) -> None:
        """Show an event of the run, such as a lost node."""

    def print_line(self, text: str) -> None:
        """Show a line that user code printed."""

    def show_url(self, url: str) -> None:
        """Show the address of the page; even --quiet prints it, because --dash asked for it."""
        print_error(f"the run is shown at {url}")

    def close(self) -> None:
        """Leave the terminal as it was."""


class LogDisplay(ProgressDisplay):
    """For logs: a line when a phase begins, and every few seconds while it lasts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._steps = 0
        self._throughput = ThroughputMeter(0)
        self._printed_at = float("-inf")
        self._progress_printed_at = float("-inf")

    def show_progress(self, text: str, done: int, total: int) -> None:
        begins = text != self._text and done == 0
        self._text = text
        due = bool(total) and (done == total or time.monotonic() - self._progress_printed_at >= _LOG_EVERY_S)
        if begins or due:
            self._progress_printed_at = time.monotonic()
            self._print(text + (f" {done}/{total}" if total else ""))

    def show_setup(self, setup: RunSetup) -> None:
        print_setup(self._console, setup)
        self._steps, self._throughput = setup.steps, ThroughputMeter(setup.steps)

    def show_step(self, metrics: StepMetrics) -> None:
        self._throughput.add_step(metrics)
        last = metrics.step + 1 >= self._steps
        if last or metrics.t - self._printed_at >= _LOG_EVERY_S:
            self._printed_at = metrics.t
            self._print(
                "  ".join([f"steps {metrics.step + 1}/{self._steps}", *_step_figures(metrics, self._throughput)])
            )

    def show_event(self, text: str) -> None:
        self._print(text)

    def show_url(self, url: str) -> None:
        self._print(f"the run is shown at {url}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


class BarDisplay(ProgressDisplay):
    """For a terminal: a spinner until the nodes are up, then a bar."""

    redraws = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._steps = 0
        self._throughput = ThroughputMeter(0)
        self._in_steps = False

    def show_progress(self, text: str, done: int, total: int) -> None:
        if self._in_steps:
            return
        if self._progress is None:
            self._start_progress(SpinnerColumn(), TextColumn("{task.description}"))
        assert self._progress is not None
        self._progress.update(self._task, description=text + (f" {done}/{total}" if total else ""))

    def show_setup(self, setup: RunSetup) -> None:
        self.close()
        print_setup(self._console, setup)
        self._steps, self._throughput = setup.steps, ThroughputMeter(setup.steps)

    def show_step(self, metrics: StepMetrics) -> None:
        self._throughput.add_step(metrics)
        if not self._in_steps:
            self._in_steps = True
            bar = BarColumn(bar_width=None)
            self._start_progress(
                TextColumn("steps {task.completed}/{task.total}"), bar, TextColumn("{task.description}")
            )
        assert self._progress is not None
        figures = "  ".join(_step_figures(metrics, self._throughput))
        self._progress.update(self._task, completed=metrics.step + 1, description=figures)

    def show_event(self, text: str) -> None:
        self.print_line(text)

    def show_url(self, url: str) -> None:
        self.print_line(f"the run is shown at {url}")

    def print_line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start_progress(self, *columns: ProgressColumn) -> None:
        self.close()
        self._progress = Progress(*columns, console=self._console, expand=True, transient=not self._in_steps)
        self._task = self._progress.add_task("", total=self._steps if self._in_steps else None)
        self._progress.start()


def make_console(*, stderr: bool) -> Console:
    """A console on stdout or stderr. Without a terminal it is 120 columns wide."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=120)


def make_display(console: Console, *, quiet: bool) -> ProgressDisplay:
    """The display for a console: a bar on a terminal, lines elsewhere."""
    if quiet:
        return ProgressDisplay()
    return BarDisplay(console) if console.is_terminal else LogDisplay(console)


def print_setup(console: Console, setup: RunSetup) -> None:
    """Print the setup, and the schedule as a grid if it is small enough."""
    console.print(setup_table(setup))
    grid = schedule_grid(setup, min(100, console.width) if console.is_terminal else 100)
    if grid:
        console.print(grid, markup=False, highlight=False, soft_wrap=True)


def _step_figures(metrics: StepMetrics, pace: ThroughputMeter) -> list[str]:
    loss, rate, left = metrics.loss, pace.samples_per_s, pace.remaining_s
    found = ["loss not finite" if loss is None or not math.isfinite(loss) else f"loss {loss:.4f}"]
    if metrics.eval_loss is not None:
        found.append(f"evaluation {metrics.eval_loss:.4f}")
    found += [f"{name} {value:.4g}" for name, value in list(metrics.values.items())[:_SHOWN_VALUES]]
    found += [f"{rate:.0f} samples/s"] if rate is not None else []
    return found + ([f"{format_whole_seconds(left)} left"] if left and left >= 0.5 else [])


def format_whole_seconds(seconds: float) -> str:
    """For people: 42 s, 3:20 min, 1:05:00 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"
