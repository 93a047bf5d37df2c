"""Pages in a real browser: charts are drawn, nothing complains, nothing is asked of anybody else."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.observe.sample_runs import TRACE, contents, steps
from tests.observe.writers.test_run_folder_contents import job, run

from culm.observe.report import html_page
from culm.observe.report.load_run import RunContents, RunFolderReader
from culm.observe.report.page_layout import layout_run
from culm.observe.report.page_server import CachedView, serve_page
from culm.observe.report.report_data import build_report_data
from culm.testing import Faults

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.real,
    pytest.mark.waits(4),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine: apt-get install chromium"),
]
SLOW_MS = 60_000
INK = "document.querySelector('.chart')._fullLayout.font.color"


class Visit:
    """A page, and all that it said and asked for."""

    def __init__(self, browser: Any, scheme: str) -> None:
        self.page = browser.new_page(color_scheme=scheme)
        self.page.set_default_timeout(SLOW_MS)
        self.console: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def charts(self) -> int:
        """How many are drawn, with something in them."""
        return int(self.page.eval_on_selector_all(".chart", "all => all.filter(c => c.querySelector('.trace')).length"))

    def is_clean(self, host: str) -> bool:
        others = [
            url
            for url in self.requests
            if urlsplit(url).scheme not in ("data", "blob") and urlsplit(url).netloc != host
        ]
        return not self.console and not others


@pytest.fixture(scope="module")
def run_with_loss(tmp_path_factory: pytest.TempPathFactory) -> RunContents:
    """A run that lost a node."""
    out = str(tmp_path_factory.mktemp("runs") / "hurt")
    run(out, job(steps=6), faults=Faults().kill(node=3, step=2), strategy="reroute")
    return RunFolderReader(out).read()


@pytest.fixture(scope="module")
def browser(run_with_loss: RunContents) -> Iterator[Any]:
    """After the run, which needs the event loop of the thread for itself."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


def test_a_report_opens_from_disk_and_draws_every_chart_in_light_and_dark(
    browser: Any, run_with_loss: RunContents, tmp_path: Path
) -> None:
    view = layout_run(build_report_data(run_with_loss), run_with_loss.trace)
    (tmp_path / "report.html").write_text(html_page.standalone_page(view))
    visit = Visit(browser, "light")
    visit.page.goto((tmp_path / "report.html").as_uri())
    assert visit.charts() == sum(block.figure is not None for block in view.blocks) == 5
    light = visit.page.evaluate(INK)
    visit.page.emulate_media(color_scheme="dark")
    while visit.page.evaluate(INK) == light:
        pass
    assert visit.charts() == 5
    assert visit.is_clean("")
    assert "Every sample counted once" in visit.page.inner_text("#tiles")
    visit.page.close()


@contextmanager
def serving(given: list[RunContents]) -> Iterator[str]:
    """The last of these contents, served from a thread."""
    loop, over, there = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    found: list[str] = []

    async def serve() -> None:
        async with serve_page(CachedView(lambda: given[-1])) as address:
            found.append(address)
            there.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    there.wait()
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def test_a_live_page_follows_its_run_without_being_loaded_again(browser: Any) -> None:
    given = [contents(summary=None, steps=steps(5), events=contents().events[:8], idle_s=1.0)]
    with serving(given) as address:
        visit = Visit(browser, "dark")
        visit.page.goto(address)
        assert "step 5 of 10" in visit.page.inner_text("#head")
        assert visit.charts() == 4
        visit.page.evaluate("document.getElementById('chart-pace').kept = true")
        given.append(contents(trace=TRACE))
        visit.page.wait_for_selector("#timeline .trace", state="attached")
        assert "step 10 of 10" in visit.page.inner_text("#head")
        assert visit.page.title() == "culm: a: step 10 of 10"
        assert visit.page.locator("#recoveries tbody tr").count() == 1
        assert visit.page.evaluate("document.getElementById('chart-pace').kept")
        assert visit.is_clean(urlsplit(address).netloc)
    visit.page.wait_for_selector("#hush", state="attached")
    visit.page.close()
