"""The page over HTTP: to this machine alone, to be read alone, and to nobody once it is over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from tests.observe.sample_runs import contents, steps

from culm.errors import UsageError
from culm.observe.report import html_page
from culm.observe.report.page_server import CachedView, is_loopback, serve_page


def request_all(
    *paths: str, method: str = "GET", host: str | None = None, window: CachedView | None = None
) -> list[Any]:
    """Status, headers and text of each answer."""

    async def ask() -> list[Any]:
        async with serve_page(window or CachedView(contents)) as address, aiohttp.ClientSession() as session:
            found = []
            for path in paths:
                headers = {} if host is None else {"Host": host}
                async with session.request(method, address + path, headers=headers) as answer:
                    found.append((answer.status, answer.headers, await answer.text()))
            return found

    return asyncio.run(ask())


def test_there_are_a_page_its_data_its_scripts_and_metrics() -> None:
    whole, data, figures, script, charting = request_all("", "data.json", "metrics", "page.js", "plotly.min.js")
    assert [status for status, *_ in (whole, data, figures, script, charting)] == [200] * 5
    assert "Every sample counted once" in whole[2]
    assert json.loads(data[2])["title"] == "culm: a: step 10 of 10"
    assert "culm_steps_total" in figures[2]
    assert figures[1]["Content-Type"].startswith("text/plain; version=0.0.4")
    assert charting[2] == html_page.plotly_script_path().read_text()
    assert "default-src 'none'" in whole[1]["Content-Security-Policy"]
    assert whole[1]["Cache-Control"] == "no-store"
    assert "Cache-Control" not in charting[1]


def test_a_client_with_the_newest_figures_gets_no_content() -> None:
    (_, headers, _), *_ = request_all("data.json")
    (status, _, text), (other, *_) = request_all(f"data.json?have={headers['X-Version']}", "data.json?have=older")
    assert (status, text, other) == (204, "", 200)


@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1:80", 200), ("localhost:80", 200), ("localhost", 200), ("[::1]:80", 200), ("evil.example:80", 403),
    ("127.0.0.1.evil.example", 403), ("", 403), ("10.0.0.1", 403),
])  # fmt: skip
def test_another_host_is_refused(host: str, status: int) -> None:
    """A web page from elsewhere may let its name point here; it must not read what is served here."""
    for answer in request_all("", "data.json", "metrics", host=host):
        assert answer[0] == status


def test_nothing_can_be_changed_and_nothing_else_is_there() -> None:
    assert request_all("", method="POST")[0][0] == 405
    assert [status for status, *_ in request_all("etc", "../setup", "plotly.min.js/..")] == [404, 404, 200]


def test_many_simultaneous_requests_read_the_run_once() -> None:
    looks: list[int] = []

    def look() -> Any:
        looks.append(1)
        return contents(steps=steps(len(looks)))

    for aside in (False, True):
        looks.clear()
        request_all("", "data.json", "metrics", window=CachedView(look, in_thread=aside))
        assert len(looks) == 1


def test_an_address_on_which_nothing_can_listen_is_refused() -> None:
    async def serve(host: str, port: int) -> None:
        async with serve_page(CachedView(contents), host=host, port=port):
            raise AssertionError

    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, port in (("127.0.0.1", taken.getsockname()[1]), ("192.0.2.1", 0), ("no such host", 0)):
            with pytest.raises(UsageError, match="cannot listen there"):
                asyncio.run(serve(host, port))


def test_which_hosts_are_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "127.1.2.3")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "")))


def visit_closing_server(visit: Callable[[int], Any]) -> bytes:
    """What a visitor hears after the end, who comes by `visit`."""

    async def run() -> bytes:
        with contextlib.ExitStack() as stack:
            async with serve_page(CachedView(contents)) as address:
                visitor = stack.enter_context(await visit(int(address.rstrip("/").rpartition(":")[2])))
            visitor.setblocking(False)
            with contextlib.suppress(ConnectionError):
                return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(visitor, 1), 30.0)
        return b""

    return asyncio.run(run())


def test_a_client_that_waits_for_the_page_is_disconnected_when_the_run_ends() -> None:
    async def visit(port: int) -> socket.socket:
        visitor = socket.create_connection(("127.0.0.1", port))
        visitor.sendall(b"GET / HTTP/1.1\r\n")  # and no more: the answer is not due yet
        for _ in range(20):
            await asyncio.sleep(0)
        return visitor

    assert visit_closing_server(visit) == b""


@pytest.mark.parametrize("turns", range(6))
def test_a_connection_at_the_end_of_the_run_is_closed(turns: int) -> None:
    async def visit(port: int) -> socket.socket:
        visitor = socket.create_connection(("127.0.0.1", port))
        for _ in range(turns):  # of the loop: a connection is let in over several of them
            await asyncio.sleep(0)
        return visitor

    assert visit_closing_server(visit) == b""
