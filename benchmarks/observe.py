"""`culm bench observe`: what observing costs. A run with a folder and a page that somebody looks at, beside the
same run without; microseconds of a line, milliseconds of a page of a large run.

Both sides are real processes on the same cores, in alternating rounds. Whoever looks does so while the observed side
has its turn, four times as often as a browser would.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from rich import box
from rich.table import Table

from benchmarks.job import GPTSpec, even_cut
from benchmarks.ours import CulmPipeline, CulmPool
from benchmarks.paired import Comparison, compare
from benchmarks.pipeline import Effort, cores, measure
from culm.observe import page
from culm.observe.facts import facts
from culm.observe.folder import RunFolder
from culm.observe.reading import Contents, Folder
from culm.observe.serving import Window, served
from culm.observe.view import of_run

JOB = GPTSpec(name="short", width=64, tokens=64, blocks=4)
"""Steps of tens of milliseconds: the shorter they are, the more a line for each of them weighs."""
STAGES = 2
POLL_S = 0.5
STEPS, EVENTS = 100_000, 1_000
"""Of the large run."""
FULL = Effort(jobs=(JOB,), rounds=24, starts=3, round_s=1.0)
QUICK = Effort(jobs=(JOB,), rounds=6, starts=1, round_s=0.3)


class Result(TypedDict):
    """What the bench found."""

    ratio_median: float
    """Seconds of an observed step over those of one that is not."""
    ci: list[float]
    rounds: int
    step_s: float
    observed_step_s: float
    polls: int
    us_per_step_line: float
    us_per_event: float
    ms_to_read: float
    """All lines of the large run."""
    ms_per_view: float
    """What a live page is sent, out of what was read."""
    ms_per_page: float
    """A report, its script included."""
    view_bytes: int
    steps: int
    events: int
    cores: int
    workers: int


class Observed:
    """A run with a folder and a page; while it has its turn, somebody looks."""

    def __init__(self, culm: CulmPool, spec: GPTSpec, out: str) -> None:
        self._run: CulmPipeline = culm(spec, even_cut(spec.blocks + 2, STAGES), "1f1b", out=out)
        self._address = self._run.beside(served(Window(Folder(out, empty=True).look, aside=True)))
        self.polls = 0

    def round(self, steps: int) -> float:
        with self._looked_at():
            return self._run.round(steps)

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        over = threading.Event()
        looking = threading.Thread(target=self._look, args=[over])
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()

    def _look(self, over: threading.Event) -> None:
        while True:
            for path in ("data.json", "metrics"):
                with urllib.request.urlopen(self._address + path) as answer:
                    answer.read()
            self.polls += 1
            if over.wait(POLL_S):
                return

    def close(self) -> None:
        self._run.close()


def run(
    culm: CulmPool,
    *,
    quick: bool = False,
    spec: GPTSpec | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """Both sides in alternation, over several starts; then lines and pages by themselves."""
    effort = QUICK if quick else FULL
    rounds, polls = [], 0
    with tempfile.TemporaryDirectory(prefix="culm-bench-") as scratch:
        for number in range(effort.starts):
            found, looked = _started(culm, spec or effort.jobs[0], effort, Path(scratch) / f"run-{number}")
            rounds.append(found)
            polls += looked
            progress(f"start {number + 1} of {effort.starts}: {found.ratio_median:.3f} of a step that nobody looks at")
        compared = compare([s for c in rounds for s in c.a_s], [s for c in rounds for s in c.b_s])
        steps = STEPS // 10 if quick else STEPS
        lines = written(Path(scratch) / "large", steps, EVENTS)
        pages = drawn(Path(scratch) / "large")
    return Result(
        ratio_median=compared.ratio_median,
        ci=list(compared.ci),
        rounds=len(compared.ratios),
        step_s=median(compared.a_s),
        observed_step_s=median(compared.b_s),
        polls=polls,
        us_per_step_line=lines[0],
        us_per_event=lines[1],
        ms_to_read=pages["read"],
        ms_per_view=pages["view"],
        ms_per_page=pages["page"],
        view_bytes=int(pages["bytes"]),
        steps=steps,
        events=EVENTS,
        cores=cores(),
        workers=STAGES,
    )


def _started(culm: CulmPool, spec: GPTSpec, effort: Effort, out: Path) -> tuple[Comparison, int]:
    out.mkdir()
    with ExitStack() as stack:
        alone = stack.enter_context(closing(culm(spec, even_cut(spec.blocks + 2, STAGES), "1f1b")))
        observed = stack.enter_context(closing(Observed(culm, spec, str(out))))
        return measure(alone, observed, effort), observed.polls


def written(out: Path, steps: int, events: int) -> tuple[float, float]:
    """Microseconds of a line of steps.jsonl and of one of events.jsonl, as a leader writes them."""
    folder = RunFolder(str(out))
    folder.open()
    each_step = _us(steps, lambda n: folder.step(step=n, loss=4.0 / (n + 1), samples=32, t=0.01 * n, norm=1.5))
    folder.event(t=0.0, kind="run_started", job="large", nodes=8, steps=steps, global_batch=32, pipelines=4, stages=2)
    pace = 0.01 * steps / events
    each_event = _us(events, lambda n: folder.event(t=pace * n, **_befallen(n)))
    folder.close()
    return each_step, each_event


def _befallen(n: int) -> dict[str, Any]:
    """Nodes come and go, and every time there is a reason."""
    node, kind = divmod(n, 3)
    if kind == 0:
        return {"kind": "node_joined", "node": node}
    if kind == 1:
        return {"kind": "lost", "node": node, "step": n}
    slots = [f"{slot // 2}.{slot % 2}" for slot in range(8)]
    members = list(range(node, node + 8))
    return {
        "kind": "epoch",
        "node": None,
        "number": node,
        "members": members,
        "slots": slots,
        "why": f"node {node} is gone",
    }


def _us(count: int, line: Callable[[int], None]) -> float:
    began = time.perf_counter()
    for n in range(count):
        line(n)
    return 1e6 * (time.perf_counter() - began) / count


def drawn(out: Path, times: int = 3) -> dict[str, float]:
    """Milliseconds to read a run, to make a live page's figures of it, and to make a report; medians."""
    contents = Folder(str(out)).look()
    return {
        "read": _ms(times, lambda: Folder(str(out)).look()),
        "view": _ms(times, lambda: _view(contents)),
        "page": _ms(times, lambda: page.alone(of_run(facts(contents)))),
        "bytes": len(_view(contents)),
    }


def _view(contents: Contents) -> bytes:
    return of_run(facts(contents)).data


def _ms(times: int, work: Callable[[], Any]) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(1e3 * (time.perf_counter() - began))
    return median(found)


def table(result: Result) -> Table:
    """The figures for people."""
    low, high = result["ci"]
    made = Table(title="what observing costs", box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    large = f"{result['steps']:,} steps and {result['events']:,} events"
    rows = {
        "a step with folder and page over one without": f"{result['ratio_median']:.3f} ({low:.3f} to {high:.3f})",
        "rounds, looks": f"{result['rounds']}, {result['polls']}",
        "a line of steps.jsonl, of events.jsonl": f"{result['us_per_step_line']:.1f}, {result['us_per_event']:.1f} us",
        f"reading {large}": f"{result['ms_to_read']:.0f} ms",
        "the figures of its live page": f"{result['ms_per_view']:.0f} ms, {result['view_bytes'] / 1e3:.0f} kB",
        "its report": f"{result['ms_per_page']:.0f} ms",
    }
    for name, value in rows.items():
        made.add_row(name, value)
    return made


if __name__ == "__main__":
    with CulmPool() as pool:
        print(json.dumps(run(pool, quick=True)))
