"""The page of a graph run: served during the run, and written as a file. The contents of pages are tested in
tests/observe."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.gnn.simulated_run import small_graph, small_model

from culm.checkpoint.storage import Storage
from culm.gnn import GnnCallbacks, train
from culm.observe.report.load_run import RunContents, RunFolderReader
from culm.observe.report.page_server import rewrite_periodically
from culm.observe.report.report_data import build_report_data
from culm.observe.step_metrics import StepMetrics

RUNNING = 'class="state running"'


def test_the_written_report_shows_the_running_state_and_refreshes(tmp_path: Path) -> None:
    async def write_once() -> str:
        contents = RunContents(name="one", steps=[StepMetrics(0, 1.0, 0.5)], live=True)
        writing = asyncio.create_task(rewrite_periodically(lambda: contents, Storage(str(tmp_path)), "report.html"))
        while not (tmp_path / "report.html").exists():
            await asyncio.sleep(0)
        writing.cancel()
        return (tmp_path / "report.html").read_text()

    text = asyncio.run(write_once())
    assert RUNNING in text
    assert 'http-equiv="refresh"' in text


class PageReader:
    """Loads the page repeatedly, from the message with its address until the server is gone."""

    def __init__(self) -> None:
        self.pages: list[str] = []
        self._thread: threading.Thread | None = None

    def handle_message(self, text: str) -> None:
        if "shown at" in text:
            self._thread = threading.Thread(target=self._read, args=(text.rpartition(" ")[2],))
            self._thread.start()

    def _read(self, address: str) -> None:
        try:
            while True:
                self.pages.append(urllib.request.urlopen(address, timeout=60).read().decode())
        except (urllib.error.URLError, ConnectionError):
            pass

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join()


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_a_run_is_served_live_and_its_report_exists_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("culm.observe.report.page_server._CACHE_S", 0.0)
    graph, reader = small_graph(), PageReader()
    running_reports: list[bool] = []
    callbacks = GnnCallbacks(
        on_message=reader.handle_message,
        on_epoch=lambda *_: running_reports.append(RUNNING in _report(tmp_path / "run")),
    )
    train(graph, small_model(graph), epochs=40, evaluate_every=5, workers=2, threads=1, latency_s=0.01, dash=True,
          out=str(tmp_path / "run"), callbacks=callbacks)  # fmt: skip
    reader.join()
    assert all(RUNNING in text for text in reader.pages)
    assert any("validation" in text and "now:" in text for text in reader.pages)
    assert running_reports[-1]
    report = _report(tmp_path / "run")
    assert RUNNING not in report
    assert "refresh" not in report.partition("<style>")[0]
    report_data = build_report_data(RunFolderReader(str(tmp_path / "run")).read())
    assert (
        report_data.state,
        report_data.graph,
        report_data.steps,
        report_data.steps_requested,
        report_data.every_sample_once,
    ) == (
        "done",
        True,
        40,
        40,
        True,
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert report_data.summary == summary


def _report(folder: Path) -> str:
    path = folder / "report.html"
    return path.read_text() if path.exists() else ""
