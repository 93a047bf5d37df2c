"""Machines of EC2: what is asked of AWS, that nothing is left behind, and that no secret can be read by others."""

from __future__ import annotations

import asyncio
import base64
import json
import stat
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.machines.engines.emulated_instances import instance_commands, run_boot_script
from tests.machines.engines.fake_aws import IMAGE, REGION, FakeAws, moto_server, set_up_account, share_session

from culm.errors import RunError, UsageError
from culm.machines.engines.ec2_machines import Ec2Machines, _raise_unless_lack_of_capacity, read_console
from culm.machines.engines.ec2_prices import newest_by_zone
from culm.machines.engines.ec2_templates import Ec2Options, boot_script
from culm.machines.join_token import JoinToken, encode_token
from culm.machines.launch_preparation import check_requests
from culm.machines.machine_provider import LaunchSpec, Machine, MachineProvider, MachineRequest, ProviderSettings
from culm.machines.machine_provider_registry import open_machine_provider

pytestmark = pytest.mark.skipif(
    not (find_spec("moto") and find_spec("boto3") and find_spec("flask")), reason="moto[server] stands in for AWS"
)
TOKEN = encode_token(JoinToken(("https://10.0.0.5:2379",), bytes(range(32)), b"f" * 32, "root"))
SPEC = LaunchSpec(launch="gpt-a1", job="gpt", token=TOKEN, image=IMAGE, environment={"HF_HOME": '/data/"hf" \\ home'})
SPOT = MachineRequest(count=2, instance="g5.xlarge", market="spot")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeAws]:
    with moto_server() as aws:
        yield aws


@pytest.fixture
def aws(server: FakeAws, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeAws:
    server.reset()
    set_up_account(server, monkeypatch)
    if "credentials" not in request.node.name:
        share_session(monkeypatch)
    return server


def provider(launch: str = "gpt-a1", **options: str) -> MachineProvider:
    found = open_machine_provider("ec2", ProviderSettings(launch=launch, options=options))
    assert isinstance(found, Ec2Machines)
    return found


def start(machines: MachineProvider, asked: MachineRequest = SPOT, spec: LaunchSpec = SPEC) -> list[str]:
    return asyncio.run(machines.request(spec, asked))


def listed(machines: MachineProvider) -> dict[str, Machine]:
    return {machine.id: machine for machine in asyncio.run(machines.machines())}


def test_a_request_starts_instances_that_are_tagged_and_listed_with_their_price(aws: FakeAws) -> None:
    machines = provider()
    machines.check(SPOT)
    ids = start(machines)
    assert len(ids) == 2
    found = listed(machines)
    assert set(found) == set(ids)
    for machine in found.values():
        assert (machine.state, machine.instance, machine.market) == ("running", "g5.xlarge", "spot")
        assert machine.zone.startswith(REGION)
        assert machine.price_per_h == 0.00001  # moto's spot price, not that of the catalogue
        assert machine.started_at > 1.7e9
    on_demand = start(machines, MachineRequest(count=1, instance="g5.xlarge"))
    assert listed(machines)[on_demand[0]].price_per_h == 1.006
    every_tag = [{tag["Key"]: tag["Value"] for tag in found["Tags"]} for found in aws.instances()]
    assert [tags["culm-launch"] for tags in every_tag] == ["gpt-a1"] * 3


def test_instances_need_imdsv2_end_with_their_agent_and_carry_no_secret(aws: FakeAws) -> None:
    ids = start(provider(key="mine", setup="pip install culm.whl"))
    ec2 = aws.client("ec2")
    (version,) = ec2.describe_launch_template_versions(LaunchTemplateName="culm-gpt-a1")["LaunchTemplateVersions"]
    data = version["LaunchTemplateData"]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data["IamInstanceProfile"]["Name"] == "culm-machine"
    script = base64.b64decode(data["UserData"]).decode()
    assert "culm agent --join env --job gpt --notice aws" in script
    assert "SuccessAction=poweroff" in script
    assert "pip install culm.whl" in script
    user_data = ec2.describe_instance_attribute(InstanceId=ids[0], Attribute="userData")
    assert base64.b64decode(user_data["UserData"]["Value"]).decode() == script
    shown = json.dumps([data, ec2.describe_instances(), ec2.describe_fleets()], default=str)
    assert TOKEN not in script + shown
    parameter = aws.client("ssm").get_parameter(Name="/culm/gpt-a1/token", WithDecryption=True)["Parameter"]
    assert (parameter["Type"], parameter["Value"]) == ("SecureString", TOKEN)


def test_machines_of_another_kind_get_another_version_of_the_template_and_others_do_not(aws: FakeAws) -> None:
    machines = provider(disk="100")
    start(machines)
    start(machines)
    (other,) = start(machines, MachineRequest(count=1, instance="g5.xlarge"), replace(SPEC, environment={"KIND": "b"}))
    versions = aws.client("ec2").describe_launch_template_versions(LaunchTemplateName="culm-gpt-a1")
    found = [each["LaunchTemplateData"] for each in versions["LaunchTemplateVersions"]]
    assert [data["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] for data in found] == [100, 100]
    script = aws.client("ec2").describe_instance_attribute(InstanceId=other, Attribute="userData")
    assert 'KIND="b"' in base64.b64decode(script["UserData"]["Value"]).decode()


def test_an_instance_that_was_interrupted_is_listed_as_ended_and_another_can_be_requested(aws: FakeAws) -> None:
    machines = provider()
    first, second = start(machines)
    aws.interrupt(first)
    assert (listed(machines)[first].state, listed(machines)[second].state) == ("ended", "running")
    (third,) = start(machines, MachineRequest(count=1, instance="g5.xlarge", market="spot"))
    assert {each for each, machine in listed(machines).items() if machine.state == "running"} == {second, third}


def test_drained_and_released_machines_end_and_others_stay(aws: FakeAws) -> None:
    machines = provider()
    ids = start(machines, MachineRequest(count=3, instance="g5.xlarge", market="spot"))
    asyncio.run(machines.drain([ids[0]], 30.0))
    asyncio.run(machines.release([ids[1], "i-0123456789abcdef0"]))  # one that nobody knows is no error
    assert [listed(machines)[each].state for each in ids] == ["ended", "ended", "running"]


def test_down_removes_all_of_this_launch_and_nothing_else_and_may_be_repeated(aws: FakeAws) -> None:
    other = provider("bert-b2")
    kept = start(other, spec=LaunchSpec(launch="bert-b2", job="bert", token=TOKEN, image=IMAGE))
    start(provider())
    start(provider())  # another process of the same launch
    asyncio.run(provider().down())
    asyncio.run(provider().down())
    assert {each["InstanceId"] for each in aws.instances("running")} == set(kept)
    asyncio.run(other.down())
    assert aws.leftovers() == []


def test_a_zone_is_kept_and_the_fleet_chooses_by_price_and_capacity(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    machines = provider()
    assert isinstance(machines, Ec2Machines)
    call = machines._account.call

    def record(service: str, operation: str, **arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        return call(service, operation, **arguments)

    monkeypatch.setattr(machines._account, "call", record)
    ids = start(machines, MachineRequest(count=1, instance="g5.xlarge", market="spot", zone="us-east-1b"))
    assert listed(machines)[ids[0]].zone == "us-east-1b"
    fleet = next(found for found in asked if "LaunchTemplateConfigs" in found)
    assert fleet["Type"] == "instant"
    assert fleet["SpotOptions"]["AllocationStrategy"] == "price-capacity-optimized"
    overrides = fleet["LaunchTemplateConfigs"][0]["Overrides"]
    assert [each["InstanceType"] for each in overrides] == ["g5.xlarge"]


@pytest.mark.parametrize(
    ("asked", "options", "words"),
    [
        (MachineRequest(count=1), {}, "--instance is missing"),
        (MachineRequest(count=1, instance="g5.huge"), {}, "--instance is 'g5.huge': us-east-1 has none"),
        (MachineRequest(count=1, instance="g5.xlarge", zone="us-east-1e"), {}, "us-east-1e has none"),
        (SPOT, {"role": "nobody"}, "role is 'nobody': there is no such instance profile"),
        (SPOT, {"subnets": "subnet-0"}, "InvalidSubnetID"),
        (SPOT, {"disk": "many"}, "--option disk is 'many'"),
        (SPOT, {"colour": "red"}, "ec2 has no such option"),
    ],
)
def test_a_request_that_can_not_work_is_refused_before_anything_is_started(
    aws: FakeAws, asked: MachineRequest, options: dict[str, str], words: str
) -> None:
    with pytest.raises((UsageError, RunError), match=words):
        provider(**options).check(asked)
    assert aws.leftovers() == []


def test_of_the_types_that_culm_proposes_those_that_a_region_lacks_are_left_out(aws: FakeAws) -> None:
    sold, unknown = SPOT, MachineRequest(count=1, instance="g5.huge")
    assert check_requests(provider(), [unknown, sold], 2, any_=True, dry_run=False) == ((sold,), "")
    for proposed in (True, False):
        with pytest.raises(UsageError, match=r"g5\.huge"):
            check_requests(provider(), [unknown] if proposed else [sold, unknown], 2, any_=proposed, dry_run=False)


def test_without_credentials_or_region_one_sentence_says_what_to_set(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UsageError, match="set AWS_PROFILE"):
        provider().check(SPOT)
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(UsageError, match="--option region=NAME"):
        provider().check(SPOT)


def test_a_dry_run_needs_no_account_and_prints_requests_and_script_without_the_token() -> None:
    text = provider(region="eu-west-1", disk="200").manifest(SPEC, SPOT)
    assert TOKEN not in text
    for part in ("aws ssm put-parameter --region eu-west-1", "aws ec2 create-fleet", '"VolumeSize": 200', "#!/bin/sh"):
        assert part in text
    fleet = json.loads(text.split("create-fleet --region eu-west-1\n")[1].split("\n# user data")[0])
    assert fleet["TargetCapacitySpecification"] == {"TotalTargetCapacity": 2, "DefaultTargetCapacityType": "spot"}
    with pytest.raises(UsageError, match="--image is missing"):
        provider().manifest(LaunchSpec(launch="gpt-a1", job="gpt", token=TOKEN), SPOT)


def test_a_lack_of_capacity_is_no_error_and_a_refusal_is() -> None:
    _raise_unless_lack_of_capacity([{"ErrorCode": "InsufficientInstanceCapacity", "ErrorMessage": "none left"}])
    with pytest.raises(RunError, match=r"EC2 started no instance \(UnauthorizedOperation: not you\)"):
        _raise_unless_lack_of_capacity([{"ErrorCode": "UnauthorizedOperation", "ErrorMessage": "not you."}])


def test_the_end_of_an_agent_is_read_from_the_console() -> None:
    console = (
        "booting\nculm: joining job gpt as node 3\nculm: the token of --join expired\nculm-agent-exit: 2\npoweroff"
    )
    assert read_console(console) == (2, "the token of --join expired")
    assert read_console("Linux") == (None, "")


def test_of_several_spot_prices_the_newest_of_each_zone_counts() -> None:
    history = [
        {"Timestamp": "2026-01-02", "AvailabilityZone": "a", "SpotPrice": "2.0"},
        {"Timestamp": "2026-01-01", "AvailabilityZone": "a", "SpotPrice": "1.0"},
        {"Timestamp": "2025-01-01", "AvailabilityZone": "b", "SpotPrice": "3.0"},
    ]
    assert newest_by_zone(history) == {"a": 2.0, "b": 3.0}


class Boot:
    """The boot script of an instance, run."""

    def __init__(self, folder: Path, *, parameter: str = f"echo {TOKEN}", setup: str = "true") -> None:
        script = boot_script(SPEC, Ec2Options(region=REGION, role="culm-machine", setup=setup), SPOT)
        done = run_boot_script(script, folder, instance_commands("i-0abc", "us-east-1b", parameter))
        self.status, self.calls = done.returncode, (folder / "calls").read_text().splitlines()


def test_an_instance_reads_the_token_into_a_file_of_root_and_starts_its_agent(tmp_path: Path) -> None:
    boot = Boot(tmp_path)
    assert boot.status == 0
    assert boot.calls[-1] == "systemctl start --no-block culm-agent.service"
    assert "aws ssm get-parameter --region us-east-1 --name /culm/gpt-a1/token --with-decryption" in boot.calls[4]
    environment = tmp_path / "etc/culm/agent.env"
    assert stat.S_IMODE(environment.stat().st_mode) == 0o600
    lines = environment.read_text().splitlines()
    assert lines == [
        'HF_HOME="/data/\\"hf\\" \\\\ home"',
        "CULM_MACHINE=i-0abc",
        "CULM_ZONE=us-east-1b",
        f"CULM_TOKEN={TOKEN}",
    ]
    assert not [line for line in boot.calls if TOKEN in line]


@pytest.mark.parametrize("broken", [{"parameter": "exit 254"}, {"setup": "false"}])
def test_an_instance_that_can_not_join_shuts_itself_down(tmp_path: Path, broken: dict[str, str]) -> None:
    boot = Boot(tmp_path, **broken)
    assert boot.status != 0
    assert boot.calls[-1] == "shutdown -h now"
    assert read_console((tmp_path / "console").read_text()).status == 1
