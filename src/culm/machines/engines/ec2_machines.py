"""Machines of EC2: spot or on-demand instances that terminate themselves when their agent has ended.

docs/launch-ec2.md says what an account needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from culm.errors import RunError, UsageError
from culm.machines.agent_process import describe_agent_end
from culm.machines.engines.aws_account import AwsAccount, AwsRefusal
from culm.machines.engines.ec2_prices import Ec2Prices
from culm.machines.engines.ec2_templates import (
    EXIT_MARK,
    Ec2Options,
    fleet_request,
    launch_template,
    manifest_text,
    parameter_name,
    tags,
    template_name,
)
from culm.machines.machine_provider import (
    LABEL,
    LaunchSpec,
    Machine,
    MachineNotice,
    MachineRequest,
    MachineState,
    ProviderSettings,
    no_notices,
)

_DEFAULT_ROLE = "culm-machine"
_NO_CAPACITY = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientCapacity",
        "InsufficientHostCapacity",
        "UnfulfillableCapacity",
        "MaxSpotInstanceCountExceeded",
        "SpotMaxPriceTooLow",
        "InstanceLimitExceeded",
        "VcpuLimitExceeded",
        "Unsupported",  # this type is not sold in this zone
        "UnsupportedOperation",
    }
)
"""Errors of single zones and types in a fleet request that are no error of the request."""
_FLEET_TAG = "aws:ec2:fleet-id"
"""EC2's own tag of an instance that a fleet has started."""
_ALIVE = ("pending", "running", "stopping", "stopped", "shutting-down")
_STATES: dict[str, MachineState] = {"pending": "pending", "running": "running"}
_SELF_TERMINATED = "Client.InstanceInitiatedShutdown"
_REASONS = {
    "Server.SpotInstanceTermination": "EC2 interrupted the spot instance",
    "Server.SpotInstanceShutdown": "EC2 interrupted the spot instance",
    "Server.InsufficientInstanceCapacity": "EC2 had no capacity for it",
    "Server.InternalError": "EC2 failed",
    "Client.UserInitiatedShutdown": "it was terminated by request",
    _SELF_TERMINATED: "its agent ended",
}


class AgentExit(NamedTuple):
    """What the console of an instance tells about the end of its agent."""

    status: int | None
    """None: nothing."""
    last_line: str


class Ec2Machines:
    """One instance for each machine. Nothing but the tag of the launch connects them."""

    name: ClassVar[str] = "ec2"
    options: ClassVar[Mapping[str, str]] = {
        "region": "AWS region; default: that of the environment.",
        "role": f"Instance profile that may read the token; default: {_DEFAULT_ROLE}.",
        "subnets": "Subnets, separated by commas; default: the default subnet of each zone.",
        "security-groups": "Security groups, separated by commas; default: that of the network.",
        "key": "Key pair for ssh; default: none.",
        "setup": "Shell command that an instance runs before its agent, as root.",
        "disk": "Size of the root volume in GiB; default: that of the image.",
    }
    costs_money: ClassVar[bool] = True

    def __init__(self, settings: ProviderSettings) -> None:
        given = settings.options
        self._launch = settings.launch
        self._account = AwsAccount(given.get("region", ""))
        self._prices = Ec2Prices(self._account)
        self._made = Ec2Options(
            region=given.get("region", ""),
            role=given.get("role", _DEFAULT_ROLE),
            subnets=_words(given.get("subnets", "")),
            security_groups=_words(given.get("security-groups", "")),
            key=given.get("key", ""),
            setup=given.get("setup", ""),
            disk_gib=_whole_number("disk", given.get("disk", "0")),
        )
        self._template_versions: dict[str, str] = {}
        """The versions of the launch template that this object has written, by their content."""
        self._device = ""
        """The device name of the root volume, as far as it is known."""
        self._exits: dict[str, AgentExit] = {}
        """Ends of agents that are known, by instance."""

    def check(self, request: MachineRequest) -> None:
        instance = _require_type(request)
        found = self._account.list_all(
            "ec2",
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone" if request.zone else "region",
            Filters=[{"Name": "instance-type", "Values": [instance]}],
        )
        place = request.zone or self._account.region
        if not [offer for offer in found if offer["Location"] == place]:
            raise UsageError(f"--instance is {instance!r}: {place} has none")
        self._check_role()
        self._subnets(request.zone)

    def manifest(self, spec: LaunchSpec, request: MachineRequest) -> str:
        _require_type(request)
        spec = _prepare(spec)
        region = self._made.region or self._account.region
        subnets = self._made.subnets or (f"the default subnet of {request.zone or 'each zone'}",)
        return manifest_text(spec, replace(self._made, region=region), request, subnets)

    async def request(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        return await asyncio.to_thread(self._request, _prepare(spec), request)

    def _request(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        _require_type(request)
        subnets = self._subnets(request.zone)
        self._write_token(spec.token)
        version = self._write_template(spec, request)
        request_fields = fleet_request(
            self._launch,
            request,
            subnets,
            template=template_name(self._launch),
            version=version,
            client_token=uuid.uuid4().hex,
        )
        answer = self._account.call("ec2", "create_fleet", **request_fields)
        started = [found for group in answer.get("Instances", []) for found in group["InstanceIds"]]
        if not started:
            _raise_unless_lack_of_capacity(answer.get("Errors", []))
        return started

    async def machines(self) -> list[Machine]:
        return await asyncio.to_thread(lambda: [self._describe(found) for found in self._instances()])

    async def drain(self, ids: list[str], notice_s: float) -> None:
        """Terminate the instances. EC2 shuts them down first, which is a notice for their agents: systemd sends them
        SIGTERM and waits for the grace period of the launch, whatever `notice_s` says."""
        await asyncio.to_thread(self._terminate, ids, at_once=notice_s <= 0)

    async def release(self, ids: list[str]) -> None:
        await asyncio.to_thread(self._terminate, ids, at_once=True)

    def notices(self) -> AsyncIterator[MachineNotice]:
        """None: the agents ask the metadata service of their instance themselves."""
        return no_notices()

    def price(self, request: MachineRequest) -> float | None:
        return self._prices.price(request.instance, request.market, request.zone)

    async def down(self) -> None:
        await asyncio.to_thread(self._remove_all)

    def _remove_all(self) -> None:
        instances = self._instances(alive=True)
        self._delete_fleets({tag["Value"] for found in instances for tag in found["Tags"] if tag["Key"] == _FLEET_TAG})
        self._terminate([found["InstanceId"] for found in instances], at_once=True)
        own = [{"Name": f"tag:{LABEL}", "Values": [self._launch]}]
        for found in self._account.list_all("ec2", "describe_launch_templates", "LaunchTemplates", Filters=own):
            self._remove("ec2", "delete_launch_template", LaunchTemplateId=found["LaunchTemplateId"])
        self._remove("ssm", "delete_parameter", Name=parameter_name(self._launch))
        self._template_versions.clear()

    def _delete_fleets(self, of_instances: set[str]) -> None:
        """Delete the fleets of the launch. Their instances are terminated one by one: a refusal leaves nothing behind
        but the record of a fleet, which EC2 removes with the last instance."""
        listed = self._account.list_all("ec2", "describe_fleets", "Fleets")  # not those of type instant
        own = {each["FleetId"] for each in listed if {"Key": LABEL, "Value": self._launch} in each.get("Tags", [])}
        for fleet in sorted(own | of_instances):
            with contextlib.suppress(AwsRefusal):
                self._account.call("ec2", "delete_fleets", FleetIds=[fleet], TerminateInstances=True)

    def _remove(self, service: str, operation: str, **arguments: Any) -> None:
        """Delete something that may have been deleted before."""
        try:
            self._account.call(service, operation, **arguments)
        except AwsRefusal as refusal:
            if "NotFound" not in refusal.code:
                raise

    def _check_role(self) -> None:
        try:
            self._account.call("iam", "get_instance_profile", InstanceProfileName=self._made.role)
        except AwsRefusal as refusal:
            if refusal.code == "NoSuchEntity":
                raise UsageError(
                    f"role is {self._made.role!r}: there is no such instance profile; docs/launch-ec2.md shows how to "
                    "make it, --option role=NAME names another"
                ) from None
            # Without the right to read IAM the profile may still be there: CreateFleet would refuse it.

    def _subnets(self, zone: str) -> tuple[str, ...]:
        """The subnets for a request. Raises UsageError if there is none in the zone."""
        chosen: dict[str, Any] = (
            {"SubnetIds": list(self._made.subnets)}
            if self._made.subnets
            else {"Filters": [{"Name": "default-for-az", "Values": ["true"]}]}
        )
        found = self._account.list_all("ec2", "describe_subnets", "Subnets", **chosen)
        fitting = [subnet["SubnetId"] for subnet in found if not zone or subnet["AvailabilityZone"] == zone]
        if not fitting:
            zones = ", ".join(sorted({subnet["AvailabilityZone"] for subnet in found})) or "none"
            raise UsageError(
                f"there is no subnet in {zone or self._account.region} (zones with subnets: {zones}): give "
                "--option subnets=ID,..."
            )
        return tuple(fitting)

    def _write_token(self, token: str) -> None:
        """Write the token to the SecureString parameter of the launch."""
        value = {"Name": parameter_name(self._launch), "Value": token, "Type": "SecureString"}
        try:
            self._account.call("ssm", "put_parameter", **value, Tags=tags(self._launch))
        except AwsRefusal as refusal:
            if refusal.code != "ParameterAlreadyExists":
                raise
            self._account.call("ssm", "put_parameter", **value, Overwrite=True)

    def _write_template(self, spec: LaunchSpec, request: MachineRequest) -> str:
        """Write the launch template for such machines, unless it is written. Returns its version."""
        options = replace(self._made, region=self._account.region)
        data = launch_template(spec, options, request, root_device=self._root_device(spec.image))
        content = json.dumps(data, sort_keys=True)
        if content in self._template_versions:
            return self._template_versions[content]
        named = {"LaunchTemplateName": template_name(self._launch), "LaunchTemplateData": data}
        own = [{"ResourceType": "launch-template", "Tags": tags(self._launch)}]
        try:
            made = self._account.call("ec2", "create_launch_template", **named, TagSpecifications=own)
            version = made["LaunchTemplate"]["LatestVersionNumber"]
        except AwsRefusal as refusal:
            if refusal.code != "InvalidLaunchTemplateName.AlreadyExistsException":
                raise
            made = self._account.call("ec2", "create_launch_template_version", **named)
            version = made["LaunchTemplateVersion"]["VersionNumber"]
        self._template_versions[content] = str(version)
        return self._template_versions[content]

    def _root_device(self, image: str) -> str:
        """The device name of the root volume of an image; empty if its size is not to be changed."""
        if not self._made.disk_gib or self._device:
            return self._device
        if not image.startswith("ami-"):
            raise UsageError(f"--option disk needs an image by its id, as in ami-0abc, and --image is {image!r}")
        found = self._account.call("ec2", "describe_images", ImageIds=[image])["Images"]
        self._device = str(found[0]["RootDeviceName"])
        return self._device

    def _instances(self, *, alive: bool = False) -> list[dict[str, Any]]:
        filters = [{"Name": f"tag:{LABEL}", "Values": [self._launch]}]
        if alive:
            filters.append({"Name": "instance-state-name", "Values": list(_ALIVE)})
        reservations = self._account.list_all("ec2", "describe_instances", "Reservations", Filters=filters)
        return [found for reservation in reservations for found in reservation["Instances"]]

    def _describe(self, found: dict[str, Any]) -> Machine:
        state = _STATES.get(found["State"]["Name"], "ended")
        spot = found.get("InstanceLifecycle") == "spot"
        zone = found.get("Placement", {}).get("AvailabilityZone", "")
        code = found.get("StateReason", {}).get("Code", "")
        reason = _REASONS.get(code, found.get("StateReason", {}).get("Message", "")) if state == "ended" else ""
        failed = False
        if state == "ended" and code == _SELF_TERMINATED:
            ended = self._agent_exit(found["InstanceId"])
            if ended.status is not None:
                reason, failed = describe_agent_end(ended.status, ended.last_line)
        return Machine(
            id=found["InstanceId"],
            state=state,
            instance=found["InstanceType"],
            zone=zone,
            market="spot" if spot else "on-demand",
            price_per_h=self._prices.price(found["InstanceType"], "spot" if spot else "on-demand", zone),
            started_at=found["LaunchTime"].timestamp(),
            reason=reason,
            failed=failed,
        )

    def _agent_exit(self, instance: str) -> AgentExit:
        """How the agent of an instance that shut itself down ended, from its console. EC2 may show that only minutes
        later, and keeps it for an hour."""
        if instance in self._exits:
            return self._exits[instance]
        try:
            console = self._account.call("ec2", "get_console_output", InstanceId=instance)
        except RunError:
            return AgentExit(None, "")
        found = read_console(console.get("Output", ""))
        if found.status is not None:
            self._exits[instance] = found
        return found

    def _terminate(self, ids: list[str], *, at_once: bool) -> None:
        """Terminate instances. `at_once`: without a shutdown of their operating system."""
        if not ids:
            return
        skips = at_once and self._account.accepts("ec2", "TerminateInstances", "SkipOsShutdown")
        arguments: dict[str, Any] = {"SkipOsShutdown": True} if skips else {}
        try:
            self._account.call("ec2", "terminate_instances", InstanceIds=ids, **arguments)
        except AwsRefusal as refusal:
            if refusal.code != "InvalidInstanceID.NotFound":
                raise
            for each in ids if len(ids) > 1 else []:  # EC2 terminates all or none
                self._terminate([each], at_once=at_once)


def read_console(output: str) -> AgentExit:
    """How an agent ended, from the console output of its instance."""
    marks = re.findall(rf"{re.escape(EXIT_MARK)} (\d+)", output)
    lines = re.findall(r"culm: (.+)", output)
    return AgentExit(int(marks[-1]) if marks else None, lines[-1].strip() if lines else "")


def _raise_unless_lack_of_capacity(errors: list[dict[str, Any]]) -> None:
    """Raise RunError for a fleet without an instance, unless EC2 only has none at the moment."""
    others = [error for error in errors if error.get("ErrorCode") not in _NO_CAPACITY]
    if others:
        code, text = others[0].get("ErrorCode", ""), str(others[0].get("ErrorMessage", "")).rstrip(".")
        raise RunError(f"EC2 started no instance ({code}: {text})")


def _prepare(spec: LaunchSpec) -> LaunchSpec:
    """The launch, with what all agents on EC2 need. Raises UsageError without an image."""
    if not spec.image:
        raise UsageError("--image is missing: name a machine image with culm, as in --image ami-0123456789abcdef0")
    return replace(spec, notice="aws") if spec.notice == "none" else spec


def _require_type(request: MachineRequest) -> str:
    if not request.instance:
        raise UsageError("--instance is missing: name instance types, as in --instance g5.xlarge,g6.xlarge")
    return request.instance


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _whole_number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"--option {name} is {text!r}: use a whole number")
    return int(text)
