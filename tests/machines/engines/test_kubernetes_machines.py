"""Machines of Kubernetes: what is created there, that it is valid, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.machines.engines.emulated_cluster import ApiServer, api_server, kubeconfig

from culm.errors import RunError, UsageError
from culm.machines.engines.kubernetes_access import find_access, find_credentials
from culm.machines.engines.kubernetes_api import KubernetesApi
from culm.machines.engines.kubernetes_manifests import PodOptions, agent_script, machine_job, token_secret
from culm.machines.join_token import JoinToken, encode_token
from culm.machines.machine_provider import LaunchSpec, Machine, MachineProvider, MachineRequest, ProviderSettings
from culm.machines.machine_provider_registry import open_machine_provider

needs_kmock = pytest.mark.skipif(
    not (find_spec("kmock") and find_spec("yaml")), reason="kmock stands in for a Kubernetes cluster"
)
needs_schemas = pytest.mark.skipif(
    not (find_spec("kubernetes_validate") and find_spec("yaml")), reason="kubernetes-validate holds the schemas"
)
TOKEN = encode_token(JoinToken(("https://10.0.0.5:2379",), bytes(range(32)), b"f" * 32, "root"))
SPEC = LaunchSpec(launch="gpt-a1", job="gpt", token=TOKEN, image="registry.example/culm:1", grace_s=20)
TWO = MachineRequest(count=2)
SPOT_LABEL = "eks.amazonaws.com/capacityType=SPOT"
DEPLOYED = [Path(__file__).parents[3] / "deploy" / name for name in ("etcd.yaml", "head.yaml")]
OLDEST, NEWEST = "1.29", "1.37"
"""Versions of Kubernetes: the first with all fields that culm uses, and the newest whose schemas are installed."""


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with api_server(tmp_path) as found:
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield found


def provider(launch: str = "gpt-a1", **options: str) -> MachineProvider:
    given = {name.replace("_", "-"): value for name, value in options.items()}
    return open_machine_provider("kubernetes", ProviderSettings(launch=launch, options=given))


def start(machines: MachineProvider, asked: MachineRequest = TWO, spec: LaunchSpec = SPEC) -> list[str]:
    return asyncio.run(machines.request(spec, asked))


def listed(machines: MachineProvider) -> dict[str, Machine]:
    return {machine.id: machine for machine in asyncio.run(machines.machines())}


def add_pod(api: ApiServer, job: str, name: str = "", **status: Any) -> None:
    labels = {"culm-launch": "gpt-a1", "batch.kubernetes.io/job-name": job}
    metadata = {"name": name or f"{job}-x", "namespace": "default", "labels": labels}
    metadata["creationTimestamp"] = f"2026-01-01T00:00:0{len(api.objects('pods'))}Z"
    body = {"metadata": metadata, "spec": {"nodeName": "node-a"}, "status": status}
    api.call("POST", "api/v1/namespaces/default/pods", body)


def set_job(api: ApiServer, name: str, **status: Any) -> None:
    api.call("PATCH", f"apis/batch/v1/namespaces/default/jobs/{name}", {"status": status})


@needs_kmock
def test_a_machine_is_a_job_whose_secret_is_only_in_the_secret(api: ApiServer) -> None:
    machines = provider()
    machines.check(TWO)
    ids = start(machines)
    assert set(listed(machines)) == set(ids)
    assert {machine.state for machine in listed(machines).values()} == {"pending"}
    (secret,) = api.objects("secrets")
    assert secret["stringData"] == {"CULM_TOKEN": TOKEN}
    assert TOKEN not in json.dumps(api.objects("jobs"))
    start(machines)  # later requests use the same Secret
    assert len(api.objects("jobs")) == 4
    assert len(api.objects("secrets")) == 1


@needs_kmock
def test_a_running_pod_has_the_zone_the_type_and_the_price_of_its_node(api: ApiServer) -> None:
    machines = provider(patience="1e10")
    first, second = start(machines)
    add_pod(api, first, phase="Running", startTime="2026-01-01T00:00:00Z")
    unschedulable = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
    add_pod(api, second, phase="Pending", conditions=[unschedulable])
    found = listed(machines)
    assert (found[first].state, found[first].zone, found[first].market) == ("running", "zone-a", "spot")
    assert (found[first].instance, found[first].started_at) == ("g5.xlarge", 1767225600.0)
    assert found[first].price_per_h == provider().price(MachineRequest(count=1, instance="g5.xlarge", market="spot"))
    assert (found[second].state, found[second].reason) == ("pending", "0/2 nodes are available")


@needs_kmock
def test_a_preempted_pod_is_replaced_by_its_job_and_a_refused_agent_is_not(api: ApiServer) -> None:
    machines = provider()
    preempted, refused, done = start(machines, MachineRequest(count=3))
    add_pod(api, preempted, "one", phase="Failed")
    assert (listed(machines)[preempted].state, listed(machines)[preempted].reason) == ("pending", "its Pod is replaced")
    add_pod(api, preempted, "two", phase="Running")
    assert listed(machines)[preempted].state == "running"
    ended = {"exitCode": 2, "message": "culm: node 1 waits\nculm: the token of --join expired\n"}
    add_pod(api, refused, phase="Failed", containerStatuses=[{"name": "agent", "state": {"terminated": ended}}])
    set_job(api, refused, conditions=[{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}])
    set_job(api, done, conditions=[{"type": "Complete", "status": "True"}])
    found = listed(machines)
    assert (found[refused].state, found[refused].failed) == ("ended", True)
    assert found[refused].reason == "its agent ended with exit code 2: the token of --join expired"
    assert (found[done].state, found[done].failed) == ("ended", False)


@needs_kmock
def test_released_machines_are_gone_with_their_pods_and_down_removes_the_rest(api: ApiServer) -> None:
    machines, other = provider(), provider("bert-b2")
    ids = start(machines)
    (kept,) = start(other, MachineRequest(count=1), LaunchSpec(launch="bert-b2", job="bert", token=TOKEN, image="i"))
    for id_ in ids:
        add_pod(api, id_, phase="Running")
    asyncio.run(machines.drain([ids[0], "culm-gpt-a1-unknown"], 30.0))
    assert set(api.leftovers()) == {ids[1], f"{ids[1]}-x", "culm-gpt-a1", kept, "culm-bert-b2"}
    asyncio.run(machines.release([ids[1]]))
    asyncio.run(provider().down())
    asyncio.run(provider().down())
    assert set(api.leftovers()) == {kept, "culm-bert-b2"}
    asyncio.run(other.down())
    assert api.leftovers() == []


@needs_kmock
def test_a_pod_that_waits_too_long_for_a_node_is_given_up(api: ApiServer) -> None:
    machines = provider(patience="60")
    (waiting, replaced) = start(machines)
    for job in (waiting, replaced):
        age = {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}
        api.call("PATCH", f"apis/batch/v1/namespaces/default/jobs/{job}", age)
    add_pod(api, waiting, phase="Pending")
    add_pod(api, replaced, phase="Failed")  # its replacement is not there yet
    found = listed(machines)
    assert (found[waiting].state, found[replaced].state) == ("ended", "pending")
    assert found[waiting].reason.endswith("s for a node (its Pod starts)")
    assert waiting not in api.leftovers()


@needs_kmock
@pytest.mark.parametrize(
    ("asked", "options", "words"),
    [
        (MachineRequest(count=1, market="spot"), {}, "--spot needs the label of the cluster's spot nodes"),
        (TWO, {"context": "other"}, "has no such context, the known ones are test"),
        (TWO, {"gpus": "many"}, "--option gpus is 'many'"),
        (TWO, {"spot_label": "spot"}, "--option spot-label is 'spot': use KEY=VALUE"),
    ],
)
def test_a_request_that_cannot_work_is_refused(
    api: ApiServer, asked: MachineRequest, options: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        provider(**options).check(asked)
    with pytest.raises(UsageError, match="--image is missing"):
        start(provider(), spec=LaunchSpec(launch="gpt-a1", job="gpt", token=TOKEN))


@needs_kmock
def test_without_a_cluster_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="set KUBECONFIG to a kubeconfig file"):
        provider().check(TWO)
    (tmp_path / "kubeconfig").write_text(kubeconfig("http://127.0.0.1:9"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with pytest.raises(RunError, match=r"Kubernetes at http://127\.0\.0\.1:9 cannot be reached"):
        provider().check(TWO)


@needs_schemas
def test_credentials_come_from_files_beside_the_kubeconfig_or_from_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads(kubeconfig("https://cluster.example/"))
    (tmp_path / "token").write_text("from-a-file\n")
    config["users"][0]["user"] = {"tokenFile": "token"}
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'none'}{os.pathsep}{tmp_path / 'kubeconfig'}")
    access = find_access(namespace="ml")
    assert (access.server, access.namespace) == ("https://cluster.example", "ml")
    assert find_credentials(access).token == "from-a-file"
    answer = json.dumps({"kind": "ExecCredential", "status": {"token": "from-a-program"}})
    check = f'test -n "$KUBERNETES_EXEC_INFO" && test "$REGION" = eu && echo \'{answer}\''
    program = {"command": "sh", "args": ["-c", check], "env": [{"name": "REGION", "value": "eu"}]}
    config["users"][0]["user"] = {"exec": program}
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    assert find_credentials(find_access()).headers == {"Authorization": "Bearer from-a-program"}
    program["args"] = ["-c", "echo you are not logged in >&2; exit 1"]
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="sh, which the kubeconfig names for credentials, has failed: you are not lo"):
        find_credentials(find_access())


@needs_schemas
@pytest.mark.skipif(not find_spec("trustme"), reason="trustme makes the certificates")
def test_the_server_is_verified_and_a_client_certificate_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trustme = import_module("trustme")
    authority, other = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    client = authority.issue_cert("me@example.org")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))

    async def list_nodes() -> list[str]:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.json_response({"items": [{"metadata": {"name": "node-a"}}]})

        app = web.Application()
        app.router.add_get("/api/v1/nodes", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        config = json.loads(kubeconfig(f"https://127.0.0.1:{runner.addresses[0][1]}"))
        pem = "".join(blob.bytes().decode() for blob in client.cert_chain_pems)
        config["users"][0]["user"] = {
            "client-certificate-data": base64.b64encode(pem.encode()).decode(),
            "client-key-data": base64.b64encode(client.private_key_pem.bytes()).decode(),
        }
        try:
            for trusted in (other, authority):
                encoded = base64.b64encode(trusted.cert_pem.bytes()).decode()
                config["clusters"][0]["cluster"]["certificate-authority-data"] = encoded
                (tmp_path / "kubeconfig").write_text(json.dumps(config))
                api = KubernetesApi(find_access())
                if trusted is other:
                    with pytest.raises(RunError, match=r"cannot be reached \(.*certificate verify failed"):
                        await api.nodes()
            return [node["metadata"]["name"] for node in await api.nodes()]
        finally:
            await runner.cleanup()

    assert asyncio.run(list_nodes()) == ["node-a"]


def manifests() -> Iterator[dict[str, Any]]:
    everything = PodOptions(
        gpus=8,
        cpu="4",
        memory="64Gi",
        shared_memory="8Gi",
        spot_label=("eks.amazonaws.com/capacityType", "SPOT"),
        service_account="trainer",
        pull_secret="registry",
        node_selector={"disk": "ssd"},
    )
    yield token_secret(SPEC)
    for request in (
        TWO,
        MachineRequest(count=1, instance="p4d.24xlarge", market="spot", zone="b", labels={"team": "ml"}),
        MachineRequest(count=1, market="on-demand"),
    ):
        for options in (PodOptions(), everything):
            yield machine_job("culm-gpt-a1-0", SPEC, request, options)


@needs_schemas
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_manifest_is_valid(version: str) -> None:
    validate = import_module("kubernetes_validate").validate
    for manifest in manifests():
        validate(manifest, version, strict=True)
    for deployed in DEPLOYED:
        for manifest in import_module("yaml").safe_load_all(deployed.read_text()):
            validate(manifest, version, strict=True)
    broken = token_secret(SPEC) | {"colour": "red"}
    with pytest.raises(import_module("kubernetes_validate").ValidationError):
        validate(broken, version, strict=True)


def test_pods_run_without_privileges_and_a_preemption_does_not_count_as_a_failure() -> None:
    job = machine_job("culm-gpt-a1-0", SPEC, TWO, PodOptions())
    pod = job["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] > SPEC.grace_s
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert job["spec"]["podReplacementPolicy"] == "Failed"
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]} in rules


def test_the_market_and_the_zone_of_a_request_choose_the_nodes() -> None:
    options = PodOptions(spot_label=("eks.amazonaws.com/capacityType", "SPOT"))
    spot = machine_job("a", SPEC, MachineRequest(count=1, instance="g5.xlarge", market="spot", zone="b"), options)
    assert spot["spec"]["template"]["spec"]["nodeSelector"] == {
        "node.kubernetes.io/instance-type": "g5.xlarge",
        "topology.kubernetes.io/zone": "b",
        "eks.amazonaws.com/capacityType": "SPOT",
    }
    on_demand = machine_job("b", SPEC, MachineRequest(count=1), options)["spec"]["template"]["spec"]
    (term,) = on_demand["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"][0]["operator"] == "NotIn"


@needs_kmock
def test_a_dry_run_is_one_list_that_can_be_applied_and_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kubeconfig").write_text(kubeconfig("https://cluster.example"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    text = provider(namespace="ml").manifest(SPEC, MachineRequest(count=16))
    assert TOKEN not in text
    assert len(text.splitlines()) < 250  # later Jobs refer to the first
    found = import_module("yaml").safe_load(text)
    assert [job["metadata"]["name"] for job in found["items"]] == [f"culm-gpt-a1-{number}" for number in range(16)]
    assert all(job["spec"] == found["items"][0]["spec"] for job in found["items"])
    assert "kubectl --namespace ml create secret generic culm-gpt-a1 --from-file=CULM_TOKEN=TOKEN_FILE" in text


AGENT = """
import os, signal, sys, time
def leave(*_):
    os.write(1, b"handed over\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
os.write(1, f"began with {sys.argv[sys.argv.index('--zone') + 1]}\\n".encode())
if sys.argv[1] != "stay":
    sys.exit(int(sys.argv[1]))
time.sleep(60)
"""


def run_script(folder: Path, does: str, zone: str = "", **environment: str) -> subprocess.Popen[str]:
    (folder / "agent.py").write_text(AGENT)
    spec = LaunchSpec(launch="a", job="a", token="", program=(sys.executable, "-S", str(folder / "agent.py"), does))
    script = agent_script(spec, MachineRequest(count=1, zone=zone))
    return subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_pod_ends_as_its_agent_does(tmp_path: Path, status: int) -> None:
    process = run_script(tmp_path, str(status), zone="b")
    assert process.communicate(timeout=30)[0] == "began with b\n"
    assert process.returncode == status


def test_a_pod_that_gets_sigterm_waits_for_its_agent_and_fails_so_that_it_is_replaced(tmp_path: Path) -> None:
    process = run_script(tmp_path, "stay", zone="b", CULM_ZONE="c")
    assert process.stdout is not None
    assert process.stdout.readline() == "began with c\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "handed over\n"
    assert process.returncode == 143
