"""The page of a run: over HTTP while it goes, as a file all the time, for people on this machine alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.gnn.house import small_graph, small_model

from culm.checkpoint.storage import Storage
from culm.gnn import Watcher, train
from culm.gnn.dash import kept_fresh, response, served
from culm.gnn.page import page

EVENTS = [
    {"t": 1.0, "kind": "queues", "workers": 3, "queue": 5, "running": 2, "spread": 1},
    {"t": 1.5, "kind": "evaluation", "epoch": 4, "train": 0.9, "val": 0.8, "test": 0.7},
    {"t": 2.0, "kind": "server-lost", "node": "<graph-0>"},
]
STEPS = [{"t": 0.5, "step": 0, "loss": 1.0}, {"t": 1.0, "step": 1, "loss": 0.5}]


class Tags(HTMLParser):
    """What a browser would see: tags, headings, and whether all that opens closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_live_page_is_loaded_again_and_says_how_it_stands() -> None:
    text = page({"graph": "cora"}, EVENTS, STEPS, live=True)
    assert 'http-equiv="refresh"' in text
    assert "now: 3 workers, 5 tasks waiting, 2 with workers, 1 passes between" in text
    headings = " ".join(Tags(text).words)
    for name in ("loss", "accuracy", "tasks", "workers", "passes between the fastest and the slowest interval"):
        assert name in headings
    assert Tags(text).seen.count("svg") == 5
    assert "script" not in Tags(text).seen
    assert "<graph-0>" not in text


def test_the_page_of_a_run_that_has_ended_stays_as_it_is() -> None:
    text = page({"graph": "cora"}, EVENTS, STEPS)
    assert "refresh" not in text
    assert "now:" not in text


def test_a_long_run_has_no_more_points_than_can_be_told_apart_and_its_last_one() -> None:
    steps = [{"t": float(n), "step": n, "loss": 1.0 / (n + 1)} for n in range(10_001)]
    points = page({}, [], steps).partition('points="')[2].partition('"')[0].split()
    assert 300 < len(points) <= 600
    assert points[-1].startswith("632.0,")


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ("GET / HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n", b"200"),
        ("GET / HTTP/1.1\r\nhost: localhost:80\r\n\r\n", b"200"),
        ("GET / HTTP/1.1\r\nHost: evil.example:80\r\n\r\n", b"403"),
        ("GET / HTTP/1.1\r\n\r\n", b"403"),
        ("GET /etc HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n", b"404"),
        ("POST / HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n", b"404"),
        ("", b"403"),
    ],
)
def test_there_is_one_page_and_only_this_machine_gets_it(asked: str, status: bytes) -> None:
    assert response(asked, lambda: "<p>").split()[1] == status


def test_what_is_served_and_written_is_what_is_rendered_at_that_moment(tmp_path: Path) -> None:
    rendered = iter(["one", "two", "three"])

    async def look() -> tuple[str, str]:
        async with served(lambda: next(rendered)) as address:
            first = await asyncio.to_thread(lambda: urllib.request.urlopen(address).read().decode())
            writing = asyncio.create_task(kept_fresh(lambda: next(rendered), Storage(str(tmp_path)), "report.html"))
            while not (tmp_path / "report.html").exists():
                await asyncio.sleep(0)
            writing.cancel()
            return first, (tmp_path / "report.html").read_text()

    assert asyncio.run(look()) == ("one", "two")


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
def test_a_run_is_shown_while_it_goes_and_its_report_is_there_from_the_start(tmp_path: Path) -> None:
    graph, reader = small_graph(), Reader()
    there: list[bool] = []
    watcher = Watcher(told=reader.told, epoch=lambda *_: there.append("(running)" in _report(tmp_path / "run")))
    train(graph, small_model(graph), epochs=40, evaluate_every=5, workers=2, threads=1, latency_s=0.01, dash=True,
          out=str(tmp_path / "run"), watcher=watcher)  # fmt: skip
    reader.join()
    assert all("(running)" in text for text in reader.pages)
    assert any("validation" in text and "now:" in text for text in reader.pages)
    assert there[-1]
    assert "(running)" not in _report(tmp_path / "run")


def _report(folder: Path) -> str:
    found = folder / "report.html"
    return found.read_text() if found.exists() else ""


def test_who_waits_for_the_page_when_the_run_ends_is_hung_up_on() -> None:
    async def visit() -> bytes:
        async with served(lambda: "page") as address:
            port = int(address.rstrip("/").rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n")  # and no more: the answer is not due yet
            await writer.drain()
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), 30.0)
        return b""

    assert asyncio.run(visit()) == b""


@pytest.mark.parametrize("turns", range(6))
def test_who_comes_at_the_moment_when_the_run_ends_is_hung_up_on(turns: int) -> None:
    async def visit() -> bytes:
        with contextlib.ExitStack() as stack:
            async with served(lambda: "page") as address:
                port = int(address.rstrip("/").rpartition(":")[2])
                visitor = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                for _ in range(turns):  # of the loop: a connection is let in over several of them
                    await asyncio.sleep(0)
            visitor.setblocking(False)
            with contextlib.suppress(ConnectionError):
                return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(visitor, 1), 30.0)
        return b""

    assert asyncio.run(visit()) == b""
