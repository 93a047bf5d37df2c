"""A node hears that it is to go, from whatever its cloud offers, and mistakes nothing else for that."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from aiohttp import web

from culm.cluster.notice import (
    NAMES,
    AwsNotice,
    AzureNotice,
    GcpNotice,
    NoNotice,
    Notice,
    NoticeSource,
    SignalNotice,
    first,
    notice_source,
)
from culm.errors import UsageError

from .fake_metadata import FakeMetadata, Handler, Hasty, metadata

NOON = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)
AZURE_EVENT: dict[str, object] = {
    "EventId": "e-1",
    "EventType": "Preempt",
    "ResourceType": "VirtualMachine",
    "Resources": ["other", "me"],
    "EventStatus": "Scheduled",
    "NotBefore": "Fri, 01 May 2026 12:00:25 GMT",
}
Make = Callable[..., NoticeSource]


def aws(url: str, clock: Hasty, told: list[str], timeout_s: float = 20.0) -> NoticeSource:
    return AwsNotice(clock, tell=told.append, url=url, wall=lambda: NOON, timeout_s=timeout_s)


def gcp(url: str, clock: Hasty, told: list[str], timeout_s: float = 20.0) -> NoticeSource:
    return GcpNotice(clock, tell=told.append, url=url, open_s=0, timeout_s=timeout_s)


def azure(url: str, clock: Hasty, told: list[str], timeout_s: float = 20.0) -> NoticeSource:
    return AzureNotice(clock, tell=told.append, url=url, wall=lambda: NOON, timeout_s=timeout_s)


def hear(make: Make, answer: Handler) -> tuple[Notice, FakeMetadata, Hasty, list[str]]:
    """What a source finds at a metadata service, what it asked, how it slept, and what it complained about."""
    clock, told = Hasty(), list[str]()

    async def main() -> tuple[Notice, FakeMetadata]:
        async with metadata(answer) as fake:
            return await asyncio.wait_for(make(fake.url, clock, told).wait(), 30), fake

    notice, fake = asyncio.run(main())
    return notice, fake, clock, told


def in_turn(*answers: Handler) -> Handler:
    """The next answer for each request; the last one stays."""
    left = list(answers)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await (left.pop(0) if len(left) > 1 else left[0])(request)

    return answer


def status(number: int) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=number, text="no")

    return answer


def text(body: str, **headers: str) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=body, headers={name.replace("_", "-"): value for name, value in headers.items()})

    return answer


async def silence(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


class Imds:
    """EC2's service: tokens, and then the answers of a test."""

    def __init__(self, *answers: Handler, tokens: Iterator[str] | None = None) -> None:
        self._answer, self._tokens, self.valid = in_turn(*answers), tokens or iter(map(str, range(99))), ""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/latest/api/token":
            assert request.method == "PUT"
            assert int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
            self.valid = next(self._tokens)
            return web.Response(text=self.valid)
        assert request.path == "/latest/meta-data/spot/instance-action"
        if request.headers.get("X-aws-ec2-metadata-token") != self.valid:
            return web.Response(status=401)
        return await self._answer(request)


class Google:
    """Google's service: refuses who does not name the flavour."""

    def __init__(self, *answers: Handler) -> None:
        self._answer = in_turn(*answers)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        assert request.path == "/computeMetadata/v1/instance/preempted"
        assert request.headers["Metadata-Flavor"] == "Google"
        return await self._answer(request)


class Azure:
    """Azure's service: the name of the machine, and then the answers of a test."""

    def __init__(self, *answers: Handler, names: Handler | None = None) -> None:
        self._answer, self._names = in_turn(*answers), names or text("me")

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Metadata"] == "true"
        if request.path == "/metadata/instance/compute/name":
            return await self._names(request)
        assert request.path == "/metadata/scheduledevents"
        return await self._answer(request)


def events(*found: dict[str, object]) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"DocumentIncarnation": 1, "Events": list(found)})

    return answer


TERMINATE = text('{"action": "terminate", "time": "2026-05-01T12:01:58Z"}')
PREEMPTED = text("TRUE", Metadata_Flavor="Google", ETag="b")
NOT_YET = text("FALSE", Metadata_Flavor="Google", ETag="a")
CLOUDS = [
    pytest.param(aws, Imds, status(404), TERMINATE, id="aws"),
    pytest.param(gcp, Google, NOT_YET, PREEMPTED, id="gcp"),
    pytest.param(azure, Azure, events(), events(AZURE_EVENT), id="azure"),
]


@pytest.mark.parametrize(("make", "cloud", "nothing", "notice"), CLOUDS)
def test_a_source_asks_until_there_is_a_notice(
    make: Make, cloud: Callable[..., Handler], nothing: Handler, notice: Handler
) -> None:
    _, _, clock, told = hear(make, cloud(nothing, nothing, nothing, notice))
    assert len(clock.slept) == 3
    assert not told


@pytest.mark.parametrize(("make", "cloud", "nothing", "notice"), CLOUDS)
@pytest.mark.parametrize(
    "bad",
    [status(500), status(503), status(302), text("<html>"), text(""), text("[]"), text('{"Events": 3}'), text("null")],
)
def test_what_makes_no_sense_is_no_notice_and_is_told_once(
    make: Make, cloud: Callable[..., Handler], nothing: Handler, notice: Handler, bad: Handler
) -> None:
    _, _, clock, told = hear(make, cloud(nothing, bad, bad, nothing, bad, notice))
    assert len(clock.slept) == 5
    assert len(told) == 2  # once for each time it began
    assert "a spot notice might be missed" in told[0]


@pytest.mark.parametrize(("make", "cloud", "nothing", "notice"), CLOUDS)
@pytest.mark.parametrize("bad", [silence, hang_up])
def test_a_service_that_hangs_or_hangs_up_is_asked_again(
    make: Make, cloud: Callable[..., Handler], nothing: Handler, notice: Handler, bad: Handler
) -> None:
    impatient = functools.partial(make, timeout_s=0.1)
    _, _, _, told = hear(impatient, cloud(bad, bad, notice))
    assert len(told) == 1


@pytest.mark.parametrize("make", [aws, gcp, azure])
def test_where_nobody_answers_a_source_keeps_asking_and_can_be_cancelled(make: Make) -> None:
    clock, told = Hasty(), list[str]()

    async def main() -> None:
        waiting = asyncio.create_task(make("http://127.0.0.1:9", clock, told).wait())
        while len(clock.slept) < 3:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert len(told) == 1


def test_ec2_gives_two_minutes_and_is_asked_every_five_seconds() -> None:
    notice, _, clock, _ = hear(aws, Imds(status(404), TERMINATE))
    assert notice == Notice(118.0, "EC2 will terminate this instance at 2026-05-01T12:01:58+00:00")
    assert clock.slept == [5.0]


def test_an_ec2_token_is_used_until_it_ends_and_then_replaced_without_a_pause() -> None:
    service = Imds(status(404), status(404), TERMINATE)

    async def answer(request: web.Request) -> web.StreamResponse:
        found = await service(request)
        if request.method == "GET" and found.status == 404:
            service.valid = "the one before has ended"
        return found

    _, fake, clock, told = hear(aws, answer)
    assert [asked.split()[0] for asked in fake.asked] == ["PUT", "GET", "GET", "PUT", "GET", "GET", "PUT", "GET"]
    assert len(clock.slept) == 2
    assert not told


def test_an_ec2_service_that_accepts_no_token_is_trouble_and_no_storm() -> None:
    service = Imds(TERMINATE)
    turns = iter(range(99))

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "GET" and next(turns) < 4:
            return web.Response(status=401)
        return await service(request)

    _, _, clock, told = hear(aws, answer)
    assert len(clock.slept) == 2
    assert told == [f"a spot notice might be missed: {told[0].split()[6]} answers with status 401"]


@pytest.mark.parametrize(
    ("time", "left"), [("2026-05-01T11:59:00Z", 0.0), ("2026-05-01T13:00:00Z", 120.0), ("2026-05-01T12:00:30Z", 30.0)]
)
def test_a_clock_that_is_wrong_makes_no_notice_longer_than_the_cloud_gives(time: str, left: float) -> None:
    notice, *_ = hear(aws, Imds(text(f'{{"action": "stop", "time": "{time}"}}')))
    assert notice.deadline_s == left


def test_google_is_asked_for_changes_since_the_last_answer() -> None:
    notice, fake, _, _ = hear(gcp, Google(NOT_YET, PREEMPTED))
    assert notice.deadline_s == 30.0
    assert [asked.rpartition("last_etag=")[2] for asked in fake.asked] == ["NONE", "a"]
    assert all("wait_for_change=true" in asked for asked in fake.asked)


def test_whoever_answers_in_place_of_google_is_not_believed() -> None:
    _, _, _, told = hear(gcp, Google(text("TRUE"), PREEMPTED))
    assert len(told) == 1


def test_azure_gives_the_time_until_its_event() -> None:
    notice, *_ = hear(azure, Azure(events(AZURE_EVENT)))
    assert notice == Notice(25.0, "Azure preempts this machine (event e-1)")


def test_azure_events_of_other_kinds_and_other_machines_are_none_of_ours() -> None:
    others: list[dict[str, object]] = [{**AZURE_EVENT, "EventType": "Reboot"}, {**AZURE_EVENT, "Resources": ["other"]}]
    notice, _, clock, _ = hear(azure, Azure(events(*others), events(*others, AZURE_EVENT)))
    assert notice.deadline_s == 25.0
    assert clock.slept == [1.0]


@pytest.mark.parametrize("begun", ["", "soon"])
def test_an_azure_event_that_has_begun_leaves_no_time(begun: str) -> None:
    notice, *_ = hear(azure, Azure(events({**AZURE_EVENT, "NotBefore": begun, "EventStatus": "Started"})))
    assert notice.deadline_s == 0.0


def test_azure_is_asked_for_the_name_of_the_machine_until_it_says_it_and_then_no_more() -> None:
    _, fake, _, _ = hear(azure, Azure(events(), events(AZURE_EVENT), names=in_turn(status(500), text("me"))))
    assert sum("/compute/name" in asked for asked in fake.asked) == 2


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Whatever becomes of SIGTERM, it is as it was afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, before)


@pytest.mark.real
@pytest.mark.usefixtures("sigterm")
def test_sigterm_is_a_notice_and_is_not_heard_twice() -> None:
    async def main() -> Notice:
        waiting = asyncio.create_task(SignalNotice(grace_s=7.0).wait())
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        return await waiting

    assert asyncio.run(main()) == Notice(7.0, "SIGTERM was sent to the agent")
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.real
@pytest.mark.usefixtures("sigterm")
def test_a_sigterm_that_was_blocked_until_somebody_waits_is_not_missed() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.raise_signal(signal.SIGTERM)  # to this thread: others of this process do not block it
    assert asyncio.run(SignalNotice(grace_s=7.0).wait()).deadline_s == 7.0


@pytest.mark.real
def test_the_handler_goes_with_a_wait_that_is_called_off() -> None:
    async def main() -> None:
        waiting = asyncio.create_task(SignalNotice().wait())
        await asyncio.sleep(0)
        assert signal.getsignal(signal.SIGTERM) != before
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_first_notice_of_several_sources_counts_and_the_others_stop_asking() -> None:
    async def main() -> None:
        async with metadata(Google(PREEMPTED)) as fake:
            notice = await first(NoNotice(), gcp(fake.url, Hasty(), []))
            assert notice.deadline_s == 30.0
            assert asyncio.all_tasks() == {asyncio.current_task()} | {
                t for t in asyncio.all_tasks() if "RequestHandler" in repr(t)
            }

    asyncio.run(main())


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_a_source(name: str) -> None:
    assert type(notice_source(name, Hasty())).__name__.lower() == ("no" if name == "none" else name) + "notice"


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="--notice is 'ibm': choose one of aws, gcp, azure, none"):
        notice_source("ibm", Hasty())
