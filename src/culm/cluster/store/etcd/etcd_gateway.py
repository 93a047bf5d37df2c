"""Calls to etcd over its JSON gateway: several endpoints, a password, and calls that wait through outages.

Not gRPC: grpcio starts threads, and aetcd 1.0, the maintained asyncio client over it, supports neither TLS nor a second
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

from culm.cluster.store.etcd.etcd_access import EtcdAccess, tls_context
from culm.cluster.store.etcd.etcd_errors import (
    AuthTokenExpired,
    EtcdRefused,
    EtcdUnreachable,
    LeaseNotFound,
    error_from_exception,
    error_from_response,
    loses_data_when_killed,
    no_endpoint_message,
)
from culm.cluster.store.etcd.etcd_messages import (
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
_CONNECTION_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
_MIN_RETRY_DELAY_S, _MAX_RETRY_DELAY_S = 0.02, 0.5
_MIN_BYTES_PER_S = 2**18
"""Lower bound for the upload rate of a busy etcd."""


class EtcdGateway:
    """One client's connection to etcd.

    A call is tried at one endpoint after the other until one answers, for as long as an outage lasts. A refusal raises
    RunError, or UsageError while `is_open` is not set; a missing lease raises LeaseNotFound. After `fail`, all current
    and later calls and streams raise the given error.
    """

    def __init__(
        self,
        access: EtcdAccess,
        clock: Clock,
        *,
        attempt_timeout_s: float,
        log: Callable[[str], None],
        seen_revision: int = 0,
    ) -> None:
        """`seen_revision`: the highest revision that an earlier client of this process has seen."""
        self.access, self._clock, self._log = access, clock, log
        self._attempt_timeout_s = attempt_timeout_s
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls_context(access) or True, limit=0))
        self._endpoint_index = 0
        """How often the endpoint was switched."""
        self._endpoint_changed = asyncio.Event()
        self._token = ""
        self._revision = seen_revision
        """The highest revision in any answer."""
        self._unreachable_since: float | None = None
        self.is_open = False
        self.failure: asyncio.Future[CulmError] = asyncio.get_running_loop().create_future()

    async def find_endpoint(self, timeout_s: float) -> None:
        """Find an endpoint that answers within `timeout_s`. Raises UsageError with the reasons if none does; at once if
        waiting cannot help."""
        until, errors = self._clock.now() + timeout_s, dict[str, EtcdUnreachable]()
        while True:
            try:
                status = await self.attempt("/v3/maintenance/status", {}, StatusAnswer)
                break
            except EtcdRefused as error:
                raise UsageError(str(error)) from None
            except EtcdUnreachable as error:
                errors[self.endpoint] = error
            is_permanent = len(errors) == len(set(self.access.endpoints)) and all(
                t.is_permanent for t in errors.values()
            )
            if is_permanent or self._clock.now() >= until:
                raise UsageError(no_endpoint_message(errors))
            self._endpoint_index += 1
            await self._clock.sleep(_MIN_RETRY_DELAY_S)
        if loses_data_when_killed(status.version, self.endpoint):
            self._log(
                f"etcd {status.version} can lose data when it is killed under load: use 3.5.3 or newer (culm head and "
                "culm launch take one from PATH)"
            )

    async def close(self) -> None:
        """Close the connection. Waiting calls raise RunError."""
        self.fail(RunError("the connection to the store was closed"))
        await self._http.close()

    def fail(self, error: CulmError) -> None:
        """Fail all calls with this error. Only the first call has an effect."""
        if not self.failure.done():
            self.failure.set_result(error)
            self._endpoint_changed.set()

    def raise_if_failed(self) -> None:
        if self.failure.done():
            error = self.failure.result()
            raise type(error)(str(error))  # a new one each time, because a raised error accumulates its traceback

    @property
    def seen_revision(self) -> int:
        """The highest revision in any answer."""
        return self._revision

    @property
    def endpoint(self) -> str:
        return self.access.endpoints[self._endpoint_index % len(self.access.endpoints)]

    async def call(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        """Call etcd. The request may have been executed several times when this returns: it must be idempotent."""
        for tries in itertools.count(1):
            self.raise_if_failed()
            index, seen = self._endpoint_index, self._revision
            try:
                answer = await self.attempt(path, body, kind)
            except LeaseNotFound:
                raise
            except EtcdRefused as error:
                raise (RunError if self.is_open else UsageError)(str(error)) from None
            except EtcdUnreachable as error:
                self._switch_endpoint(index, error)
                await self._wait_after_round(tries)
            else:
                self._note_reachable()
                self._check_revision(answer, seen)
                return answer
        raise AssertionError("the loop above never ends")

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[WatchAnswer, None]:
        """Yield the messages of one watch. Raises EtcdUnreachable when its connection breaks.

        It also ends when another call finds this endpoint dead: a connection to a silent machine never breaks by
        itself.
        """
        self.raise_if_failed()
        index, endpoint_changed = self._endpoint_index, self._endpoint_changed
        try:
            await self._log_in()
            async with self._post(path, body, streaming=True) as response:
                await self._raise_for_status(response)
                async for line in _read_lines(response, endpoint_changed):
                    yield self._parse_watch_message(line)
            raise EtcdUnreachable(f"{self.endpoint} has ended a watch")
        except EtcdRefused as error:
            raise RunError(str(error)) from None
        except AuthTokenExpired:
            raise EtcdUnreachable("the token has expired") from None
        except EtcdUnreachable as error:
            self.raise_if_failed()
            self._switch_endpoint(index, error)
            raise

    async def wait_before_retry(self, rounds: int) -> None:
        """Pause before a retry, longer each time; ends early if the gateway fails."""
        seconds = min(_MIN_RETRY_DELAY_S * 2.0 ** min(rounds, 9), _MAX_RETRY_DELAY_S)
        sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
        either: list[asyncio.Future[Any]] = [sleeping, self.failure]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()

    async def attempt(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        """Try one endpoint once, and again if only the token has expired."""
        for _ in range(2):
            try:
                await self._log_in()
                return await self._post_and_decode(path, body, kind)
            except AuthTokenExpired:
                continue
        raise EtcdUnreachable(f"{self.endpoint} rejects the token that it has just issued")

    async def _log_in(self) -> None:
        if self.access.user and not self._token:
            login = {"name": self.access.user, "password": self.access.password}
            self._token = (await self._post_and_decode("/v3/auth/authenticate", login, TokenAnswer)).token

    async def _post_and_decode(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        async with self._post(path, body) as response:
            await self._raise_for_status(response)
            try:
                return decode(await response.read(), kind)
            except msgspec.MsgspecError:
                raise EtcdUnreachable(f"{self.endpoint} answers, but not as etcd does", is_permanent=True) from None

    @asynccontextmanager
    async def _post(
        self, path: str, body: dict[str, Any], *, streaming: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post to the current endpoint. The answer must start in time and, unless `streaming`, continue in time."""
        endpoint, data = self.endpoint, encode(body)
        if self._http.closed:
            raise EtcdUnreachable("the connection was closed")
        headers = {"Authorization": self._token} if self._token else None
        limit = self._attempt_timeout_s + len(data) / _MIN_BYTES_PER_S
        timeout = aiohttp.ClientTimeout(sock_read=None if streaming else limit)
        try:
            async with (
                asyncio.timeout(limit) as deadline,
                self._http.post(
                    endpoint + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
                ) as response,
            ):
                deadline.reschedule(None)
                yield response
        except _CONNECTION_ERRORS as error:
            raise error_from_exception(error, endpoint) from error

    async def _raise_for_status(self, response: aiohttp.ClientResponse) -> None:
        """Raise the error of an answer other than 200."""
        if response.status == 200:
            return
        error = error_from_response(await response.read(), response.status, self.endpoint, self.access)
        if isinstance(error, AuthTokenExpired) and response.request_info.headers.get("Authorization") == self._token:
            self._token = ""
        raise error

    def _parse_watch_message(self, line: bytes) -> WatchAnswer:
        message = decode(line, WatchMessage)
        if message.result is None or (message.result.canceled and not message.result.compact_revision):
            self._token = ""  # etcd cancels a watch whose token has expired without saying why
            raise EtcdUnreachable(f"{self.endpoint} has cancelled a watch")
        return message.result

    def _check_revision(self, answer: object, seen_revision: int) -> None:
        """Fail if etcd returns a lower revision than before: it has lost data that the nodes agreed on."""
        if not isinstance(answer, RangeAnswer | TxnAnswer):
            return
        if answer.header.revision < seen_revision:
            lost = f"etcd went back from revision {seen_revision} to {answer.header.revision}: its data was lost"
            self.fail(RunError(f"{lost} or replaced; start the run again with --resume"))
            self.raise_if_failed()
        self._revision = max(self._revision, answer.header.revision)

    def _switch_endpoint(self, endpoint_index: int, error: EtcdUnreachable) -> None:
        """Switch to the next endpoint and restart all streams, unless another call has already switched."""
        if self._unreachable_since is None:
            self._unreachable_since = self._clock.now()
            self._log(f"etcd is unreachable: {error}")
        if endpoint_index == self._endpoint_index:
            self._endpoint_index += 1
            self._token = ""  # an etcd without its data would not know the token
            self._endpoint_changed.set()
            self._endpoint_changed = asyncio.Event()

    def _note_reachable(self) -> None:
        if self._unreachable_since is not None:
            self._log(f"etcd is reachable again after {self._clock.now() - self._unreachable_since:.1f} s")
            self._unreachable_since = None

    async def _wait_after_round(self, tries: int) -> None:
        """Pause after each round through all endpoints."""
        rounds, rest = divmod(tries, len(self.access.endpoints))
        if rest == 0:
            await self.wait_before_retry(rounds)


async def _read_lines(response: aiohttp.ClientResponse, endpoint_changed: asyncio.Event) -> AsyncIterator[bytes]:
    """Split lines by hand: aiohttp limits lines to about 64 KiB, and a value may have 1.5 MiB."""
    rest = b""
    while chunk := await _run_unless_switched(endpoint_changed, response.content.readany()):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


async def _run_unless_switched(endpoint_changed: asyncio.Event, coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine; raises EtcdUnreachable if the endpoint is switched meanwhile."""
    task, switching = asyncio.ensure_future(coroutine), asyncio.ensure_future(endpoint_changed.wait())
    try:
        await asyncio.wait([task, switching], return_when=asyncio.FIRST_COMPLETED)
        if switching.done():
            raise EtcdUnreachable("the endpoint was switched")
        return task.result()
    finally:
        task.cancel()
        switching.cancel()
        await asyncio.gather(task, switching, return_exceptions=True)
