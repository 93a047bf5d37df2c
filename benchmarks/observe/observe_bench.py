"""`culm bench observe`: what observing costs. Compares a run with a run folder and a polled page with the same run
without; also measures microseconds per line, and milliseconds per page of a large run.

Both sides are real processes on the same cores, in alternating rounds. The page is polled during the rounds of the
observed side, four times as often as by a browser.
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

from benchmarks.common.gpt_job import GPTSpec, even_cut
from benchmarks.common.paired_rounds import PairedComparison, compare_rounds
from benchmarks.pipeline.culm_pipeline import CulmPipeline, CulmPool
from benchmarks.pipeline.pipeline_bench import PipelineEffort, available_core_count, measure_sides
from rich import box
from rich.table import Table

from culm.observe.report import html_page
from culm.observe.report.load_run import RunContents, RunFolderReader
from culm.observe.report.page_layout import layout_run
from culm.observe.report.page_server import CachedView, serve_page
from culm.observe.report.report_data import build_report_data
from culm.observe.step_metrics import StepMetrics
from culm.observe.writers.run_folder import RunFolder

JOB = GPTSpec(name="short", width=64, tokens=64, blocks=4)
"""Steps of tens of milliseconds: the shorter the steps, the more a line per step costs."""
STAGES = 2
POLL_S = 0.5
STEPS, EVENTS = 100_000, 1_000
"""Size of the large run."""
FULL = PipelineEffort(jobs=(JOB,), rounds=24, starts=3, round_s=1.0)
QUICK = PipelineEffort(jobs=(JOB,), rounds=6, starts=1, round_s=0.3)


class ObserveResult(TypedDict):
    """The result of the bench."""

    ratio_median: float
    """Seconds of an observed step divided by those of an unobserved one."""
    ci: list[float]
    rounds: int
    step_s: float
    observed_step_s: float
    polls: int
    us_per_step_line: float
    us_per_event: float
    ms_to_read: float
    """Reading all lines of the large run."""
    ms_per_view: float
    """Preparing the data of a live page from what was read."""
    ms_per_page: float
    """Rendering a report, its script included."""
    view_bytes: int
    steps: int
    events: int
    cores: int
    workers: int


class ObservedRun:
    """A run with a run folder and a page, which is polled during its rounds."""

    def __init__(self, culm: CulmPool, spec: GPTSpec, out: str) -> None:
        self._run: CulmPipeline = culm(spec, even_cut(spec.blocks + 2, STAGES), "1f1b", out=out)
        self._address = self._run.enter_alongside(
            serve_page(CachedView(RunFolderReader(out, allow_empty=True).read, in_thread=True))
        )
        self.polls = 0

    def run_round(self, steps: int) -> float:
        with self._polling():
            return self._run.run_round(steps)

    @contextmanager
    def _polling(self) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self._poll, args=[stop])
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _poll(self, stop: threading.Event) -> None:
        while True:
            for path in ("data.json", "metrics"):
                with urllib.request.urlopen(self._address + path) as answer:
                    answer.read()
            self.polls += 1
            if stop.wait(POLL_S):
                return

    def close(self) -> None:
        self._run.close()


def run(
    culm: CulmPool,
    *,
    quick: bool = False,
    spec: GPTSpec | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ObserveResult:
    """Measure both sides in alternation, over several starts; then lines and pages separately."""
    effort = QUICK if quick else FULL
    rounds, polls = [], 0
    with tempfile.TemporaryDirectory(prefix="culm-bench-") as scratch:
        for number in range(effort.starts):
            comparison, polled = _measure_one_start(
                culm, spec or effort.jobs[0], effort, Path(scratch) / f"run-{number}"
            )
            rounds.append(comparison)
            polls += polled
            progress(f"start {number + 1} of {effort.starts}: {comparison.ratio_median:.3f} of an unobserved step")
        compared = compare_rounds([s for c in rounds for s in c.a_s], [s for c in rounds for s in c.b_s])
        steps = STEPS // 10 if quick else STEPS
        lines = measure_line_us(Path(scratch) / "large", steps, EVENTS)
        pages = measure_page_ms(Path(scratch) / "large")
    return ObserveResult(
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
        cores=available_core_count(),
        workers=STAGES,
    )


def _measure_one_start(
    culm: CulmPool, spec: GPTSpec, effort: PipelineEffort, out: Path
) -> tuple[PairedComparison, int]:
    out.mkdir()
    with ExitStack() as stack:
        unobserved = stack.enter_context(closing(culm(spec, even_cut(spec.blocks + 2, STAGES), "1f1b")))
        observed = stack.enter_context(closing(ObservedRun(culm, spec, str(out))))
        return measure_sides(unobserved, observed, effort), observed.polls


def measure_line_us(out: Path, steps: int, events: int) -> tuple[float, float]:
    """Microseconds per line of steps.jsonl and of events.jsonl, as written by a leader."""
    folder = RunFolder(str(out))
    folder.open()
    each_step = _microseconds_each(
        steps, lambda n: folder.write_step(StepMetrics(n, 0.01 * n, 4.0 / (n + 1), 32, norm=1.5))
    )
    shape = {"nodes": 8, "global_batch": 32, "pipelines": 4, "stages": 2}
    folder.write_event({"t": 0.0, "kind": "run_started", "job": "large", "steps": steps, **shape})
    pace = 0.01 * steps / events
    each_event = _microseconds_each(events, lambda n: folder.write_event({"t": pace * n, **_sample_event(n)}))
    folder.close()
    return each_step, each_event


def _sample_event(n: int) -> dict[str, Any]:
    """Events of nodes that join and are lost, and of the epochs that follow."""
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


def _microseconds_each(count: int, write_line: Callable[[int], None]) -> float:
    start = time.perf_counter()
    for n in range(count):
        write_line(n)
    return 1e6 * (time.perf_counter() - start) / count


def measure_page_ms(out: Path, times: int = 3) -> dict[str, float]:
    """Milliseconds to read a run, to prepare a live page's data, and to render a report; medians."""
    contents = RunFolderReader(str(out)).read()
    return {
        "read": _median_ms(times, lambda: RunFolderReader(str(out)).read()),
        "view": _median_ms(times, lambda: _page_data(contents)),
        "page": _median_ms(times, lambda: html_page.standalone_page(layout_run(build_report_data(contents)))),
        "bytes": len(_page_data(contents)),
    }


def _page_data(contents: RunContents) -> bytes:
    return layout_run(build_report_data(contents)).data


def _median_ms(times: int, call: Callable[[], Any]) -> float:
    milliseconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        milliseconds.append(1e3 * (time.perf_counter() - start))
    return median(milliseconds)


def render_table(result: ObserveResult) -> Table:
    """The figures as a table."""
    low, high = result["ci"]
    table = Table(title="what observing costs", box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    large = f"{result['steps']:,} steps and {result['events']:,} events"
    rows = {
        "a step with folder and page over one without": f"{result['ratio_median']:.3f} ({low:.3f} to {high:.3f})",
        "rounds, polls": f"{result['rounds']}, {result['polls']}",
        "a line of steps.jsonl, of events.jsonl": f"{result['us_per_step_line']:.1f}, {result['us_per_event']:.1f} us",
        f"reading {large}": f"{result['ms_to_read']:.0f} ms",
        "the data of its live page": f"{result['ms_per_view']:.0f} ms, {result['view_bytes'] / 1e3:.0f} kB",
        "its report": f"{result['ms_per_page']:.0f} ms",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


if __name__ == "__main__":
    with CulmPool() as pool:
        print(json.dumps(run(pool, quick=True)))
