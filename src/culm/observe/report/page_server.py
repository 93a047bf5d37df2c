"""Serves the page of a run over HTTP, and its figures for Prometheus.

The page is read-only. Requests with a Host header other than this machine are refused unless the server listens on an
external address: otherwise a web page elsewhere could read it through DNS rebinding.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from culm.errors import UsageError
from culm.observe.report import html_page
from culm.observe.report.load_run import RunContents
from culm.observe.report.page_layout import PageLayout, layout_run
from culm.observe.report.report_data import ReportData, build_report_data
from culm.observe.writers.prometheus import CONTENT_TYPE, prometheus_figures, prometheus_text

if TYPE_CHECKING:
    from culm.checkpoint.storage import Storage

ReadContents = Callable[[], RunContents]
LOOPBACK = "127.0.0.1"
_CACHE_S = 1.0
"""Contents are cached at least this long."""
_MIN_CACHE_FACTOR = 10
"""And this many times as long as reading took, so that reading takes at most a tenth of the time."""
_REWRITE_S = 10
"""Seconds between two writes of a page to a file."""
_ACCEPT_ROUNDS = 3
"""Iterations of the event loop between accepting a connection and handling it. A server that is closed in between would
leave the connection open without an answer."""


class CachedView:
    """The facts and page of a run, computed again on access when the cached ones are old."""

    def __init__(self, read: ReadContents, *, in_thread: bool = False) -> None:
        """`in_thread`: call `read` in a thread, because it does I/O."""
        self._read, self._in_thread = read, in_thread
        self._expires_at = 0.0
        self._refresh_lock = asyncio.Lock()
        self._cached: tuple[ReportData, PageLayout] | None = None

    async def report_data(self) -> ReportData:
        return (await self._refresh())[0]

    async def page(self) -> PageLayout:
        return (await self._refresh())[1]

    async def _refresh(self) -> tuple[ReportData, PageLayout]:
        async with self._refresh_lock:
            began = time.monotonic()
            if self._cached is None or began >= self._expires_at:
                contents = await asyncio.to_thread(self._read) if self._in_thread else self._read()
                self._cached = await asyncio.to_thread(_build, contents)
                now = time.monotonic()
                self._expires_at = now + max(_CACHE_S, _MIN_CACHE_FACTOR * (now - began))
            return self._cached


def _build(contents: RunContents) -> tuple[ReportData, PageLayout]:
    found = build_report_data(contents)
    return found, layout_run(found, contents.trace)


@contextlib.asynccontextmanager
async def serve_page(window: CachedView, *, host: str = LOOPBACK, port: int = 0) -> AsyncIterator[str]:
    """Serve a run and yield the address. On exit all requests are answered.

    Raises UsageError if the address is not available, or if plotly is not installed.
    """
    html_page.plotly_script_path()
    listening = _listen_socket(host, port)
    runner = web.AppRunner(_application(window, host), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listening.getsockname()[1]}/"
    finally:
        asyncio.get_running_loop().remove_reader(listening)
        for _ in range(_ACCEPT_ROUNDS):
            await asyncio.sleep(0)
        await runner.cleanup()


def _listen_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--host {host} --port {port}: cannot listen there ({why}): choose another") from None


def is_loopback(host: str) -> bool:
    """Whether a host name or address is loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _application(window: CachedView, host: str) -> web.Application:
    app = web.Application(middlewares=[_host_guard(allow_any_host=not is_loopback(host))])

    async def whole(_: web.Request) -> web.Response:
        return web.Response(text=html_page.live_page(await window.page()), content_type="text/html")

    async def data(request: web.Request) -> web.Response:
        view = await window.page()
        if request.query.get("have") == view.version:
            return web.Response(status=204)
        return web.Response(body=view.data, content_type="application/json", headers={"X-Version": view.version})

    async def figures(_: web.Request) -> web.Response:
        text = prometheus_text(prometheus_figures(await window.report_data()))
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def script(_: web.Request) -> web.Response:
        return web.Response(text=html_page.page_script(), content_type="text/javascript")

    async def charting(_: web.Request) -> web.FileResponse:
        return web.FileResponse(
            html_page.plotly_script_path(), headers={"Content-Type": "text/javascript; charset=utf-8"}
        )

    routes = {"/": whole, "/data.json": data, "/metrics": figures, "/page.js": script, "/plotly.min.js": charting}
    for path, answer in routes.items():
        app.router.add_get(path, answer)
    return app


def _host_guard(*, allow_any_host: bool) -> Middleware:
    """Refuse Host headers other than this machine, unless any host is allowed, and set security headers."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not allow_any_host and not is_loopback(_host_name(request.headers.get("Host", ""))):
            return web.Response(status=403, text="this page is for this machine alone")
        try:
            answer = await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as refused:
            answer = web.Response(status=refused.status, text="there are / and /metrics here, to be read")
        answer.headers["Content-Security-Policy"] = html_page.SERVED_CSP
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.headers["Referrer-Policy"] = "no-referrer"
        if request.path != "/plotly.min.js":
            answer.headers["Cache-Control"] = "no-store"
        return answer

    return guard


def _host_name(host: str) -> str:
    """The host of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


async def rewrite_periodically(read: ReadContents, storage: Storage, name: str) -> None:
    """Write the page periodically until cancelled. Not in a thread, which could outlive the cancellation and overwrite
    the final page."""
    while True:
        began = time.monotonic()
        storage.write(name, standalone_report(read(), refresh_s=_REWRITE_S).encode())
        await asyncio.sleep(
            max(_REWRITE_S, 50 * (time.monotonic() - began))
        )  # the page includes plotly: several megabytes


def standalone_report(contents: RunContents, *, refresh_s: int | None = None) -> str:
    """The page of a run as one HTML file."""
    return html_page.standalone_page(layout_run(build_report_data(contents), contents.trace), refresh_s=refresh_s)
