"""Workers on AWS Lambda: the zip run for real in a process of its own, the API against moto."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import zipfile
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from culm.errors import RunError, UsageError
from culm.gnn.launch import awslambda
from culm.gnn.launch import package as packaging
from culm.gnn.launch.awslambda import Function, LambdaLauncher
from culm.gnn.launch.base import Ticket
from culm.gnn.launch.handler import ENTRY, GRACE_S, handler
from culm.gnn.launch.package import Package, package

from . import launch_standin as standin
from .invoked import Minute

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not (find_spec("moto") and find_spec("boto3")), reason="moto stands in for AWS")
STANDIN = standin.named(standin.serve)
TICKET = Ticket("r1", "secret", "54.1.2.3", 4000, 3600)
MINUTE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from culm.gnn.launch.handler import handler
class Context:
    def get_remaining_time_in_millis(self):
        return 60_000
print(json.dumps(handler(json.loads(sys.argv[2]), Context())))
"""


def aws() -> Any:
    """boto3, which takes its time to import."""
    return import_module("boto3")


@pytest.fixture
def role(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An account of moto's, with a role for the function."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with import_module("moto").mock_aws(config={"lambda": {"use_docker": False}}):
        made = aws().client("iam").create_role(RoleName="culm", AssumeRolePolicyDocument="{}")
        yield made["Role"]["Arn"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Invocations that were asked for."""
    made: list[dict[str, Any]] = []
    client = aws().client

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = client(*args, **kwargs)
        found.meta.events.register("provide-client-params.lambda.Invoke", lambda params, **_: made.append(params))
        return found

    monkeypatch.setattr(aws(), "client", watched)
    return made


@pytest.fixture(scope="module")
def made() -> Package:
    """The zip of the stand-in, for all who need one."""
    return package(STANDIN)


@pytest.fixture
def zipped(made: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers do not zip the same files again."""
    monkeypatch.setattr(awslambda, "package", {STANDIN: made}.__getitem__)


def launch(launcher: LambdaLauncher, count: int, ticket: Ticket = TICKET) -> None:
    asyncio.run(launcher.launch(ticket, count))


def launched(role: str, **options: Any) -> LambdaLauncher:
    return LambdaLauncher(role=role, concurrency=10, entry=STANDIN, **options)


@pytest.mark.real
def test_the_packaged_handler_runs_with_nothing_but_its_zip_and_dials_back(made: Package, tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(made.content)) as archive:
        archive.extractall(tmp_path)

    async def story() -> None:
        async with standin.desk() as desk:
            event = json.dumps(asdict(Ticket("r1", "secret", "127.0.0.1", desk.port, 3600)))
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-c", MINUTE, str(tmp_path), event,
                env={ENTRY: STANDIN}, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            card = await desk.worker()
            assert (card["run"], card["token"]) == ("r1", "secret")
            assert card["seconds"] == 60 - GRACE_S
            await desk.hang_up()
            printed, _ = await process.communicate()
            assert json.loads(printed) == {"run": "r1"}

    asyncio.run(story())


@pytest.mark.real
def test_equal_files_give_equal_zips_without_caches_and_tests(made: Package) -> None:
    assert made.sha256 == package(STANDIN).sha256
    with zipfile.ZipFile(io.BytesIO(made.content)) as archive:
        names = archive.namelist()
        assert made.unzipped == sum(info.file_size for info in archive.infolist())
    assert "culm/gnn/launch/handler.py" in names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.real
def test_a_package_that_lambda_would_not_take_names_its_largest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaging, "UNZIPPED_LIMIT", 1000)
    with pytest.raises(UsageError, match=r"MiB, of which \w+ .*image=URI"):
        package(STANDIN)


def test_an_event_that_is_no_ticket_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no ticket.*run"):
        handler({"token": "x"}, Minute())


@pytest.mark.real
def test_the_function_is_created_once_and_invoked_without_waiting(role: str, calls: list[dict[str, Any]]) -> None:
    launcher = launched(role, memory_mb=512)
    launch(launcher, 3)
    launch(launcher, 1)
    client = aws().client("lambda")
    made = client.get_function_configuration(FunctionName="culm-worker")
    assert (made["MemorySize"], made["Timeout"], made["Handler"]) == (512, 900, "culm.gnn.launch.handler.handler")
    assert made["Runtime"] == f"python3.{sys.version_info.minor}"
    assert made["Environment"]["Variables"] == {ENTRY: STANDIN}
    assert [call["InvocationType"] for call in calls] == ["Event"] * 4
    assert {call["Payload"] for call in calls} == {json.dumps(asdict(TICKET), separators=(",", ":")).encode()}


@pytest.mark.usefixtures("zipped")
@pytest.mark.real
def test_events_are_neither_repeated_nor_kept(role: str) -> None:
    launch(launched(role), 0)
    kept = aws().client("lambda").get_function_event_invoke_config(FunctionName="culm-worker")
    assert (kept["MaximumRetryAttempts"], kept["MaximumEventAgeInSeconds"]) == (0, 60)


@pytest.mark.usefixtures("zipped")
@pytest.mark.real
def test_a_function_of_older_code_or_other_settings_is_brought_up_to_date(
    role: str, made: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(launched(role, memory_mb=512), 0)
    client = aws().client("lambda")
    before = client.get_function_configuration(FunctionName="culm-worker")["CodeSha256"]
    buffer = io.BytesIO()
    buffer.write(made.content)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("newer.py", "")
    monkeypatch.setattr(awslambda, "package", lambda _: Package(buffer.getvalue(), made.unzipped))
    launch(launched(role, memory_mb=1024, timeout_s=300), 0)
    after = client.get_function_configuration(FunctionName="culm-worker")
    assert after["CodeSha256"] != before
    assert (after["MemorySize"], after["Timeout"]) == (1024, 300)


def test_a_zip_that_is_too_large_for_the_api_goes_through_a_bucket(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("worker.py", "")
    monkeypatch.setattr(awslambda, "package", lambda _: Package(buffer.getvalue(), 0))
    monkeypatch.setattr(awslambda, "UPLOAD_LIMIT", 10)
    with pytest.raises(UsageError, match="bucket=NAME"):
        launch(launched(role), 0)
    aws().client("s3").create_bucket(Bucket="code")
    launch(launched(role, bucket="code"), 0)
    made = aws().client("lambda").get_function_configuration(FunctionName="culm-worker")
    assert made["CodeSha256"] == Package(buffer.getvalue(), 0).sha256


def test_more_workers_than_the_account_may_run_are_refused(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awslambda, "deploy", lambda *_, **__: None)
    with pytest.raises(UsageError, match=r"count is 11.*up to 10"):
        launch(launched(role), 11)


def test_the_account_is_asked_how_many_it_may_run(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awslambda, "deploy", lambda *_, **__: None)
    monkeypatch.setattr(awslambda, "_left", lambda _: 4)
    with pytest.raises(UsageError, match=r"count is 5.*up to 4"):
        launch(LambdaLauncher(role=role), 5)


@pytest.mark.parametrize(
    ("host", "said"), [("127.0.0.1", "can not reach"), ("0.0.0.0", "can not reach"), ("10.0.0.5", "private address")]
)
def test_an_address_that_lambda_can_not_dial_is_refused(role: str, host: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"host is {host}.*{said}"):
        launch(launched(role), 1, replace(TICKET, host=host))


def test_an_event_larger_than_lambda_takes_is_refused(role: str) -> None:
    with pytest.raises(UsageError, match="the ticket has"):
        launch(launched(role), 1, replace(TICKET, token="x" * 300_000))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"role": ""}, "role is ''"),
        ({"memory_mb": 100}, "memory_mb is 100.*128 to 10240"),
        ({"memory_mb": 20000}, "memory_mb is 20000"),
        ({"timeout_s": 901}, "timeout_s is 901.*900"),
        ({"subnets": ("a",)}, "security_groups"),
    ],
)
def test_what_lambda_does_not_offer_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Function(**({"role": "arn:aws:iam::1:role/x"} | wrong))


def test_a_refusal_of_aws_is_one_sentence(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awslambda, "package", lambda _: Package(b"PK", 0))
    with pytest.raises(RunError, match="AWS refused"):
        launch(launched(role + "-which-is-not-there"), 1)


def test_a_closed_launcher_invokes_nothing(role: str, calls: list[dict[str, Any]]) -> None:
    launcher = launched(role)
    asyncio.run(launcher.close())
    with pytest.raises(RunError, match="closed"):
        launch(launcher, 1)
    assert calls == []


def test_without_boto3_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError, match=r"pip install 'culm\[aws\]'"):
        LambdaLauncher(role="arn:aws:iam::1:role/x")
