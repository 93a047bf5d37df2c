"""What is seen of a run while it is under way: a bar on a terminal, a line now and then in a log, or nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn

from culm.cli.failing import say
from culm.cli.tables import picture, setup_table

if TYPE_CHECKING:
    from culm.cluster.setup import Setup

_WINDOW_S = 10.0
"""The pace is that of the last seconds, so that a slow start does not spoil the forecast."""
_EVERY_S = 2.0
"""Time between two lines in a log."""


class Pace:
    """How fast it goes, out of the metrics of committed steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seen: deque[tuple[float, int, int]] = deque()
        self._samples = 0

    def note(self, metrics: Mapping[str, Any]) -> None:
        """A step is committed: `t` seconds into the run, so many samples."""
        self._samples += metrics["samples"]
        self._seen.append((metrics["t"], metrics["step"] + 1, self._samples))
        while len(self._seen) > 2 and self._seen[0][0] < metrics["t"] - _WINDOW_S:
            self._seen.popleft()

    @property
    def samples_per_s(self) -> float | None:
        return self._per_s(2)

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step, if it goes on like this."""
        speed = self._per_s(1)
        return (self._steps - self._seen[-1][1]) / speed if speed else None

    def _per_s(self, field: int) -> float | None:
        if len(self._seen) < 2:
            return None
        first, last = self._seen[0], self._seen[-1]
        return (last[field] - first[field]) / (last[0] - first[0]) if last[0] > first[0] else None


class Display:
    """Shows nothing: the display of --quiet, and what the others fill in."""

    live = False
    """Draws over its own lines: whatever else is printed has to pass through `line`."""

    def told(self, text: str, done: int, total: int) -> None:
        """Something before the first step is under way; a total of 0 says that its length is not known."""

    def prepared(self, setup: Setup) -> None:
        """Everything is decided, nothing started."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A step is committed."""

    def news(self, text: str) -> None:
        """Something befell the run."""

    def line(self, text: str) -> None:
        """User code printed a line."""

    def address(self, url: str) -> None:
        """Browsers can look there: it was asked for, so it is said even where nothing else is."""
        say(f"the run is shown at {url}")

    def close(self) -> None:
        """Leave the terminal as it was."""


class Lines(Display):
    """For logs: a line when something new begins, and every few seconds while steps go by."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._steps = 0
        self._pace = Pace(0)
        self._printed_at = float("-inf")

    def told(self, text: str, done: int, total: int) -> None:
        begins = text != self._text and done == 0
        self._text = text
        if begins or (total and done == total):
            self._print(text + (f" {done}/{total}" if total else ""))

    def prepared(self, setup: Setup) -> None:
        introduce(self._console, setup)
        self._steps, self._pace = setup.steps, Pace(setup.steps)

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._pace.note(metrics)
        last = metrics["step"] + 1 >= self._steps
        if last or metrics["t"] - self._printed_at >= _EVERY_S:
            self._printed_at = metrics["t"]
            self._print("  ".join([f"step {metrics['step'] + 1}/{self._steps}", *_figures(metrics, self._pace)]))

    def news(self, text: str) -> None:
        self._print(text)

    def address(self, url: str) -> None:
        self._print(f"the run is shown at {url}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


class Bar(Display):
    """For a terminal: a spinner until the nodes are up, then a bar."""

    live = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._steps = 0
        self._pace = Pace(0)
        self._stepping = False

    def told(self, text: str, done: int, total: int) -> None:
        if self._stepping:
            return
        if self._progress is None:
            self._begin(SpinnerColumn(), TextColumn("{task.description}"))
        assert self._progress is not None
        self._progress.update(self._task, description=text + (f" {done}/{total}" if total else ""))

    def prepared(self, setup: Setup) -> None:
        self.close()
        introduce(self._console, setup)
        self._steps, self._pace = setup.steps, Pace(setup.steps)

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._pace.note(metrics)
        if not self._stepping:
            self._stepping = True
            bar = BarColumn(bar_width=None)
            self._begin(TextColumn("step {task.completed}/{task.total}"), bar, TextColumn("{task.description}"))
        assert self._progress is not None
        figures = "  ".join(_figures(metrics, self._pace))
        self._progress.update(self._task, completed=metrics["step"] + 1, description=figures)

    def news(self, text: str) -> None:
        self.line(text)

    def address(self, url: str) -> None:
        self.line(f"the run is shown at {url}")

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _begin(self, *columns: ProgressColumn) -> None:
        self.close()
        self._progress = Progress(*columns, console=self._console, expand=True, transient=not self._stepping)
        self._task = self._progress.add_task("", total=self._steps if self._stepping else None)
        self._progress.start()


def console_on(*, stderr: bool) -> Console:
    """Where things are shown: stdout, unless that is taken by JSON. A log has room for wide tables."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=120)


def display_on(console: Console, *, quiet: bool) -> Display:
    """The one that fits where it is shown."""
    if quiet:
        return Display()
    return Bar(console) if console.is_terminal else Lines(console)


def introduce(console: Console, setup: Setup) -> None:
    """What the run was set up as, and its schedule where the picture is small enough to be read."""
    console.print(setup_table(setup))
    drawn = picture(setup, min(100, console.width) if console.is_terminal else 100)
    if drawn:
        console.print(drawn, markup=False, highlight=False, soft_wrap=True)


def _figures(metrics: Mapping[str, Any], pace: Pace) -> list[str]:
    loss, rate, left = metrics["loss"], pace.samples_per_s, pace.left_s
    found = ["loss not finite" if loss is None else f"loss {loss:.4f}"]
    if metrics.get("eval_loss") is not None:
        found.append(f"evaluation {metrics['eval_loss']:.4f}")
    found += [f"{rate:.0f} samples/s"] if rate is not None else []
    return found + ([f"{duration(left)} left"] if left and left >= 0.5 else [])


def duration(seconds: float) -> str:
    """For people: 42 s, 3:20 min, 1:05:00 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"
