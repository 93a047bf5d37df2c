"""Workers as invocations of an AWS Lambda function, which is created or updated before the first invocation."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from culm.errors import RunError, UsageError
from culm.gnn.launch.lambda_handler import ENTRY_VARIABLE, HANDLER_NAME
from culm.gnn.launch.lambda_package import LambdaPackage, build_package
from culm.gnn.launch.launcher import Ticket
from culm.gnn.launch.worker_entry import WORKER_ENTRY

MAX_LIFETIME_S = 900
"""Maximum lifetime of an invocation."""
MEMORY_RANGE_MB = (128, 10240)
PAYLOAD_LIMIT = 256 * 1024
"""Maximum bytes of an asynchronous event in every region."""
UPLOAD_LIMIT = 50 * 2**20
"""Maximum bytes of a zip in an API call; a larger one is uploaded to a bucket."""
EVENT_AGE_S = 60
"""An event that could not start by then is dropped: its run has launched another worker, or is over."""
CONCURRENT_CALLS = 16


@dataclass(frozen=True, kw_only=True)
class LambdaFunction:
    """Configuration of the Lambda function that runs workers."""

    role: str = ""
    """ARN of the execution role; AWSLambdaBasicExecutionRole suffices outside of a VPC."""
    function: str = "culm-worker"
    memory_mb: int = 1769
    """1769 MB come with one whole vCPU."""
    timeout_s: int = MAX_LIFETIME_S
    image: str = ""
    """URI of a container image with culm, instead of a zip built here."""
    bucket: str = ""
    """S3 bucket for zips above 50 MiB."""
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    region: str | None = None
    concurrency: int | None = None
    """Maximum concurrent workers; default: the account's unreserved concurrency."""

    def __post_init__(self) -> None:
        if not self.role.startswith("arn:"):
            raise UsageError(
                f"role is {self.role!r}: give the ARN of a role that Lambda may assume, as in role=arn:aws:iam::..."
            )
        for name, (low, high) in {"memory_mb": MEMORY_RANGE_MB, "timeout_s": (10, MAX_LIFETIME_S)}.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise UsageError(f"{name} is {value}: Lambda takes {low} to {high}")
        if bool(self.subnets) != bool(self.security_groups):
            raise UsageError("subnets and security_groups belong together: give both, or neither")


class LambdaLauncher:
    """Workers on AWS Lambda. They outlive `close` by a moment, see there."""

    name = "lambda"

    def __init__(self, *, entry: str = WORKER_ENTRY, **options: Any) -> None:
        """Options are the fields of `LambdaFunction`."""
        self.function = LambdaFunction(**options)
        self._boto3: Any = _import_aws("boto3")
        self._entry = entry
        self._client: Any = None
        self._max_concurrency = 0
        self._closed = False
        self._lock = asyncio.Lock()

    async def launch(self, ticket: Ticket, count: int) -> None:
        """Invoke the function `count` times, asynchronously. The handler shortens lifetimes that Lambda does not
        allow."""
        event = _encode_event(ticket)
        _check_reachable(ticket.host, in_vpc=bool(self.function.subnets))
        async with self._lock:
            if self._closed:
                raise RunError("the launcher is closed: create another one")
            if self._client is None:
                await asyncio.to_thread(_call_aws, self._prepare)
            self._check_count(count)
            await asyncio.to_thread(_call_aws, lambda: self._invoke(event, count))

    async def close(self) -> None:
        """Launch no more workers. An invocation cannot be stopped from outside: it ends when its connection closes
        or its time is over."""
        self._closed = True

    def _prepare(self) -> None:
        client = self._boto3.client("lambda", region_name=self.function.region)
        self._max_concurrency = self.function.concurrency or _unreserved_concurrency(client)
        deploy_function(client, self.function, self._entry, upload=self._upload)
        self._client = client

    def _upload(self, package: LambdaPackage) -> dict[str, str]:
        key = f"culm/{self.function.function}.zip"
        store = self._boto3.client("s3", region_name=self.function.region)
        store.put_object(Bucket=self.function.bucket, Key=key, Body=package.content)
        return {"S3Bucket": self.function.bucket, "S3Key": key}

    def _check_count(self, count: int) -> None:
        if not 0 <= count <= self._max_concurrency:
            raise UsageError(
                f"count is {count}: the account runs up to {self._max_concurrency} invocations at once; "
                "start fewer workers, or have AWS raise the limit"
            )

    def _invoke(self, event: bytes, count: int) -> None:
        def once(_: int) -> None:
            self._client.invoke(FunctionName=self.function.function, InvocationType="Event", Payload=event)

        with ThreadPoolExecutor(CONCURRENT_CALLS) as pool:
            list(pool.map(once, range(count)))


def deploy_function(
    client: Any,
    function: LambdaFunction,
    entry: str = WORKER_ENTRY,
    *,
    upload: Callable[[LambdaPackage], dict[str, str]],
) -> None:
    """Create or update the function. Returns when it can be invoked."""
    settings = _settings(function, entry)
    package = None if function.image else build_package(entry)
    name = {"FunctionName": function.function}
    try:
        existing = client.get_function_configuration(**name)
    except client.exceptions.ResourceNotFoundException:
        client.create_function(
            **settings, **_creation_settings(function), Code=_code_location(function, package, upload)
        )
        client.get_waiter("function_active_v2").wait(**name)
    else:
        if package is None or existing.get("CodeSha256") != package.sha256:
            client.update_function_code(**name, **_code_location(function, package, upload))
            client.get_waiter("function_updated_v2").wait(**name)
        client.update_function_configuration(**settings)
        client.get_waiter("function_updated_v2").wait(**name)
    # An event that is retried or kept for hours would start workers of a run that is over.
    client.put_function_event_invoke_config(**name, MaximumRetryAttempts=0, MaximumEventAgeInSeconds=EVENT_AGE_S)


def _settings(function: LambdaFunction, entry: str) -> dict[str, Any]:
    return {
        "FunctionName": function.function,
        "Role": function.role,
        "MemorySize": function.memory_mb,
        "Timeout": function.timeout_s,
        "Environment": {"Variables": {ENTRY_VARIABLE: entry}},
        "VpcConfig": {"SubnetIds": list(function.subnets), "SecurityGroupIds": list(function.security_groups)},
    }


def _creation_settings(function: LambdaFunction) -> dict[str, Any]:
    """Settings that can only be given when a function is created."""
    architecture = {"aarch64": "arm64"}.get(platform.machine(), "x86_64")
    if function.image:
        return {"PackageType": "Image", "Architectures": [architecture]}
    runtime = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return {"Runtime": runtime, "Handler": HANDLER_NAME, "Architectures": [architecture]}


def _code_location(
    function: LambdaFunction, package: LambdaPackage | None, upload: Callable[[LambdaPackage], dict[str, str]]
) -> dict[str, Any]:
    if package is None:
        return {"ImageUri": function.image}
    if len(package.content) <= UPLOAD_LIMIT:
        return {"ZipFile": package.content}
    if not function.bucket:
        raise UsageError(
            f"the worker's zip has {len(package.content) / 2**20:.0f} MiB and the API takes 50: give a bucket=NAME"
        )
    return upload(package)


def _encode_event(ticket: Ticket) -> bytes:
    event = msgspec.json.encode(asdict(ticket))
    if len(event) > PAYLOAD_LIMIT:
        raise UsageError(f"the ticket has {len(event)} bytes: Lambda takes events of up to {PAYLOAD_LIMIT}")
    return event


def _check_reachable(host: str, *, in_vpc: bool) -> None:
    """Raise UsageError for an address that Lambda cannot reach: loopback, or a private one outside of its VPC."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return  # a host name; whether it resolves in Lambda cannot be checked here
    if address.is_loopback or address.is_unspecified:
        raise UsageError(f"host is {host}, which Lambda cannot reach: give the address of this machine")
    if address.is_private and not in_vpc:
        raise UsageError(f"host is {host}, a private address: give subnets and security_groups of its VPC")


def _unreserved_concurrency(client: Any) -> int:
    return int(client.get_account_settings()["AccountLimit"]["UnreservedConcurrentExecutions"])


def _call_aws(call: Callable[[], None]) -> None:
    """Run a call of AWS; its errors become a RunError."""
    botocore = _import_aws("botocore.exceptions")
    try:
        call()
    except (botocore.ClientError, botocore.BotoCoreError) as error:
        raise RunError(f"AWS refused to run workers on Lambda: {error}") from error


def _import_aws(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError("launcher is lambda, which needs boto3: pip install 'culm[aws]'") from None
