"""Calls of AWS: clients that are created at their first use, and errors in culm's words."""

from __future__ import annotations

import importlib
import threading
from typing import Any

from culm.errors import RunError, UsageError
from culm.machines.machine_provider import EngineMissing

_REFUSED_CREDENTIALS = frozenset(
    {"AuthFailure", "ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException"}
)


class AwsRefusal(RunError):
    """AWS has refused a call."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        """AWS's name of the error, as in InvalidInstanceID.NotFound."""


class AwsAccount:
    """The AWS API in one region, with the credentials that boto3 finds. Calls block: use a thread in coroutines."""

    def __init__(self, region: str) -> None:
        """`region`: empty for the one that the environment or the AWS configuration names."""
        self._wanted_region = region
        self._session: Any = None
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()

    @property
    def region(self) -> str:
        """Raises UsageError if there is none."""
        region = self._wanted_region or self._open_session().region_name
        if not region:
            raise UsageError("the AWS region is not known: give --option region=NAME, or set AWS_DEFAULT_REGION")
        return str(region)

    def call(self, service: str, operation: str, **arguments: Any) -> dict[str, Any]:
        """Call one operation. Raises AwsRefusal, RunError without an answer, or UsageError without credentials."""
        client = self._client(service)
        answer: dict[str, Any] = self._translate(operation, lambda: getattr(client, operation)(**arguments))
        return answer

    def list_all(self, service: str, operation: str, key: str, **arguments: Any) -> list[Any]:
        """The entries `key` of all pages of an answer. Raises the same errors as `call`."""
        client = self._client(service)
        pages = self._translate(operation, lambda: list(client.get_paginator(operation).paginate(**arguments)))
        return [entry for page in pages for entry in page.get(key, [])]

    def accepts(self, service: str, operation: str, argument: str) -> bool:
        """Whether the installed boto3 knows an argument."""
        model = self._client(service).meta.service_model.operation_model(operation)
        return argument in model.input_shape.members

    def _client(self, service: str) -> Any:
        with self._lock:  # clients may be shared by threads, but not created by several
            if service not in self._clients:
                settings = _import("botocore.config").Config(retries={"mode": "standard", "max_attempts": 5})
                session = self._open_session()
                self._clients[service] = session.client(service, region_name=self.region, config=settings)
            return self._clients[service]

    def _open_session(self) -> Any:
        """A session of our own: that of boto3 keeps the credentials that it found first."""
        self._session = self._session or _import("boto3").session.Session()
        return self._session

    def _translate(self, operation: str, call: Any) -> Any:
        errors = _import("botocore.exceptions")
        try:
            return call()
        except (errors.NoCredentialsError, errors.PartialCredentialsError) as error:
            raise EngineMissing(f"AWS cannot be used ({error}): set AWS_PROFILE, or run aws configure") from None
        except errors.ClientError as error:
            found = error.response.get("Error", {})
            code, text = str(found.get("Code", "")), str(found.get("Message", "")).rstrip(".")
            if code in _REFUSED_CREDENTIALS:
                raise EngineMissing(f"AWS refuses the credentials ({code}: {text}): set AWS_PROFILE") from None
            raise AwsRefusal(code, f"AWS refuses {operation} in {self.region} ({code}: {text})") from None
        except errors.BotoCoreError as error:
            raise RunError(f"AWS did not answer {operation} in {self.region} ({error})") from None


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise EngineMissing("--on ec2 needs boto3: pip install 'culm[aws]'") from None
