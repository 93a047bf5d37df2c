"""The page of a graph run: over HTTP while it goes, as a file all the time. What pages are: tests/observe."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.gnn.house import small_graph, small_model

from culm.checkpoint.storage import Storage
from culm.gnn import Watcher, train
from culm.observe.facts import facts
from culm.observe.reading import Contents, Folder, Step
from culm.observe.serving import kept_fresh

RUNNING = 'class="state running"'


def test_what_is_written_is_what_is_seen_at_that_moment_and_is_looked_at_again(tmp_path: Path) -> None:
    async def look() -> str:
        given = Contents(name="one", steps=[Step(0, 1.0, 0.5)], live=True)
        writing = asyncio.create_task(kept_fresh(lambda: given, Storage(str(tmp_path)), "report.html"))
        while not (tmp_path / "report.html").exists():
            await asyncio.sleep(0)
        writing.cancel()
        return (tmp_path / "report.html").read_text()

    text = asyncio.run(look())
    assert RUNNING in text
    assert 'http-equiv="refresh"' in text


class Reader:
    """Loads the page over and over, from the moment its address is told until nobody answers."""

    def __init__(self) -> None:
        self.pages: list[str] = []
        self._thread: threading.Thread | None = None

    def told(self, text: str) -> None:
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


@pytest.mark.usefixtures("forked")
@pytest.mark.real
def test_a_run_is_shown_while_it_goes_and_its_report_is_there_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("culm.observe.serving._FRESH_S", 0.0)
    graph, reader = small_graph(), Reader()
    there: list[bool] = []
    watcher = Watcher(told=reader.told, epoch=lambda *_: there.append(RUNNING in _report(tmp_path / "run")))
    train(graph, small_model(graph), epochs=40, evaluate_every=5, workers=2, threads=1, latency_s=0.01, dash=True,
          out=str(tmp_path / "run"), watcher=watcher)  # fmt: skip
    reader.join()
    assert all(RUNNING in text for text in reader.pages)
    assert any("validation" in text and "now:" in text for text in reader.pages)
    assert there[-1]
    report = _report(tmp_path / "run")
    assert RUNNING not in report
    assert "refresh" not in report.partition("<style>")[0]
    found = facts(Folder(str(tmp_path / "run")).look())
    assert (found.state, found.graph, found.steps, found.asked, found.once) == ("done", True, 40, 40, True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found.summary == summary


def _report(folder: Path) -> str:
    found = folder / "report.html"
    return found.read_text() if found.exists() else ""
