"""A fake metadata service of a cloud, on loopback, that gives the answers of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from culm.runtime.clock import RealClock

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class FakeMetadata:
    """The URL of the service and the requests it received."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    """Method and path with query of every request, in order."""


@asynccontextmanager
async def metadata(answer: Handler) -> AsyncIterator[FakeMetadata]:
    """Serve until the block ends; every request goes to `answer`."""
    fake = FakeMetadata()

    async def handle(request: web.Request) -> web.StreamResponse:
        fake.asked.append(f"{request.method} {request.path_qs}")
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{anything:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    fake.url = f"http://{host}:{port}"
    try:
        yield fake
    finally:
        await runner.cleanup()


class Hasty(RealClock):
    """A clock that does not wait: sleeping takes one loop iteration, and the durations are recorded."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)
