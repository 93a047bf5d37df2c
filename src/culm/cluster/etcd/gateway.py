"""Calls to etcd over its JSON gateway: several endpoints, a password, and outages that calls wait out.

Not gRPC: grpcio starts threads, and aetcd 1.0, the kept asyncio client over it, speaks neither TLS nor to a second
endpoint.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec

from culm.cluster.etcd.access import Access, tls
from culm.cluster.etcd.refusals import Gone, Refused, StaleToken, Unreachable, broken, fault_of, unsafe, unusable
from culm.cluster.etcd.wire import (
    RangeAnswer,
    StatusAnswer,
    TokenAnswer,
    TxnAnswer,
    WatchAnswer,
    WatchMessage,
    decode,
    encode,
)
from culm.errors import CulmError, RunError, UsageError

if TYPE_CHECKING:
    from culm.runtime.clock import Clock

T = TypeVar("T")
_BROKEN = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_BYTES_PER_S = 2**18
"""That a busy etcd takes at the least."""


class Gateway:
    """One client's way to etcd.

    A call is tried at one endpoint after the other until one answers, for as long as an outage lasts. What etcd refuses
    raises RunError, and UsageError until `opened` is set; a lease that is not there raises Gone. After `fail` every
    call and stream raises what it was given: those that wait, and those to come.
    """

    def __init__(self, access: Access, clock: Clock, *, attempt_s: float, note: Callable[[str], None]) -> None:
        self.access, self._clock, self._note = access, clock, note
        self._attempt_s = attempt_s
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls(access) or True, limit=0))
        self._turn = 0
        """How often the endpoint was changed."""
        self._turned = asyncio.Event()
        self._token = ""
        self._revision = 0
        """The highest that an answer came with."""
        self._out_since: float | None = None
        self.opened = False
        self.ended: asyncio.Future[CulmError] = asyncio.get_running_loop().create_future()

    async def find(self, patience_s: float) -> None:
        """Look for an endpoint that answers. UsageError: none does, and why; where waiting is in vain, at once."""
        until, troubles = self._clock.now() + patience_s, dict[str, Unreachable]()
        while True:
            try:
                status = await self.attempt("/v3/maintenance/status", {}, StatusAnswer)
                break
            except Refused as error:
                raise UsageError(str(error)) from None
            except Unreachable as trouble:
                troubles[self.endpoint] = trouble
            hopeless = len(troubles) == len(set(self.access.endpoints)) and all(t.final for t in troubles.values())
            if hopeless or self._clock.now() >= until:
                raise UsageError(unusable(troubles))
            self._turn += 1
            await self._clock.sleep(_FIRST_PAUSE_S)
        if unsafe(status.version, self.endpoint):
            self._note(f"etcd {status.version} can lose data when it is killed under load: use 3.5.3 or newer")

    async def close(self) -> None:
        """Whoever still waits gets RunError."""
        self.fail(RunError("the connection to the store was closed"))
        await self._http.close()

    def fail(self, error: CulmError) -> None:
        """The first one stays."""
        if not self.ended.done():
            self.ended.set_result(error)
            self._turned.set()

    def check(self) -> None:
        if self.ended.done():
            error = self.ended.result()
            raise type(error)(str(error))  # a new one each time: a raised error collects where it has been

    @property
    def endpoint(self) -> str:
        return self.access.endpoints[self._turn % len(self.access.endpoints)]

    async def call(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        """One call. It may have come through several times when this returns: what it asks for must bear that."""
        for tries in itertools.count(1):
            self.check()
            turn, seen = self._turn, self._revision
            try:
                found = await self.attempt(path, body, kind)
            except Gone:
                raise
            except Refused as error:
                raise (RunError if self.opened else UsageError)(str(error)) from None
            except Unreachable as trouble:
                self._move_on(turn, trouble)
                await self._pause(tries)
            else:
                self._in_reach()
                self._look_back(found, seen)
                return found
        raise AssertionError("the loop above has no end")

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[WatchAnswer, None]:
        """The messages of one watch, for as long as its connection lasts; Unreachable when that breaks.

        It also ends when a call finds this endpoint dead: a connection to a silent machine would never break by itself.
        """
        self.check()
        turn, turned = self._turn, self._turned
        try:
            await self._log_in()
            async with self._post(path, body, lasting=True) as response:
                await self._accept(response)
                async for line in _lines(response, turned):
                    yield self._message(line)
            raise Unreachable(f"{self.endpoint} has ended a watch")
        except Refused as error:
            raise RunError(str(error)) from None
        except StaleToken:
            raise Unreachable("the token has ended") from None
        except Unreachable as trouble:
            self.check()
            self._move_on(turn, trouble)
            raise

    async def rest(self, rounds: int) -> None:
        """A pause before trying again, longer each time; it ends early with the gateway."""
        seconds = min(_FIRST_PAUSE_S * 2.0 ** min(rounds, 9), _LONGEST_PAUSE_S)
        resting = asyncio.ensure_future(self._clock.sleep(seconds))
        either: list[asyncio.Future[Any]] = [resting, self.ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            resting.cancel()

    async def attempt(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        """One try at one endpoint, and a second one if the password only has to be shown again."""
        for _ in range(2):
            try:
                await self._log_in()
                return await self._answer(path, body, kind)
            except StaleToken:
                continue
        raise Unreachable(f"{self.endpoint} does not take the token that it has just given")

    async def _log_in(self) -> None:
        if self.access.user and not self._token:
            login = {"name": self.access.user, "password": self.access.password}
            self._token = (await self._answer("/v3/auth/authenticate", login, TokenAnswer)).token

    async def _answer(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        async with self._post(path, body) as response:
            await self._accept(response)
            try:
                return decode(await response.read(), kind)
            except msgspec.MsgspecError:
                raise Unreachable(f"{self.endpoint} answers, but not as etcd does", final=True) from None

    @asynccontextmanager
    async def _post(
        self, path: str, body: dict[str, Any], *, lasting: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask the endpoint of now. It must begin to answer in time, and go on in time unless the answer is lasting."""
        endpoint, data = self.endpoint, encode(body)
        if self._http.closed:
            raise Unreachable("the connection was closed")
        headers = {"Authorization": self._token} if self._token else None
        patience = self._attempt_s + len(data) / _BYTES_PER_S
        pieces = aiohttp.ClientTimeout(sock_read=None if lasting else patience)
        try:
            async with (
                asyncio.timeout(patience) as beginning,
                self._http.post(
                    endpoint + path, data=data, headers=headers, timeout=pieces, allow_redirects=False
                ) as response,
            ):
                beginning.reschedule(None)
                yield response
        except _BROKEN as error:
            raise broken(error, endpoint) from error

    async def _accept(self, response: aiohttp.ClientResponse) -> None:
        """Nothing, if etcd is about to do what was asked; else what it said."""
        if response.status == 200:
            return
        trouble = fault_of(await response.read(), response.status, self.endpoint, self.access)
        if isinstance(trouble, StaleToken) and response.request_info.headers.get("Authorization") == self._token:
            self._token = ""
        raise trouble

    def _message(self, line: bytes) -> WatchAnswer:
        message = decode(line, WatchMessage)
        if message.result is None or (message.result.canceled and not message.result.compact_revision):
            self._token = ""  # a watch with an ended token is cancelled, and does not say that this is why
            raise Unreachable(f"{self.endpoint} has cancelled a watch")
        return message.result

    def _look_back(self, found: object, seen: int) -> None:
        """Who has seen a revision never believes a lower one: etcd would have lost what everybody agreed on."""
        if not isinstance(found, RangeAnswer | TxnAnswer):
            return
        if found.header.revision < seen:
            self.fail(
                RunError(
                    f"etcd went back from revision {seen} to {found.header.revision}: its data was lost or replaced; "
                    "start the run anew with --resume"
                )
            )
            self.check()
        self._revision = max(self._revision, found.header.revision)

    def _move_on(self, turn: int, trouble: Unreachable) -> None:
        """Leave an endpoint, unless somebody did already: the next one, and all streams anew."""
        if self._out_since is None:
            self._out_since = self._clock.now()
            self._note(f"etcd is out of reach: {trouble}")
        if turn == self._turn:
            self._turn += 1
            self._token = ""  # an etcd without its data would wait for the day on which it was given
            self._turned.set()
            self._turned = asyncio.Event()

    def _in_reach(self) -> None:
        if self._out_since is not None:
            self._note(f"etcd is in reach again after {self._clock.now() - self._out_since:.1f} s")
            self._out_since = None

    async def _pause(self, tries: int) -> None:
        """After each round through all endpoints."""
        rounds, rest = divmod(tries, len(self.access.endpoints))
        if rest == 0:
            await self.rest(rounds)


async def _lines(response: aiohttp.ClientResponse, turned: asyncio.Event) -> AsyncIterator[bytes]:
    """Split by hand: the library's own lines end at 64 KiB or so, and a value may have 1.5 MiB."""
    rest = b""
    while chunk := await _unless(turned, response.content.readany()):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


async def _unless(turned: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Work that ends early, with Unreachable, when another endpoint is used."""
    working, turning = asyncio.ensure_future(work), asyncio.ensure_future(turned.wait())
    try:
        await asyncio.wait([working, turning], return_when=asyncio.FIRST_COMPLETED)
        if turning.done():
            raise Unreachable("another endpoint is used now")
        return working.result()
    finally:
        working.cancel()
        turning.cancel()
        await asyncio.gather(working, turning, return_exceptions=True)
