"""Workers as invocations of an AWS Lambda function, which is created or brought up to date before the first one."""

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
from culm.gnn.launch.base import Ticket
from culm.gnn.launch.entry import WORKER
from culm.gnn.launch.handler import ENTRY, HANDLER_NAME
from culm.gnn.launch.package import Package, package

LONGEST_S = 900
"""The longest life of an invocation."""
MEMORY_MB = (128, 10240)
PAYLOAD_LIMIT = 256 * 1024
"""Bytes of an asynchronous event that every region takes."""
UPLOAD_LIMIT = 50 * 2**20
"""Bytes of a zip that the API takes; a larger one goes through a bucket."""
EVENT_AGE_S = 60
"""An event that could not start by then is dropped: its run has asked for another worker, or is over."""
CALLS_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class Function:
    """The Lambda function that workers are invocations of."""

    role: str = ""
    """ARN of the role that it runs as; AWSLambdaBasicExecutionRole is enough outside of a VPC."""
    function: str = "culm-worker"
    memory_mb: int = 1769
    """1769 MB come with one whole vCPU."""
    timeout_s: int = LONGEST_S
    image: str = ""
    """URI of a container image with culm in it, instead of a zip made here."""
    bucket: str = ""
    """S3 bucket for zips above 50 MiB."""
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    region: str | None = None
    concurrency: int | None = None
    """Workers at once; by default what the account says it has left."""

    def __post_init__(self) -> None:
        if not self.role.startswith("arn:"):
            raise UsageError(
                f"role is {self.role!r}: give the ARN of a role that Lambda may assume, as in role=arn:aws:iam::..."
            )
        for name, (low, high) in {"memory_mb": MEMORY_MB, "timeout_s": (10, LONGEST_S)}.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise UsageError(f"{name} is {value}: Lambda takes {low} to {high}")
        if bool(self.subnets) != bool(self.security_groups):
            raise UsageError("subnets and security_groups belong together: give both, or neither")


class LambdaLauncher:
    """Workers on AWS Lambda. They outlive `close` by a moment: see there."""

    name = "lambda"

    def __init__(self, *, entry: str = WORKER, **options: Any) -> None:
        """Options are the fields of `Function`."""
        self.function = Function(**options)
        self._boto3: Any = _imported("boto3")
        self._entry = entry
        self._client: Any = None
        self._limit = 0
        self._closed = False
        self._turn = asyncio.Lock()

    async def launch(self, ticket: Ticket, count: int) -> None:
        """Invoke the function `count` times, asynchronously. Lives longer than Lambda allows are cut by the handler."""
        event = _event(ticket)
        _check_reachable(ticket.host, inside=bool(self.function.subnets))
        async with self._turn:
            if self._closed:
                raise RunError("the launcher is closed: make another one")
            if self._client is None:
                await asyncio.to_thread(_calling, self._prepare)
            self._check_count(count)
            await asyncio.to_thread(_calling, lambda: self._invoke(event, count))

    async def close(self) -> None:
        """Launch no more. Nothing can stop an invocation from outside: it ends when its connection does, or in time."""
        self._closed = True

    def _prepare(self) -> None:
        client = self._boto3.client("lambda", region_name=self.function.region)
        self._limit = self.function.concurrency or _left(client)
        deploy(client, self.function, self._entry, upload=self._upload)
        self._client = client

    def _upload(self, made: Package) -> dict[str, str]:
        key = f"culm/{self.function.function}.zip"
        store = self._boto3.client("s3", region_name=self.function.region)
        store.put_object(Bucket=self.function.bucket, Key=key, Body=made.content)
        return {"S3Bucket": self.function.bucket, "S3Key": key}

    def _check_count(self, count: int) -> None:
        if not 0 <= count <= self._limit:
            raise UsageError(
                f"count is {count}: the account runs up to {self._limit} invocations at once; start fewer workers, "
                "or have AWS raise the limit"
            )

    def _invoke(self, event: bytes, count: int) -> None:
        def once(_: int) -> None:
            self._client.invoke(FunctionName=self.function.function, InvocationType="Event", Payload=event)

        with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
            list(pool.map(once, range(count)))


def deploy(
    client: Any, function: Function, entry: str = WORKER, *, upload: Callable[[Package], dict[str, str]]
) -> None:
    """Create the function, or bring it up to date. Returns when it can be called."""
    settings = _settings(function, entry)
    made = None if function.image else package(entry)
    name = {"FunctionName": function.function}
    try:
        there = client.get_function_configuration(**name)
    except client.exceptions.ResourceNotFoundException:
        client.create_function(**settings, **_kind(function), Code=_code(function, made, upload))
        client.get_waiter("function_active_v2").wait(**name)
    else:
        if made is None or there.get("CodeSha256") != made.sha256:
            client.update_function_code(**name, **_code(function, made, upload))
            client.get_waiter("function_updated_v2").wait(**name)
        client.update_function_configuration(**settings)
        client.get_waiter("function_updated_v2").wait(**name)
    # An event is a wish of this minute: tried again or kept for hours, it would start workers of a run that is over.
    client.put_function_event_invoke_config(**name, MaximumRetryAttempts=0, MaximumEventAgeInSeconds=EVENT_AGE_S)


def _settings(function: Function, entry: str) -> dict[str, Any]:
    return {
        "FunctionName": function.function,
        "Role": function.role,
        "MemorySize": function.memory_mb,
        "Timeout": function.timeout_s,
        "Environment": {"Variables": {ENTRY: entry}},
        "VpcConfig": {"SubnetIds": list(function.subnets), "SecurityGroupIds": list(function.security_groups)},
    }


def _kind(function: Function) -> dict[str, Any]:
    """What can only be said when a function is made."""
    architecture = {"aarch64": "arm64"}.get(platform.machine(), "x86_64")
    if function.image:
        return {"PackageType": "Image", "Architectures": [architecture]}
    runtime = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return {"Runtime": runtime, "Handler": HANDLER_NAME, "Architectures": [architecture]}


def _code(function: Function, made: Package | None, upload: Callable[[Package], dict[str, str]]) -> dict[str, Any]:
    if made is None:
        return {"ImageUri": function.image}
    if len(made.content) <= UPLOAD_LIMIT:
        return {"ZipFile": made.content}
    if not function.bucket:
        raise UsageError(
            f"the worker's zip has {len(made.content) / 2**20:.0f} MiB and the API takes 50: give a bucket=NAME"
        )
    return upload(made)


def _event(ticket: Ticket) -> bytes:
    event = msgspec.json.encode(asdict(ticket))
    if len(event) > PAYLOAD_LIMIT:
        raise UsageError(f"the ticket has {len(event)} bytes: Lambda takes events of up to {PAYLOAD_LIMIT}")
    return event


def _check_reachable(host: str, *, inside: bool) -> None:
    """A function can not dial this machine's own address, nor a private one from outside of its network."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return  # a name: whether it resolves over there can not be known here
    if address.is_loopback or address.is_unspecified:
        raise UsageError(f"host is {host}, which Lambda can not reach: give the address of this machine")
    if address.is_private and not inside:
        raise UsageError(f"host is {host}, a private address: give subnets and security_groups of its VPC")


def _left(client: Any) -> int:
    return int(client.get_account_settings()["AccountLimit"]["UnreservedConcurrentExecutions"])


def _calling(call: Callable[[], None]) -> None:
    """Calls of AWS, whose refusals become one sentence."""
    botocore = _imported("botocore.exceptions")
    try:
        call()
    except (botocore.ClientError, botocore.BotoCoreError) as error:
        raise RunError(f"AWS refused to run workers on Lambda: {error}") from error


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError("launcher is lambda, which needs boto3: pip install 'culm[aws]'") from None
