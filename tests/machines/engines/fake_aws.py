"""An AWS account of moto behind a real HTTP server, with an instance profile for the machines of a launch."""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import pytest

from culm.machines.engines.aws_account import AwsAccount

REGION = "us-east-1"
IMAGE = "ami-12c6146b"
"""An image of every account of moto."""


class FakeAws(NamedTuple):
    """A moto server. boto3 reaches it through AWS_ENDPOINT_URL."""

    url: str

    def client(self, service: str) -> Any:
        return _shared_session().client(service, region_name=REGION)

    def instances(self, *states: str) -> list[dict[str, Any]]:
        """All instances, or those in these states."""
        answer = self.client("ec2").describe_instances()
        found = [each for group in answer["Reservations"] for each in group["Instances"]]
        return [each for each in found if not states or each["State"]["Name"] in states]

    def interrupt(self, instance: str) -> None:
        """Take an instance away, as EC2 does after its notice."""
        self.client("ec2").terminate_instances(InstanceIds=[instance])

    def leftovers(self) -> list[str]:
        """What costs money or holds a secret, in a few words each."""
        ec2 = self.client("ec2")
        found = [each["InstanceId"] for each in self.instances("pending", "running", "stopping", "stopped")]
        found += [each["LaunchTemplateName"] for each in ec2.describe_launch_templates()["LaunchTemplates"]]
        fleets = ec2.describe_fleets()["Fleets"]
        found += [each["FleetId"] for each in fleets if not each["FleetState"].startswith("deleted")]
        found += [each["Name"] for each in self.client("ssm").describe_parameters()["Parameters"]]
        return found

    def reset(self) -> None:
        request = urllib.request.Request(f"{self.url}/moto-api/reset", method="POST")
        assert json.load(urllib.request.urlopen(request))["status"] == "ok"


@contextmanager
def moto_server() -> Iterator[FakeAws]:
    """A moto server on a free port of loopback."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
    server = import_module("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield FakeAws(f"http://{host}:{port}")
    finally:
        server.stop()


@cache
def _shared_session() -> Any:
    """One session for all tests: each session reads descriptions of the services again, which takes half a second."""
    return import_module("boto3").session.Session()


def share_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all accounts of a process use one session. Its region and credentials are those of the first test."""
    monkeypatch.setattr(AwsAccount, "_open_session", lambda _: _shared_session())


def set_up_account(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the AWS tools at the server, and make the instance profile."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    aws.client("iam").create_instance_profile(InstanceProfileName="culm-machine")
