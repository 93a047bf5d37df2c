"""What culm asks EC2 for: launch template, script that an instance runs at its first boot, and fleet request.

The token is in none of them: an instance reads it from a SecureString parameter of the Systems Manager, with the rights
of its role.
"""

from __future__ import annotations

import base64
import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from culm.machines.engines.zoned_command import zoned_command_line
from culm.machines.join_token import TOKEN_VARIABLE
from culm.machines.machine_provider import LABEL, MACHINE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from culm.machines.machine_provider import LaunchSpec, MachineRequest

EXIT_MARK = "culm-agent-exit:"
"""Begins the line on the console of an instance that holds the exit status of its agent."""
_STOP_MARGIN_S = 15
"""Seconds between the end of an agent's grace and the moment when systemd kills it."""
_USER = "culm"


@dataclass(frozen=True, kw_only=True)
class Ec2Options:
    """How instances of a launch are made."""

    region: str
    role: str
    """Name of the instance profile, which may read the parameter with the token."""
    subnets: tuple[str, ...] = ()
    """Empty: the default subnet of every zone."""
    security_groups: tuple[str, ...] = ()
    """Empty: the default security group of the network, whose members reach each other."""
    key: str = ""
    """Name of a key pair for ssh."""
    setup: str = ""
    """Shell command that an instance runs before its agent, as root."""
    disk_gib: int = 0
    """Size of the root volume; 0: that of the image."""


def template_name(launch: str) -> str:
    """The name of the launch template of a launch."""
    return f"culm-{launch}"


def parameter_name(launch: str) -> str:
    """The name of the SecureString parameter with the token of a launch."""
    return f"/culm/{launch}/token"


def tags(launch: str) -> list[dict[str, str]]:
    """The tags of everything of a launch."""
    return _tag_list({LABEL: launch, "Name": f"culm-{launch}"})


def _tag_list(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": name, "Value": value} for name, value in values.items()]


def launch_template(
    spec: LaunchSpec, options: Ec2Options, request: MachineRequest, *, root_device: str = "/dev/sda1"
) -> dict[str, Any]:
    """The LaunchTemplateData of a launch: all that its instances have in common. `root_device`: of the image.

    An instance that shuts down is terminated, so that it costs nothing when its agent has ended; its metadata is served
    to holders of a session token only (IMDSv2), and not to containers on it.
    """
    data: dict[str, Any] = {
        "ImageId": spec.image,
        "IamInstanceProfile": {"Name": options.role},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 1},
        "TagSpecifications": [{"ResourceType": kind, "Tags": tags(spec.launch)} for kind in ("instance", "volume")],
        "UserData": base64.b64encode(boot_script(spec, options, request).encode()).decode(),
    }
    if options.security_groups:
        data["SecurityGroupIds"] = list(options.security_groups)
    if options.key:
        data["KeyName"] = options.key
    if options.disk_gib:
        volume = {"VolumeSize": options.disk_gib, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
        data["BlockDeviceMappings"] = [{"DeviceName": root_device, "Ebs": volume}]
    return data


def fleet_request(
    launch: str, request: MachineRequest, subnets: Sequence[str], *, template: str, version: str, client_token: str
) -> dict[str, Any]:
    """The arguments of CreateFleet for machines of one kind.

    The fleet is of type `instant`: EC2 chooses the zones with the most capacity at the best price, starts the
    instances, and forgets the fleet. A fleet of type `maintain`, or an auto-scaling group, would also replace the
    instances that end on purpose, when the run has ended or nobody can be reached: it would cost money until somebody
    noticed. Lost machines are replaced by culm instead.
    """
    overrides = [{"InstanceType": request.instance, "SubnetId": subnet} for subnet in subnets]
    asked: dict[str, Any] = {
        "Type": "instant",
        "ClientToken": client_token,
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateName": template, "Version": version},
                "Overrides": overrides,
            }
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": request.count,
            "DefaultTargetCapacityType": request.market,
        },
        "TagSpecifications": [{"ResourceType": "fleet", "Tags": tags(launch)}],
    }
    if request.labels:
        asked["TagSpecifications"].append({"ResourceType": "instance", "Tags": _tag_list(request.labels)})
    if request.market == "spot":
        asked["SpotOptions"] = {
            "AllocationStrategy": "price-capacity-optimized",
            "InstanceInterruptionBehavior": "terminate",
        }
    else:
        asked["OnDemandOptions"] = {"AllocationStrategy": "lowest-price"}
    return asked


def boot_script(spec: LaunchSpec, options: Ec2Options, request: MachineRequest) -> str:
    """The script that an instance runs as root at its first boot (user data for cloud-init).

    It reads the token, starts the agent as a systemd unit of an unprivileged user, and ends. The instance powers itself
    off, and is thereby terminated, when the agent has ended for whatever reason or the script has failed.
    """
    return _BOOT_SCRIPT.format(
        launch=spec.launch,
        mark=EXIT_MARK,
        setup=options.setup or ":",
        region=shlex.quote(options.region),
        parameter=shlex.quote(parameter_name(spec.launch)),
        token_variable=TOKEN_VARIABLE,
        machine_variable=MACHINE_VARIABLE,
        environment="".join(f"{name}={_quote(value)}\n" for name, value in sorted(spec.environment.items())),
        command=zoned_command_line(spec, request, '"$CULM_ZONE"'),
        user=_USER,
        stop_s=f"{spec.grace_s + _STOP_MARGIN_S:g}",
    )


def _quote(value: str) -> str:
    """A value for an EnvironmentFile of systemd."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def manifest_text(spec: LaunchSpec, options: Ec2Options, request: MachineRequest, subnets: Sequence[str]) -> str:
    """The requests of a launch as JSON, each under a comment, and the boot script as it is."""
    template = {**launch_template(spec, options, request), "UserData": "the script below, in base64"}
    name = template_name(spec.launch)
    fleet = fleet_request(spec.launch, request, subnets, template=name, version="1", client_token="one for each call")
    parameter = {"Name": parameter_name(spec.launch), "Type": "SecureString", "Value": "the join token"}
    parts = [
        ("ssm put-parameter", parameter),
        ("ec2 create-launch-template", {"LaunchTemplateName": name, "LaunchTemplateData": template}),
        ("ec2 create-fleet", fleet),
    ]
    shown = [f"# aws {command} --region {options.region}\n{json.dumps(body, indent=2)}\n" for command, body in parts]
    return "\n".join([*shown, f"# user data\n{boot_script(spec, options, request)}"])


_BOOT_SCRIPT = """\
#!/bin/sh
# Joins the run of culm launch {launch}. The instance is terminated when its agent ends.
set -eu
export HOME=/root
failed() {{ echo "{mark} 1 (the boot script failed)" >/dev/console; shutdown -h now; }}
trap failed EXIT

ask() {{ curl -sSf --retry 5 -H "X-aws-ec2-metadata-token: $session" "http://169.254.169.254/latest/meta-data/$1"; }}
session=$(curl -sSf --retry 5 -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 300" \\
    http://169.254.169.254/latest/api/token)
machine=$(ask instance-id)
zone=$(ask placement/availability-zone)

{setup}

id {user} >/dev/null 2>&1 || useradd --system --create-home {user}
mkdir -p /etc/culm
install -m 600 /dev/null /etc/culm/agent.env
cat >/etc/culm/agent.env <<'ENVIRONMENT'
{environment}ENVIRONMENT
echo "{machine_variable}=$machine" >>/etc/culm/agent.env
echo "CULM_ZONE=$zone" >>/etc/culm/agent.env
# Only root can read the file. The agent gets the token as an environment variable.
token=$(aws ssm get-parameter --region {region} --name {parameter} --with-decryption \\
    --query Parameter.Value --output text)
echo "{token_variable}=$token" >>/etc/culm/agent.env

cat >/etc/culm/agent.sh <<'AGENT'
exec {command}
AGENT
chmod 755 /etc/culm /etc/culm/agent.sh

cat >/etc/systemd/system/culm-agent.service <<'UNIT'
[Unit]
Description=culm agent
After=network-online.target
# Dead-man's switch: no agent, no instance.
SuccessAction=poweroff
FailureAction=poweroff

[Service]
User={user}
WorkingDirectory=/home/{user}
EnvironmentFile=/etc/culm/agent.env
ExecStart=/bin/sh /etc/culm/agent.sh
ExecStopPost=+/bin/sh -c 'echo "{mark} $EXIT_STATUS" >/dev/console'
StandardOutput=journal+console
StandardError=journal+console
# A stop of the instance is a notice for the agent: its workers are not signalled.
KillMode=mixed
TimeoutStopSec={stop_s}
NoNewPrivileges=yes
UNIT
systemctl daemon-reload
systemctl start --no-block culm-agent.service
trap - EXIT
"""
