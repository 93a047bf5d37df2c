"""Preemption notices from each cloud: real ones are recognized, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.fake_metadata_service import FakeMetadata, Handler, Hasty, metadata

from culm.cluster.agent.preemption_notice import (
    NOTICE_FILE_VARIABLE,
    NOTICE_SOURCES,
    AwsNoticeSource,
    AzureNoticeSource,
    GcpNoticeSource,
    NoNoticeSource,
    NoticeSource,
    PreemptionNotice,
    SignalNoticeSource,
    announced_s,
    first_notice,
    make_notice_source,
)
from culm.errors import UsageError

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


def aws(
    url: str,
    clock: Hasty,
    warnings: list[str],
    timeout_s: float = 20.0,
    advise: Callable[[str], None] = lambda _: None,
) -> NoticeSource:
    options: dict[str, Any] = {"url": url, "wall_clock": lambda: NOON, "timeout_s": timeout_s, "advise": advise}
    return AwsNoticeSource(clock, warn=warnings.append, **options)


def gcp(url: str, clock: Hasty, warnings: list[str], timeout_s: float = 20.0) -> NoticeSource:
    return GcpNoticeSource(clock, warn=warnings.append, url=url, long_poll_s=0, timeout_s=timeout_s)


def azure(url: str, clock: Hasty, warnings: list[str], timeout_s: float = 20.0) -> NoticeSource:
    return AzureNoticeSource(clock, warn=warnings.append, url=url, wall_clock=lambda: NOON, timeout_s=timeout_s)


def wait_for_notice(make: Make, answer: Handler) -> tuple[PreemptionNotice, FakeMetadata, Hasty, list[str]]:
    """The notice of a source, the requests to the metadata service, the clock, and the warnings."""
    clock, warnings = Hasty(), list[str]()

    async def main() -> tuple[PreemptionNotice, FakeMetadata]:
        async with metadata(answer) as fake:
            return await asyncio.wait_for(make(fake.url, clock, warnings).wait(), 30), fake

    notice, fake = asyncio.run(main())
    return notice, fake, clock, warnings


def in_turn(*answers: Handler) -> Handler:
    """The next answer for each request; the last one repeats."""
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
    """EC2's service: tokens, and then the answers of a test. `advice` answers questions for a recommendation."""

    def __init__(self, *answers: Handler, advice: Handler | None = None) -> None:
        self._answer, self._tokens, self.valid = in_turn(*answers), iter(map(str, range(99))), ""
        self._advice = advice or status(404)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/latest/api/token":
            assert request.method == "PUT"
            assert int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
            self.valid = next(self._tokens)
            return web.Response(text=self.valid)
        if request.headers.get("X-aws-ec2-metadata-token") != self.valid:
            return web.Response(status=401)
        if request.path == "/latest/meta-data/events/recommendations/rebalance":
            return await self._advice(request)
        assert request.path == "/latest/meta-data/spot/instance-action"
        return await self._answer(request)


class Google:
    """Google's service: refuses requests without the flavor header."""

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
def test_a_source_polls_until_there_is_a_notice(
    make: Make, cloud: Callable[..., Handler], nothing: Handler, notice: Handler
) -> None:
    _, _, clock, warnings = wait_for_notice(make, cloud(nothing, nothing, nothing, notice))
    assert len(clock.slept) == 3
    assert not warnings


@pytest.mark.parametrize(("make", "cloud", "nothing", "notice"), CLOUDS)
@pytest.mark.parametrize(
    "bad",
    [status(500), status(503), status(302), text("<html>"), text(""), text("[]"), text('{"Events": 3}'), text("null")],
)
def test_an_invalid_answer_is_no_notice_and_warns_once(
    make: Make, cloud: Callable[..., Handler], nothing: Handler, notice: Handler, bad: Handler
) -> None:
    _, _, clock, warnings = wait_for_notice(make, cloud(nothing, bad, bad, nothing, bad, notice))
    assert len(clock.slept) == 5
    assert len(warnings) == 2  # once for each time it began
    assert "a spot notice might be missed" in warnings[0]


@pytest.mark.parametrize(("make", "cloud", "nothing", "notice"), CLOUDS)
@pytest.mark.parametrize("bad", [silence, hang_up])
def test_a_service_that_hangs_or_disconnects_is_polled_again(
    make: Make, cloud: Callable[..., Handler], nothing: Handler, notice: Handler, bad: Handler
) -> None:
    impatient = functools.partial(make, timeout_s=0.1)
    _, _, _, warnings = wait_for_notice(impatient, cloud(bad, bad, notice))
    assert len(warnings) == 1


@pytest.mark.parametrize("make", [aws, gcp, azure])
def test_without_a_service_a_source_keeps_polling_and_can_be_cancelled(make: Make) -> None:
    clock, warnings = Hasty(), list[str]()

    async def main() -> None:
        waiting = asyncio.create_task(make("http://127.0.0.1:9", clock, warnings).wait())
        while len(clock.slept) < 3:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert len(warnings) == 1


def test_ec2_gives_two_minutes_and_is_polled_every_five_seconds() -> None:
    notice, _, clock, _ = wait_for_notice(aws, Imds(status(404), TERMINATE))
    assert notice == PreemptionNotice(118.0, "EC2 will terminate this instance at 2026-05-01T12:01:58+00:00")
    assert clock.slept == [5.0]


def test_an_ec2_token_is_used_until_it_ends_and_then_replaced_without_a_pause() -> None:
    service = Imds(status(404), status(404), TERMINATE)

    async def answer(request: web.Request) -> web.StreamResponse:
        found = await service(request)
        if request.path.endswith("/instance-action") and found.status == 404:
            service.valid = "the one before has ended"
        return found

    _, fake, clock, warnings = wait_for_notice(aws, answer)
    notices = [asked.split()[0] for asked in fake.asked if "rebalance" not in asked]
    assert notices == ["PUT", "GET", "GET", "PUT", "GET", "GET", "PUT", "GET"]
    assert len(clock.slept) == 2
    assert not warnings


def test_an_ec2_service_that_rejects_all_tokens_is_not_flooded() -> None:
    service = Imds(TERMINATE)
    turns = iter(range(99))

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "GET" and next(turns) < 4:
            return web.Response(status=401)
        return await service(request)

    _, _, clock, warnings = wait_for_notice(aws, answer)
    assert len(clock.slept) == 2
    assert warnings == [f"a spot notice might be missed: {warnings[0].split()[6]} answers with status 401"]


def test_a_rebalance_recommendation_of_ec2_is_reported_once_and_is_no_notice() -> None:
    advice = text('{"noticeTime": "2026-05-01T11:50:00Z"}')
    told: list[str] = []
    make = functools.partial(aws, advise=told.append)
    notice, fake, clock, warnings = wait_for_notice(make, Imds(*[status(404)] * 3, TERMINATE, advice=advice))
    assert notice.deadline_s == 118.0
    assert told == ["EC2 recommends to replace this instance since 2026-05-01T11:50:00+00:00"]
    assert not warnings
    assert len(clock.slept) == 3
    assert sum("rebalance" in asked for asked in fake.asked) == 1


@pytest.mark.parametrize("bad", [status(500), text("<html>"), text("[]"), text("{}")])
def test_an_invalid_recommendation_is_ignored(bad: Handler) -> None:
    *_, warnings = wait_for_notice(aws, Imds(status(404), TERMINATE, advice=bad))
    assert not warnings


def test_another_address_of_the_ec2_metadata_is_taken_from_the_variable_of_the_aws_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> PreemptionNotice:
        async with metadata(Imds(TERMINATE)) as fake:
            monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", fake.url + "/")
            return await asyncio.wait_for(AwsNoticeSource(Hasty(), wall_clock=lambda: NOON).wait(), 30)

    assert asyncio.run(main()).deadline_s == 118.0


@pytest.mark.parametrize(
    ("time", "left"), [("2026-05-01T11:59:00Z", 0.0), ("2026-05-01T13:00:00Z", 120.0), ("2026-05-01T12:00:30Z", 30.0)]
)
def test_a_wrong_clock_does_not_extend_a_notice(time: str, left: float) -> None:
    notice, *_ = wait_for_notice(aws, Imds(text(f'{{"action": "stop", "time": "{time}"}}')))
    assert notice.deadline_s == left


def test_google_is_queried_for_changes_since_the_last_answer() -> None:
    notice, fake, _, _ = wait_for_notice(gcp, Google(NOT_YET, PREEMPTED))
    assert notice.deadline_s == 30.0
    assert [asked.rpartition("last_etag=")[2] for asked in fake.asked] == ["NONE", "a"]
    assert all("wait_for_change=true" in asked for asked in fake.asked)


def test_an_answer_without_the_google_flavor_is_ignored() -> None:
    _, _, _, warnings = wait_for_notice(gcp, Google(text("TRUE"), PREEMPTED))
    assert len(warnings) == 1


def test_azure_gives_the_time_until_its_event() -> None:
    notice, *_ = wait_for_notice(azure, Azure(events(AZURE_EVENT)))
    assert notice == PreemptionNotice(25.0, "Azure preempts this machine (event e-1)")


def test_azure_events_of_other_kinds_and_machines_are_ignored() -> None:
    others: list[dict[str, object]] = [{**AZURE_EVENT, "EventType": "Reboot"}, {**AZURE_EVENT, "Resources": ["other"]}]
    notice, _, clock, _ = wait_for_notice(azure, Azure(events(*others), events(*others, AZURE_EVENT)))
    assert notice.deadline_s == 25.0
    assert clock.slept == [1.0]


@pytest.mark.parametrize("begun", ["", "soon"])
def test_an_azure_event_that_has_begun_leaves_no_time(begun: str) -> None:
    notice, *_ = wait_for_notice(azure, Azure(events({**AZURE_EVENT, "NotBefore": begun, "EventStatus": "Started"})))
    assert notice.deadline_s == 0.0


def test_azure_is_queried_for_the_machine_name_until_it_answers() -> None:
    _, fake, _, _ = wait_for_notice(azure, Azure(events(), events(AZURE_EVENT), names=in_turn(status(500), text("me"))))
    assert sum("/compute/name" in asked for asked in fake.asked) == 2


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Restores the handling of SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, before)


@pytest.mark.real
@pytest.mark.usefixtures("sigterm")
def test_sigterm_is_a_notice_and_later_ones_are_ignored() -> None:
    async def main() -> PreemptionNotice:
        waiting = asyncio.create_task(SignalNoticeSource(grace_s=7.0).wait())
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        return await waiting

    assert asyncio.run(main()) == PreemptionNotice(7.0, "SIGTERM was sent to the agent")
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("written", "seconds"), [("118.5", 118.5), ("", 7.0), ("soon", 7.0), ("inf", 7.0), ("-1", 7.0)]
)
def test_the_sender_of_sigterm_may_announce_the_seconds_left(
    written: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTICE_FILE_VARIABLE, str(tmp_path / "notice"))
    assert announced_s(7.0) == 7.0
    (tmp_path / "notice").write_text(written)
    assert announced_s(7.0) == seconds


@pytest.mark.real
@pytest.mark.usefixtures("sigterm")
def test_a_blocked_sigterm_is_not_lost() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.raise_signal(signal.SIGTERM)  # to this thread, since other threads do not block it
    assert asyncio.run(SignalNoticeSource(grace_s=7.0).wait()).deadline_s == 7.0


@pytest.mark.real
def test_a_cancelled_wait_removes_its_signal_handler() -> None:
    async def main() -> None:
        waiting = asyncio.create_task(SignalNoticeSource().wait())
        await asyncio.sleep(0)
        assert signal.getsignal(signal.SIGTERM) != before
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_first_notice_of_several_sources_counts_and_the_others_stop() -> None:
    async def main() -> None:
        async with metadata(Google(PREEMPTED)) as fake:
            notice = await first_notice(NoNoticeSource(), gcp(fake.url, Hasty(), []))
            assert notice.deadline_s == 30.0
            assert asyncio.all_tasks() == {asyncio.current_task()} | {
                t for t in asyncio.all_tasks() if "RequestHandler" in repr(t)
            }

    asyncio.run(main())


@pytest.mark.parametrize("name", NOTICE_SOURCES)
def test_every_name_has_a_source(name: str) -> None:
    assert (
        type(make_notice_source(name, Hasty())).__name__.lower() == ("no" if name == "none" else name) + "noticesource"
    )


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="--notice is 'ibm': choose one of aws, gcp, azure, none"):
        make_notice_source("ibm", Hasty())
