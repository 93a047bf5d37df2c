"""Preemption notices: how a node learns that it is about to be taken away.

Each source has one coroutine, `wait`, that returns a PreemptionNotice. A metadata service that is slow, broken or
absent is not a notice: the source keeps polling and warns once.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import aiohttp
import msgspec

from culm.errors import UsageError

if TYPE_CHECKING:
    from culm.runtime.clock import Clock

METADATA_URL = "http://169.254.169.254"
"""The address at which all three clouds serve a machine its own metadata."""
AWS_METADATA_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Environment variable with another address of EC2's metadata service, as in the AWS SDKs."""
NOTICE_FILE_VARIABLE = "CULM_NOTICE_FILE"
"""Environment variable with the name of a file, to which the sender of SIGTERM may first write the seconds left."""
NOTICE_SOURCES = ("aws", "gcp", "azure", "none")
WarningCallback = Callable[[str], None]


@dataclass(frozen=True)
class PreemptionNotice:
    """This node is about to be preempted."""

    deadline_s: float
    """Seconds from now; after that the machine may vanish at any moment."""
    reason: str


class NoticeSource(Protocol):
    """A source of preemption notices."""

    async def wait(self) -> PreemptionNotice:
        """Return when this node is to be preempted, and not before. May be cancelled."""


class NoNoticeSource:
    """A source that never gives a notice."""

    async def wait(self) -> PreemptionNotice:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("this future is never completed")


def announced_s(default: float) -> float:
    """The seconds that were announced with SIGTERM, or the default."""
    try:
        seconds = float(Path(os.environ[NOTICE_FILE_VARIABLE]).read_text())
    except (KeyError, OSError, ValueError):
        return default
    return seconds if 0 < seconds < math.inf else default


class SignalNoticeSource:
    """A signal to this process, sent by an operator or a container manager, with the announced seconds or else the
    configured ones. Later signals are ignored. If the signal is
    blocked beforehand, one that arrives before `wait` is called is not lost."""

    def __init__(self, grace_s: float = 30.0, signal_number: signal.Signals = signal.SIGTERM) -> None:
        self._grace_s, self._signal = grace_s, signal_number

    async def wait(self) -> PreemptionNotice:
        loop = asyncio.get_running_loop()
        sent = asyncio.Event()
        loop.add_signal_handler(self._signal, sent.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {self._signal})
        try:
            await sent.wait()
        finally:
            loop.remove_signal_handler(self._signal)
            if sent.is_set():
                signal.signal(self._signal, signal.SIG_IGN)
        return PreemptionNotice(announced_s(self._grace_s), f"{self._signal.name} was sent to the agent")


class MetadataError(Exception):
    """The metadata service gave no valid answer; the text describes the failure."""


class MetadataService:
    """A client of the machine's metadata service. Each request is one small GET or PUT, never through a proxy."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.timeout_s = url, timeout_s

    async def request(
        self, path: str, headers: dict[str, str], *, method: str = "GET", timeout_s: float | None = None
    ) -> tuple[int, Mapping[str, str], str]:
        """Returns status, headers and text. Raises MetadataError without a valid answer in time."""
        limit = aiohttp.ClientTimeout(total=timeout_s or self.timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as http,
                http.request(method, self.url + path, headers=headers, allow_redirects=False) as response,
            ):
                return response.status, response.headers, await response.text(errors="replace")
        except TimeoutError:
            raise MetadataError(f"{self.url} did not answer in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise MetadataError(f"{self.url} cannot be queried ({error})") from None


class PollingNoticeSource:
    """A source that polls a metadata service. Warns once per outage of the service."""

    def __init__(self, metadata: MetadataService, clock: Clock, interval_s: float, warn: WarningCallback) -> None:
        self._metadata, self._clock, self._interval_s, self._warn = metadata, clock, interval_s, warn
        self._is_failing = False

    async def wait(self) -> PreemptionNotice:
        while True:
            try:
                notice = await self._poll_once()
                self._is_failing = False
            except MetadataError as error:
                notice = None
                self._warn_once(error)
            if notice is not None:
                return notice
            await self._clock.sleep(self._interval_s)

    async def _poll_once(self) -> PreemptionNotice | None:
        """Poll once; None: no notice. Raises MetadataError without a valid answer."""
        raise NotImplementedError

    def _warn_once(self, error: MetadataError) -> None:
        if not self._is_failing:
            self._warn(f"a spot notice might be missed: {error}")
        self._is_failing = True


class _InstanceAction(msgspec.Struct):
    action: str
    time: Annotated[datetime, msgspec.Meta(tz=True)]


class _Recommendation(msgspec.Struct):
    time: Annotated[datetime, msgspec.Meta(tz=True)] = msgspec.field(name="noticeTime")


class AwsNoticeSource(PollingNoticeSource):
    """EC2: `instance-action` of IMDSv2, two minutes ahead; 404 while there is no notice.

    A rebalance recommendation, which EC2 may give earlier, is no notice: the instance may run on for hours. It is
    passed to `advise` once, so that a replacement can be requested in advance.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        warn: WarningCallback = lambda _: None,
        advise: WarningCallback = lambda _: None,
        url: str = "",
        wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        timeout_s: float = 2.0,
    ) -> None:
        url = (url or os.environ.get(AWS_METADATA_VARIABLE) or METADATA_URL).rstrip("/")
        super().__init__(MetadataService(url, timeout_s), clock, 5.0, warn)
        self._wall_clock, self._advise = wall_clock, advise
        self._token = ""
        self._is_at_risk = False
        """Whether EC2 has recommended to replace this instance."""

    async def _poll_once(self) -> PreemptionNotice | None:
        status, text = await self._get("spot/instance-action")
        if status == 401:  # the token has expired; get a new one at once, since a notice is only two minutes ahead
            self._token = ""
            status, text = await self._get("spot/instance-action")
        if status == 404:
            await self._look_for_recommendation()
            return None
        if status != 200:
            raise MetadataError(f"{self._metadata.url} answers with status {status}")
        return self._parse_notice(text)

    async def _look_for_recommendation(self) -> None:
        """Report the first rebalance recommendation. Invalid answers are ignored: nothing depends on them."""
        if self._is_at_risk:
            return
        status, text = await self._get("events/recommendations/rebalance")
        try:
            advice = msgspec.json.decode(text, type=_Recommendation) if status == 200 else None
        except msgspec.MsgspecError:
            return
        if advice is not None:
            self._is_at_risk = True
            self._advise(f"EC2 recommends to replace this instance since {advice.time.isoformat()}")

    async def _get(self, path: str) -> tuple[int, str]:
        self._token = self._token or await self._request_token()
        headers = {"X-aws-ec2-metadata-token": self._token}
        status, _, text = await self._metadata.request(f"/latest/meta-data/{path}", headers)
        return status, text

    async def _request_token(self) -> str:
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        status, _, text = await self._metadata.request("/latest/api/token", ttl, method="PUT")
        if status != 200 or not text.strip().isprintable() or not text.strip():
            raise MetadataError(f"{self._metadata.url} gives no token (status {status})")
        return text.strip()

    def _parse_notice(self, text: str) -> PreemptionNotice:
        try:
            action = msgspec.json.decode(text, type=_InstanceAction)
        except msgspec.MsgspecError:
            raise MetadataError(
                f"{self._metadata.url} answers with {text[:60]!r}, which is not an instance-action"
            ) from None
        left = (action.time - self._wall_clock()).total_seconds()
        return PreemptionNotice(
            _clamp_deadline(left, 120.0), f"EC2 will {action.action} this instance at {action.time.isoformat()}"
        )


class GcpNoticeSource(PollingNoticeSource):
    """Google Cloud: `instance/preempted`, half a minute ahead. The request stays open until the value changes."""

    def __init__(
        self,
        clock: Clock,
        *,
        warn: WarningCallback = lambda _: None,
        url: str = METADATA_URL,
        timeout_s: float = 2.0,
        long_poll_s: int = 60,
    ) -> None:
        super().__init__(MetadataService(url, timeout_s), clock, 1.0, warn)
        self._long_poll_s = long_poll_s
        self._etag = "NONE"
        """ETag of the last answer. The first request is answered at once, so that an earlier notice is not missed."""

    async def _poll_once(self) -> PreemptionNotice | None:
        path = (
            "/computeMetadata/v1/instance/preempted"
            f"?wait_for_change=true&timeout_sec={self._long_poll_s}&last_etag={self._etag}"
        )
        timeout_s = self._long_poll_s + self._metadata.timeout_s
        status, headers, text = await self._metadata.request(path, {"Metadata-Flavor": "Google"}, timeout_s=timeout_s)
        if status != 200 or headers.get("Metadata-Flavor") != "Google" or text.strip() not in ("TRUE", "FALSE"):
            raise MetadataError(f"{self._metadata.url} answers with status {status} and {text[:60]!r}")
        self._etag = headers.get("ETag", "NONE")
        return PreemptionNotice(30.0, "Google preempts this instance") if text.strip() == "TRUE" else None


class _ScheduledEvent(msgspec.Struct):
    id: str = msgspec.field(name="EventId")
    type: str = msgspec.field(name="EventType")
    resources: list[str] = msgspec.field(name="Resources")
    not_before: str = msgspec.field(name="NotBefore", default="")


class _ScheduledEvents(msgspec.Struct):
    events: list[_ScheduledEvent] = msgspec.field(name="Events")


class AzureNoticeSource(PollingNoticeSource):
    """Azure: a Scheduled Event of type Preempt that lists this machine among its resources, half a minute ahead."""

    def __init__(
        self,
        clock: Clock,
        *,
        warn: WarningCallback = lambda _: None,
        url: str = METADATA_URL,
        wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        timeout_s: float = 130.0,
    ) -> None:
        """The first answer may take two minutes, because the first request enables the service."""
        super().__init__(MetadataService(url, timeout_s), clock, 1.0, warn)
        self._wall_clock = wall_clock
        self._vm_name = ""

    async def _poll_once(self) -> PreemptionNotice | None:
        self._vm_name = self._vm_name or (
            await self._get("/metadata/instance/compute/name?api-version=2021-02-01&format=text")
        )
        text = await self._get("/metadata/scheduledevents?api-version=2020-07-01")
        try:
            events = msgspec.json.decode(text, type=_ScheduledEvents).events
        except msgspec.MsgspecError:
            raise MetadataError(
                f"{self._metadata.url} answers with {text[:60]!r}, which are no Scheduled Events"
            ) from None
        # A scale set reports the events of all its machines.
        own_events = [event for event in events if event.type == "Preempt" and self._vm_name in event.resources]
        return min(map(self._parse_notice, own_events), key=lambda notice: notice.deadline_s, default=None)

    async def _get(self, path: str) -> str:
        status, _, text = await self._metadata.request(path, {"Metadata": "true"})
        if status != 200 or not text.strip():
            raise MetadataError(f"{self._metadata.url} answers with status {status}")
        return text.strip()

    def _parse_notice(self, event: _ScheduledEvent) -> PreemptionNotice:
        return PreemptionNotice(
            _clamp_deadline(self._seconds_until(event.not_before), 30.0),
            f"Azure preempts this machine (event {event.id})",
        )

    def _seconds_until(self, not_before: str) -> float:
        """Seconds until `not_before`; 0 if it is empty (the event has begun) or cannot be parsed."""
        try:
            return (parsedate_to_datetime(not_before) - self._wall_clock()).total_seconds()
        except (ValueError, TypeError):
            return 0.0


def _clamp_deadline(seconds: float, longest: float) -> float:
    """Limit a deadline to 0..longest: clocks differ, and a notice is never longer than the cloud grants."""
    return min(max(seconds, 0.0), longest)


def make_notice_source(
    name: str, clock: Clock, warn: WarningCallback = lambda _: None, advise: WarningCallback = lambda _: None
) -> NoticeSource:
    """The source for `--notice NAME`. `advise` gets the reason when the cloud recommends to replace this machine, but
    does not take it away yet. Raises UsageError for an unknown name."""
    if name not in NOTICE_SOURCES:
        raise UsageError(f"--notice is {name!r}: choose one of {', '.join(NOTICE_SOURCES)}")
    factories: dict[str, Callable[[], NoticeSource]] = {
        "aws": lambda: AwsNoticeSource(clock, warn=warn, advise=advise),
        "gcp": lambda: GcpNoticeSource(clock, warn=warn),
        "azure": lambda: AzureNoticeSource(clock, warn=warn),
        "none": NoNoticeSource,
    }
    return factories[name]()


async def first_notice(*sources: NoticeSource) -> PreemptionNotice:
    """Wait for the first notice of several sources."""
    waiting = [asyncio.ensure_future(source.wait()) for source in sources]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return min((task.result() for task in done), key=lambda notice: notice.deadline_s)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


class FirstNoticeSource:
    """The first notice of several sources."""

    def __init__(self, *sources: NoticeSource) -> None:
        self._sources = sources

    async def wait(self) -> PreemptionNotice:
        return await first_notice(*self._sources)
