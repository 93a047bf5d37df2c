"""Workers on AWS Lambda: the zip runs in a real process, the API is that of moto."""

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
from tests.gnn import fake_worker
from tests.gnn.lambda_invocation import OneMinuteContext

from culm.errors import RunError, UsageError
from culm.gnn.launch import lambda_launcher, lambda_package
from culm.gnn.launch.lambda_handler import ENTRY_VARIABLE, GRACE_S, handler
from culm.gnn.launch.lambda_launcher import LambdaFunction, LambdaLauncher
from culm.gnn.launch.lambda_package import LambdaPackage, build_package
from culm.gnn.launch.launcher import Ticket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not (find_spec("moto") and find_spec("boto3")), reason="moto stands in for AWS")
FAKE_WORKER_ENTRY = "gnn.fake_worker:serve"
"""Not `tests.gnn...`: the zip has no files of a namespace package, which `tests` is."""
TICKET = Ticket("r1", "secret", "54.1.2.3", 4000, 3600)
HANDLER_SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from culm.gnn.launch.lambda_handler import handler
class Context:
    def get_remaining_time_in_millis(self):
        return 60_000
print(json.dumps(handler(json.loads(sys.argv[2]), Context())))
"""


def aws() -> Any:
    """boto3, imported on first use because it is slow to import."""
    return import_module("boto3")


@pytest.fixture
def role(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An account of moto, with a role for the function."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with import_module("moto").mock_aws(config={"lambda": {"use_docker": False}}):
        response = aws().client("iam").create_role(RoleName="culm", AssumeRolePolicyDocument="{}")
        yield response["Role"]["Arn"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requested invocations."""
    invocations: list[dict[str, Any]] = []
    client = aws().client

    def make_recording_client(*args: Any, **kwargs: Any) -> Any:
        recording = client(*args, **kwargs)
        recording.meta.events.register(
            "provide-client-params.lambda.Invoke", lambda params, **_: invocations.append(params)
        )
        return recording

    monkeypatch.setattr(aws(), "client", make_recording_client)
    return invocations


@pytest.fixture(scope="module")
def package() -> LambdaPackage:
    """The zip of the fake worker, built once."""
    return build_package(FAKE_WORKER_ENTRY)


@pytest.fixture
def prebuilt_package(package: LambdaPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers use the zip that is already built."""
    monkeypatch.setattr(lambda_launcher, "build_package", {FAKE_WORKER_ENTRY: package}.__getitem__)


def launch(launcher: LambdaLauncher, count: int, ticket: Ticket = TICKET) -> None:
    asyncio.run(launcher.launch(ticket, count))


def make_launcher(role: str, **options: Any) -> LambdaLauncher:
    return LambdaLauncher(role=role, concurrency=10, entry=FAKE_WORKER_ENTRY, **options)


@pytest.mark.real
def test_the_packaged_handler_runs_from_its_zip_alone_and_connects(package: LambdaPackage, tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(package.content)) as archive:
        archive.extractall(tmp_path)

    async def scenario() -> None:
        async with fake_worker.open_pool() as pool:
            event = json.dumps(asdict(Ticket("r1", "secret", "127.0.0.1", pool.port, 3600)))
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-c", HANDLER_SCRIPT, str(tmp_path), event,
                env={ENTRY_VARIABLE: FAKE_WORKER_ENTRY}, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            introduction = await pool.next_worker()
            assert (introduction["run"], introduction["token"]) == ("r1", "secret")
            assert introduction["seconds"] == 60 - GRACE_S
            await pool.close_connections()
            printed, _ = await process.communicate()
            assert json.loads(printed) == {"run": "r1"}

    asyncio.run(scenario())


@pytest.mark.real
def test_equal_files_give_equal_zips_without_caches_and_tests(package: LambdaPackage) -> None:
    assert package.sha256 == build_package(FAKE_WORKER_ENTRY).sha256
    with zipfile.ZipFile(io.BytesIO(package.content)) as archive:
        names = archive.namelist()
        assert package.unzipped_bytes == sum(info.file_size for info in archive.infolist())
    assert "culm/gnn/launch/lambda_handler.py" in names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.real
def test_a_package_above_lambdas_limit_names_its_largest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lambda_package, "UNZIPPED_LIMIT", 1000)
    with pytest.raises(UsageError, match=r"MiB, of which \w+ .*image=URI"):
        build_package(FAKE_WORKER_ENTRY)


def test_an_event_that_is_not_a_ticket_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"not a worker's ticket.*run"):
        handler({"token": "x"}, OneMinuteContext())


@pytest.mark.real
def test_the_function_is_created_once_and_invoked_without_waiting(role: str, calls: list[dict[str, Any]]) -> None:
    launcher = make_launcher(role, memory_mb=512)
    launch(launcher, 3)
    launch(launcher, 1)
    client = aws().client("lambda")
    configuration = client.get_function_configuration(FunctionName="culm-worker")
    assert (configuration["MemorySize"], configuration["Timeout"], configuration["Handler"]) == (
        512,
        900,
        "culm.gnn.launch.lambda_handler.handler",
    )
    assert configuration["Runtime"] == f"python3.{sys.version_info.minor}"
    assert configuration["Environment"]["Variables"] == {ENTRY_VARIABLE: FAKE_WORKER_ENTRY}
    assert [call["InvocationType"] for call in calls] == ["Event"] * 4
    assert {call["Payload"] for call in calls} == {json.dumps(asdict(TICKET), separators=(",", ":")).encode()}


@pytest.mark.usefixtures("prebuilt_package")
@pytest.mark.real
def test_events_are_neither_repeated_nor_kept(role: str) -> None:
    launch(make_launcher(role), 0)
    kept = aws().client("lambda").get_function_event_invoke_config(FunctionName="culm-worker")
    assert (kept["MaximumRetryAttempts"], kept["MaximumEventAgeInSeconds"]) == (0, 60)


@pytest.mark.usefixtures("prebuilt_package")
@pytest.mark.real
def test_a_function_with_older_code_or_other_settings_is_updated(
    role: str, package: LambdaPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(make_launcher(role, memory_mb=512), 0)
    client = aws().client("lambda")
    before = client.get_function_configuration(FunctionName="culm-worker")["CodeSha256"]
    buffer = io.BytesIO()
    buffer.write(package.content)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("newer.py", "")
    monkeypatch.setattr(
        lambda_launcher, "build_package", lambda _: LambdaPackage(buffer.getvalue(), package.unzipped_bytes)
    )
    launch(make_launcher(role, memory_mb=1024, timeout_s=300), 0)
    after = client.get_function_configuration(FunctionName="culm-worker")
    assert after["CodeSha256"] != before
    assert (after["MemorySize"], after["Timeout"]) == (1024, 300)


def test_a_zip_that_is_too_large_for_the_api_goes_through_a_bucket(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("worker.py", "")
    monkeypatch.setattr(lambda_launcher, "build_package", lambda _: LambdaPackage(buffer.getvalue(), 0))
    monkeypatch.setattr(lambda_launcher, "UPLOAD_LIMIT", 10)
    with pytest.raises(UsageError, match="bucket=NAME"):
        launch(make_launcher(role), 0)
    aws().client("s3").create_bucket(Bucket="code")
    launch(make_launcher(role, bucket="code"), 0)
    configuration = aws().client("lambda").get_function_configuration(FunctionName="culm-worker")
    assert configuration["CodeSha256"] == LambdaPackage(buffer.getvalue(), 0).sha256


def test_more_workers_than_the_account_may_run_are_refused(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lambda_launcher, "deploy_function", lambda *_, **__: None)
    with pytest.raises(UsageError, match=r"count is 11.*up to 10"):
        launch(make_launcher(role), 11)


def test_more_workers_than_the_account_allows_are_refused(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lambda_launcher, "deploy_function", lambda *_, **__: None)
    monkeypatch.setattr(lambda_launcher, "_unreserved_concurrency", lambda _: 4)
    with pytest.raises(UsageError, match=r"count is 5.*up to 4"):
        launch(LambdaLauncher(role=role), 5)


@pytest.mark.parametrize(
    ("host", "sentence"), [("127.0.0.1", "cannot reach"), ("0.0.0.0", "cannot reach"), ("10.0.0.5", "private address")]
)
def test_an_address_that_lambda_cannot_reach_is_rejected(role: str, host: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=f"host is {host}.*{sentence}"):
        launch(make_launcher(role), 1, replace(TICKET, host=host))


def test_an_event_larger_than_lambda_takes_is_refused(role: str) -> None:
    with pytest.raises(UsageError, match="the ticket has"):
        launch(make_launcher(role), 1, replace(TICKET, token="x" * 300_000))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"role": ""}, "role is ''"),
        ({"memory_mb": 100}, "memory_mb is 100.*128 to 10240"),
        ({"memory_mb": 20000}, "memory_mb is 20000"),
        ({"timeout_s": 901}, "timeout_s is 901.*900"),
        ({"subnets": ("a",)}, "security_groups"),
    ],
)
def test_settings_that_lambda_does_not_offer_are_rejected_by_name(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        LambdaFunction(**({"role": "arn:aws:iam::1:role/x"} | wrong))


def test_an_error_of_aws_is_one_sentence(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lambda_launcher, "build_package", lambda _: LambdaPackage(b"PK", 0))
    with pytest.raises(RunError, match="AWS refused"):
        launch(make_launcher(role + "-which-is-not-there"), 1)


def test_a_closed_launcher_invokes_nothing(role: str, calls: list[dict[str, Any]]) -> None:
    launcher = make_launcher(role)
    asyncio.run(launcher.close())
    with pytest.raises(RunError, match="closed"):
        launch(launcher, 1)
    assert calls == []


def test_without_boto3_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError, match=r"pip install 'culm\[aws\]'"):
        LambdaLauncher(role="arn:aws:iam::1:role/x")
