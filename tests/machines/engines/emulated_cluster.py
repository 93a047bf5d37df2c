"""An emulated Kubernetes cluster: kmock as its API server, and local processes in place of the containers of Pods.

It does what the Job controller, the scheduler and the kubelet do for the Jobs of a launch: it starts a Pod for each
Job, replaces a Pod according to the policies of its Job, and ends the processes of Pods that were deleted.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shlex
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

TAKEN = 143
_POLL_S = 0.25
_KILL_AFTER_S = 20.0
NODES = {"node-a": ("g5.xlarge", "zone-a"), "node-b": ("g5.xlarge", "zone-b")}
"""Instance type and zone of the nodes. All are spot nodes of EKS."""


def _emulator() -> Any:
    """kmock's emulator of a cluster, which selects by labels as a real one does."""
    kmock = import_module("kmock")

    class Emulator(kmock.KubernetesEmulator):  # type: ignore[misc, name-defined]
        async def _serve_list(self, request: Any) -> Any:
            answer = await super()._serve_list(request)
            wanted = dict(part.split("=") for part in request.params.get("labelSelector", "").split(",") if part)
            found = [
                item for item in answer["items"] if wanted.items() <= item.get("metadata", {}).get("labels", {}).items()
            ]
            return {**answer, "items": found}

    found = Emulator()
    for name in ("v1/pods", "v1/secrets", "v1/nodes", "batch/v1/jobs"):
        found.resources[name] = {}
    return found


@dataclass
class ApiServer:
    """The API of an emulated cluster, from outside of its event loop."""

    url: str = ""

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/merge-patch+json" if method == "PATCH" else "application/json"}
        request = urllib.request.Request(f"{self.url}/{path}", data, headers, method=method)
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def objects(self, kind: str) -> list[dict[str, Any]]:
        group = "apis/batch/v1" if kind == "jobs" else "api/v1"
        return list(self.call("GET", f"{group}/namespaces/default/{kind}")["items"])

    def leftovers(self) -> list[str]:
        """The names of all objects that a launch could have left behind."""
        return [each["metadata"]["name"] for kind in ("jobs", "pods", "secrets") for each in self.objects(kind)]


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """An API server in a thread, and a kubeconfig for it in `folder`."""
    found, ready, loop = ApiServer(), threading.Event(), asyncio.new_event_loop()
    stopped = asyncio.Event()

    async def serve() -> None:
        async with _emulator() as emulator, import_module("kmock").Server(emulator) as server:
            found.url = str(server.url).rstrip("/")
            ready.set()
            await stopped.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20)
        for name, (instance, zone) in NODES.items():
            labels = {
                "node.kubernetes.io/instance-type": instance,
                "topology.kubernetes.io/zone": zone,
                "eks.amazonaws.com/capacityType": "SPOT",
            }
            found.call("POST", "api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        (folder / "kubeconfig").write_text(kubeconfig(found.url))
        yield found
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()


def kubeconfig(url: str) -> str:
    """A kubeconfig with one context, in JSON, which is YAML, too."""
    return json.dumps(
        {
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "a-token"}}],
        }
    )


@dataclass
class EmulatedPod:
    """The container of one Pod."""

    name: str
    job: str
    folder: Path
    agent: subprocess.Popen[bytes]
    told_at: float = 0.0
    """When it was sent SIGTERM; 0: not yet."""

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def status(self) -> int | None:
        """The exit status that the script of the Pod would have; None: it runs."""
        code = self.agent.poll()
        if code is None:
            return None
        return TAKEN if self.told_at else 128 - code if code < 0 else code

    def tell(self) -> None:
        """Send SIGTERM, once; SIGKILL after the grace period."""
        number = signal.SIGTERM
        if self.told_at:
            if time.monotonic() - self.told_at < _KILL_AFTER_S:
                return
            number = signal.SIGKILL
        self.told_at = self.told_at or time.monotonic()
        with suppress(ProcessLookupError):
            (os.kill if number is signal.SIGTERM else os.killpg)(self.agent.pid, number)


@dataclass
class EmulatedCluster:
    """Job controller, scheduler and kubelet."""

    api: ApiServer
    folder: Path
    environment: dict[str, str]
    pods: dict[str, EmulatedPod] = field(default_factory=dict)
    evicted: set[str] = field(default_factory=set)
    errors: list[BaseException] = field(default_factory=list)
    _reported: set[str] = field(default_factory=set)

    def evict(self, pod: str) -> None:
        """Take a Pod away, as the end of a spot node does."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        self.api.call("PATCH", f"api/v1/namespaces/default/pods/{pod}", {"status": {"conditions": [condition]}})
        self.evicted.add(pod)
        self.pods[pod].tell()

    def follow(self, stopped: threading.Event) -> None:
        try:
            while not stopped.wait(_POLL_S):
                self._step()
        except BaseException as error:
            self.errors.append(error)
        finally:
            for pod in self.pods.values():
                with suppress(ProcessLookupError):
                    os.killpg(pod.agent.pid, signal.SIGKILL)
                pod.agent.wait()

    def _step(self) -> None:
        jobs = {job["metadata"]["name"]: job for job in self.api.objects("jobs")}
        listed = {pod["metadata"]["name"] for pod in self.api.objects("pods")}
        for pod in self.pods.values():
            status = pod.status
            if status is None and (pod.name not in listed or pod.job not in jobs):
                pod.tell()
            elif status is not None and pod.name in listed:
                if pod.job not in jobs:
                    self.api.call("DELETE", f"api/v1/namespaces/default/pods/{pod.name}")
                elif pod.name not in self._reported:
                    self._report_end(pod, status)
        for name, job in jobs.items():
            going = [pod for pod in self.pods.values() if pod.job == name and pod.status is None]
            if not going and not job.get("status", {}).get("conditions"):
                self._start_pod(name, job)

    def _report_end(self, pod: EmulatedPod, status: int) -> None:
        """Write how a container ended, and what its Job makes of it."""
        self._reported.add(pod.name)
        ended = {"exitCode": status, "message": pod.log[-1000:]}
        phase = "Succeeded" if status == 0 else "Failed"
        change = {"phase": phase, "containerStatuses": [{"name": "agent", "state": {"terminated": ended}}]}
        self.api.call("PATCH", f"api/v1/namespaces/default/pods/{pod.name}", {"status": change})
        job = next(found for found in self.api.objects("jobs") if found["metadata"]["name"] == pod.job)
        if status == 0:
            self._end_job(pod.job, "Complete", "")
        elif _action(job, status, evicted=pod.name in self.evicted) != "Ignore":
            self._end_job(pod.job, "Failed", "PodFailurePolicy")

    def _end_job(self, name: str, kind: str, reason: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason}
        self.api.call("PATCH", f"apis/batch/v1/namespaces/default/jobs/{name}", {"status": {"conditions": [condition]}})

    def _start_pod(self, job_name: str, job: dict[str, Any]) -> None:
        number = sum(pod.job == job_name for pod in self.pods.values())
        name, template = f"{job_name}-{number}", job["spec"]["template"]
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": job_name}
        node = list(NODES)[len(self.pods) % len(NODES)]
        labels["topology.kubernetes.io/zone"] = NODES[node][1]
        folder = self.folder / name
        folder.mkdir()
        (container,) = template["spec"]["containers"]
        variables = {each["name"]: self._value(each, labels) for each in container["env"]}
        _, _, script = container["command"]
        command = shlex.split(script.partition(" &\n")[0])
        assert command[-2:] == ["--zone", "${CULM_ZONE:-}"]
        with (folder / "log").open("wb") as log:
            agent = subprocess.Popen(  # without the shell, so that `forked_programs` starts it
                [*command[:-1], variables["CULM_ZONE"]],
                cwd=folder,
                env={**self.environment, **variables, "HOME": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body = {
            "metadata": {"name": name, "namespace": "default", "labels": labels, "creationTimestamp": created},
            "spec": {**template["spec"], "nodeName": node},
            "status": {"phase": "Running", "startTime": created},
        }
        self.api.call("POST", "api/v1/namespaces/default/pods", body)
        self.pods[name] = EmulatedPod(name, job_name, folder, agent)

    def _value(self, variable: dict[str, Any], labels: dict[str, str]) -> str:
        source = variable.get("valueFrom")
        if source is None:
            return str(variable["value"])
        if "fieldRef" in source:
            return labels.get(source["fieldRef"]["fieldPath"].removeprefix("metadata.labels['").removesuffix("']"), "")
        reference = source["secretKeyRef"]
        (secret,) = (each for each in self.api.objects("secrets") if each["metadata"]["name"] == reference["name"])
        encoded = secret.get("data", {}).get(reference["key"])
        return base64.b64decode(encoded).decode() if encoded else str(secret["stringData"][reference["key"]])


def _action(job: dict[str, Any], status: int, *, evicted: bool) -> str:
    """What the failure policy of a Job says about the end of a Pod."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {})
        if status in codes.get("values", []) or (evicted and rule.get("onPodConditions")):
            return str(rule["action"])
    return "Count"


@contextmanager
def emulated_cluster(api: ApiServer, folder: Path, environment: dict[str, str]) -> Iterator[EmulatedCluster]:
    """A cluster for as long as the block runs. No process of it is left afterwards."""
    folder.mkdir()
    cluster, stopped = EmulatedCluster(api, folder, environment), threading.Event()
    thread = threading.Thread(target=cluster.follow, args=(stopped,))
    thread.start()
    try:
        yield cluster
    finally:
        stopped.set()
        thread.join()
    assert not cluster.errors, cluster.errors
