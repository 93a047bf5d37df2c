"""The page of a run over HTTP, and its figures for Prometheus: a thin shell around `facts`, `view` and `page`.

Whoever looks can change nothing. A host that is not this machine is refused, unless the server was told to listen to
others: a web page from elsewhere must not read here.
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
from culm.observe import page
from culm.observe.facts import Facts, facts
from culm.observe.metrics import KIND, metrics
from culm.observe.reading import Contents
from culm.observe.view import View, of_run

if TYPE_CHECKING:
    from culm.checkpoint.storage import Storage

Look = Callable[[], Contents]
LOOPBACK = "127.0.0.1"
_FRESH_S = 1.0
"""A look is good for so long, however many look."""
_SHARE = 10
"""And for so many times as long as it took: looking takes a tenth of a process at most."""
_EVERY_S = 10
"""Between two pages that are written to a file."""
_ADMISSION = 3
"""Turns of the loop from a connection being accepted to its being known here. A server that is closed in between leaves
it open, and who came waits in vain."""


class Window:
    """What is seen of a run: made anew when somebody looks and the last look is old."""

    def __init__(self, look: Look, *, aside: bool = False) -> None:
        """`aside`: looking takes its time, and is done in a thread, as is all that is made of it."""
        self._look, self._aside = look, aside
        self._good_until = 0.0
        self._turn = asyncio.Lock()
        self._seen: tuple[Facts, View] | None = None

    async def facts(self) -> Facts:
        return (await self._fresh())[0]

    async def view(self) -> View:
        return (await self._fresh())[1]

    async def _fresh(self) -> tuple[Facts, View]:
        async with self._turn:
            began = time.monotonic()
            if self._seen is None or began >= self._good_until:
                contents = await asyncio.to_thread(self._look) if self._aside else self._look()
                self._seen = await asyncio.to_thread(_made, contents)
                now = time.monotonic()
                self._good_until = now + max(_FRESH_S, _SHARE * (now - began))
            return self._seen


def _made(contents: Contents) -> tuple[Facts, View]:
    found = facts(contents)
    return found, of_run(found, contents.trace)


@contextlib.asynccontextmanager
async def served(window: Window, *, host: str = LOOPBACK, port: int = 0) -> AsyncIterator[str]:
    """Serve a run; yields the address. Afterwards nobody is left waiting for an answer.

    UsageError: nobody can listen there, or plotly is not installed.
    """
    page.charting()
    listening = _listening(host, port)
    runner = web.AppRunner(_application(window, host), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listening.getsockname()[1]}/"
    finally:
        asyncio.get_running_loop().remove_reader(listening)
        for _ in range(_ADMISSION):
            await asyncio.sleep(0)
        await runner.cleanup()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--host {host} --port {port}: nobody can listen there ({why}): choose another") from None


def local(host: str) -> bool:
    """Whether a host is this machine, as seen from itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _application(window: Window, host: str) -> web.Application:
    made = web.Application(middlewares=[_guarded(everybody=not local(host))])

    async def whole(_: web.Request) -> web.Response:
        return web.Response(text=page.served(await window.view()), content_type="text/html")

    async def data(request: web.Request) -> web.Response:
        view = await window.view()
        if request.query.get("have") == view.version:
            return web.Response(status=204)
        return web.Response(body=view.data, content_type="application/json", headers={"X-Version": view.version})

    async def figures(_: web.Request) -> web.Response:
        return web.Response(body=metrics(await window.facts()).encode(), headers={"Content-Type": KIND})

    async def script(_: web.Request) -> web.Response:
        return web.Response(text=page.script(), content_type="text/javascript")

    async def charting(_: web.Request) -> web.FileResponse:
        return web.FileResponse(page.charting(), headers={"Content-Type": "text/javascript; charset=utf-8"})

    routes = {"/": whole, "/data.json": data, "/metrics": figures, "/page.js": script, "/plotly.min.js": charting}
    for path, answer in routes.items():
        made.router.add_get(path, answer)
    return made


def _guarded(*, everybody: bool) -> Middleware:
    """Refuses hosts that are not this machine, unless everybody may look; and lets nothing be loaded from elsewhere."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not everybody and not local(_named(request.headers.get("Host", ""))):
            return web.Response(status=403, text="this page is for this machine alone")
        try:
            answer = await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as refused:
            answer = web.Response(status=refused.status, text="there are / and /metrics here, to be read")
        answer.headers["Content-Security-Policy"] = page.SERVED
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.headers["Referrer-Policy"] = "no-referrer"
        if request.path != "/plotly.min.js":
            answer.headers["Cache-Control"] = "no-store"
        return answer

    return guard


def _named(host: str) -> str:
    """The host of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


async def kept_fresh(look: Look, storage: Storage, name: str) -> None:
    """Write the page now and then, until cancelled. Not in a thread: that might outlive this, and the last page."""
    while True:
        began = time.monotonic()
        storage.write(name, report(look(), again_s=_EVERY_S).encode())
        await asyncio.sleep(max(_EVERY_S, 50 * (time.monotonic() - began)))  # the script makes it large, disks are slow


def report(contents: Contents, *, again_s: int | None = None) -> str:
    """A run as one file."""
    return page.alone(of_run(facts(contents), contents.trace), again_s=again_s)
