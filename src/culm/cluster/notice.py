"""Spot notices: how a node hears that it is about to be taken away.

Every source is one coroutine, `wait`, that returns a Notice when there is one. A metadata service that is slow, broken
or not there is no notice: the source keeps asking, and says so once.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Protocol

import aiohttp
import msgspec

from culm.errors import UsageError

if TYPE_CHECKING:
    from culm.runtime.clock import Clock

METADATA = "http://169.254.169.254"
"""Where all three clouds answer, each machine its own questions."""
NAMES = ("aws", "gcp", "azure", "none")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Notice:
    """This node goes."""

    deadline_s: float
    """Seconds from now; the machine may be gone at any moment after."""
    why: str


class NoticeSource(Protocol):
    """Somebody who knows."""

    async def wait(self) -> Notice:
        """Return when this node is to go, and not before. May be cancelled."""


class NoNotice:
    """Nobody will say anything."""

    async def wait(self) -> Notice:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody completes this")


class SignalNotice:
    """A signal to this process, as an operator or a container's manager sends it. Once is enough: it is not heard a
    second time. Whoever blocks it beforehand misses none that comes before somebody waits."""

    def __init__(self, grace_s: float = 30.0, number: signal.Signals = signal.SIGTERM) -> None:
        self._grace_s, self._number = grace_s, number

    async def wait(self) -> Notice:
        loop = asyncio.get_running_loop()
        sent = asyncio.Event()
        loop.add_signal_handler(self._number, sent.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {self._number})
        try:
            await sent.wait()
        finally:
            loop.remove_signal_handler(self._number)
            if sent.is_set():
                signal.signal(self._number, signal.SIG_IGN)
        return Notice(self._grace_s, f"{self._number.name} was sent to the agent")


class Trouble(Exception):
    """The metadata service did not answer as it should. The text says how."""


class Metadata:
    """Questions to a machine's metadata service; each is one small GET or PUT, never through a proxy."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.timeout_s = url, timeout_s

    async def ask(
        self, path: str, headers: dict[str, str], *, method: str = "GET", timeout_s: float | None = None
    ) -> tuple[int, Mapping[str, str], str]:
        """Status, headers and text. Trouble: no answer in time, or a broken one."""
        limit = aiohttp.ClientTimeout(total=timeout_s or self.timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as http,
                http.request(method, self.url + path, headers=headers, allow_redirects=False) as response,
            ):
                return response.status, response.headers, await response.text(errors="replace")
        except TimeoutError:
            raise Trouble(f"{self.url} did not answer in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Trouble(f"{self.url} can not be asked ({error})") from None


class Polling:
    """A source that asks again and again. Trouble is told once until it is over."""

    def __init__(self, metadata: Metadata, clock: Clock, every_s: float, tell: Tell) -> None:
        self._metadata, self._clock, self._every_s, self._tell = metadata, clock, every_s, tell
        self._troubled = False

    async def wait(self) -> Notice:
        while True:
            try:
                found = await self._look()
                self._troubled = False
            except Trouble as trouble:
                found = None
                self._complain(trouble)
            if found is not None:
                return found
            await self._clock.sleep(self._every_s)

    async def _look(self) -> Notice | None:
        """Ask once; Trouble: no sensible answer."""
        raise NotImplementedError

    def _complain(self, trouble: Trouble) -> None:
        if not self._troubled:
            self._tell(f"a spot notice might be missed: {trouble}")
        self._troubled = True


class _InstanceAction(msgspec.Struct):
    action: str
    time: Annotated[datetime, msgspec.Meta(tz=True)]


class AwsNotice(Polling):
    """EC2: instance-action of IMDSv2, two minutes ahead; 404 while there is nothing to say."""

    def __init__(
        self,
        clock: Clock,
        *,
        tell: Tell = lambda _: None,
        url: str = METADATA,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        timeout_s: float = 2.0,
    ) -> None:
        super().__init__(Metadata(url, timeout_s), clock, 5.0, tell)
        self._wall = wall
        self._token = ""

    async def _look(self) -> Notice | None:
        status, text = await self._action()
        if status == 401:  # tokens end; a new one at once, since two minutes are not long
            self._token = ""
            status, text = await self._action()
        if status == 404:
            return None
        if status != 200:
            raise Trouble(f"{self._metadata.url} answers with status {status}")
        return self._notice(text)

    async def _action(self) -> tuple[int, str]:
        self._token = self._token or await self._new_token()
        path, headers = "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token}
        status, _, text = await self._metadata.ask(path, headers)
        return status, text

    async def _new_token(self) -> str:
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        status, _, text = await self._metadata.ask("/latest/api/token", ttl, method="PUT")
        if status != 200 or not text.strip().isprintable() or not text.strip():
            raise Trouble(f"{self._metadata.url} gives no token (status {status})")
        return text.strip()

    def _notice(self, text: str) -> Notice:
        try:
            found = msgspec.json.decode(text, type=_InstanceAction)
        except msgspec.MsgspecError:
            raise Trouble(f"{self._metadata.url} answers with {text[:60]!r}, which is no instance-action") from None
        left = (found.time - self._wall()).total_seconds()
        return Notice(_within(left, 120.0), f"EC2 will {found.action} this instance at {found.time.isoformat()}")


class GcpNotice(Polling):
    """Google: instance/preempted, half a minute ahead. The question stays open until the answer changes."""

    def __init__(
        self,
        clock: Clock,
        *,
        tell: Tell = lambda _: None,
        url: str = METADATA,
        timeout_s: float = 2.0,
        open_s: int = 60,
    ) -> None:
        super().__init__(Metadata(url, timeout_s), clock, 1.0, tell)
        self._open_s = open_s
        self._etag = "NONE"
        """Of the last answer; the first question is answered at once, so that nothing before it is missed."""

    async def _look(self) -> Notice | None:
        path = (
            "/computeMetadata/v1/instance/preempted"
            f"?wait_for_change=true&timeout_sec={self._open_s}&last_etag={self._etag}"
        )
        patience = self._open_s + self._metadata.timeout_s
        status, headers, text = await self._metadata.ask(path, {"Metadata-Flavor": "Google"}, timeout_s=patience)
        if status != 200 or headers.get("Metadata-Flavor") != "Google" or text.strip() not in ("TRUE", "FALSE"):
            raise Trouble(f"{self._metadata.url} answers with status {status} and {text[:60]!r}")
        self._etag = headers.get("ETag", "NONE")
        return Notice(30.0, "Google preempts this instance") if text.strip() == "TRUE" else None


class _ScheduledEvent(msgspec.Struct):
    id: str = msgspec.field(name="EventId")
    type: str = msgspec.field(name="EventType")
    resources: list[str] = msgspec.field(name="Resources")
    not_before: str = msgspec.field(name="NotBefore", default="")


class _ScheduledEvents(msgspec.Struct):
    events: list[_ScheduledEvent] = msgspec.field(name="Events")


class AzureNotice(Polling):
    """Azure: a Scheduled Event of type Preempt, half a minute ahead, that names this machine among its resources."""

    def __init__(
        self,
        clock: Clock,
        *,
        tell: Tell = lambda _: None,
        url: str = METADATA,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        timeout_s: float = 130.0,
    ) -> None:
        """The first answer may take two minutes: that question switches the service on."""
        super().__init__(Metadata(url, timeout_s), clock, 1.0, tell)
        self._wall = wall
        self._name = ""

    async def _look(self) -> Notice | None:
        self._name = self._name or (
            await self._get("/metadata/instance/compute/name?api-version=2021-02-01&format=text")
        )
        text = await self._get("/metadata/scheduledevents?api-version=2020-07-01")
        try:
            events = msgspec.json.decode(text, type=_ScheduledEvents).events
        except msgspec.MsgspecError:
            raise Trouble(f"{self._metadata.url} answers with {text[:60]!r}, which are no Scheduled Events") from None
        # A scale set hears of all its machines.
        mine = [event for event in events if event.type == "Preempt" and self._name in event.resources]
        return min(map(self._notice, mine), key=lambda notice: notice.deadline_s, default=None)

    async def _get(self, path: str) -> str:
        status, _, text = await self._metadata.ask(path, {"Metadata": "true"})
        if status != 200 or not text.strip():
            raise Trouble(f"{self._metadata.url} answers with status {status}")
        return text.strip()

    def _notice(self, event: _ScheduledEvent) -> Notice:
        return Notice(_within(self._left(event.not_before), 30.0), f"Azure preempts this machine (event {event.id})")

    def _left(self, not_before: str) -> float:
        """Seconds; none if it has begun (then it is empty), or if nobody can say when it will."""
        try:
            return (parsedate_to_datetime(not_before) - self._wall()).total_seconds()
        except (ValueError, TypeError):
            return 0.0


def _within(seconds: float, longest: float) -> float:
    """Clocks differ: a notice is never longer than the cloud gives, nor in the past."""
    return min(max(seconds, 0.0), longest)


def notice_source(name: str, clock: Clock, tell: Tell = lambda _: None) -> NoticeSource:
    """The source that `--notice` names."""
    if name not in NAMES:
        raise UsageError(f"--notice is {name!r}: choose one of {', '.join(NAMES)}")
    made: dict[str, Callable[[], NoticeSource]] = {
        "aws": lambda: AwsNotice(clock, tell=tell),
        "gcp": lambda: GcpNotice(clock, tell=tell),
        "azure": lambda: AzureNotice(clock, tell=tell),
        "none": NoNotice,
    }
    return made[name]()


async def first(*sources: NoticeSource) -> Notice:
    """The first notice of several sources."""
    waiting = [asyncio.ensure_future(source.wait()) for source in sources]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return min((task.result() for task in done), key=lambda notice: notice.deadline_s)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


class AnyNotice:
    """Whoever of several sources is the first to know."""

    def __init__(self, *sources: NoticeSource) -> None:
        self._sources = sources

    async def wait(self) -> Notice:
        return await first(*self._sources)
