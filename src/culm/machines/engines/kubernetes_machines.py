"""Machines of Kubernetes: each is a Job of one Pod, whose agent Kubernetes starts again after a preemption."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, ClassVar, NamedTuple

from culm.errors import UsageError
from culm.machines.agent_process import describe_agent_end
from culm.machines.engines.catalogue_price import catalogue_price
from culm.machines.engines.kubernetes_access import find_access
from culm.machines.engines.kubernetes_api import KubernetesApi, KubernetesRefusal
from culm.machines.engines.kubernetes_manifests import (
    INSTANCE_LABEL,
    JOB_LABEL,
    ZONE_LABEL,
    PodOptions,
    machine_job,
    manifest_yaml,
    object_name,
    token_secret,
)
from culm.machines.machine_provider import (
    LABEL,
    EngineMissing,
    LaunchSpec,
    Machine,
    MachineNotice,
    MachineRequest,
    Market,
    ProviderSettings,
    no_notices,
)

_NODES_AGE_S = 60.0
"""How long a list of the cluster's nodes is used."""
_DEFAULT_PATIENCE_S = 900.0
_SPOT_NODES = (
    ("cloud.google.com/gke-spot", "true"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("karpenter.sh/capacity-type", "spot"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
"""Labels that clouds and autoscalers put on spot nodes."""
_RELEASE_GRACE_S = 1
"""The shortest grace after which Kubernetes still waits for the end of the containers."""


class ClusterNode(NamedTuple):
    """What the labels of a node tell."""

    instance: str
    zone: str
    market: Market


class KubernetesMachines:
    """Jobs and their Pods in one namespace, found by the label of the launch."""

    name: ClassVar[str] = "kubernetes"
    options: ClassVar[Mapping[str, str]] = {
        "context": "Context of the kubeconfig; default: the current one.",
        "namespace": "Namespace; default: that of the context.",
        "gpus": "GPUs of a Pod (nvidia.com/gpu); default: 0.",
        "cpu": "CPUs that a Pod requests, as in 4 or 500m; default: 1.",
        "memory": "Memory that a Pod requests and may use, as in 16Gi; default: requests 2Gi, without a limit.",
        "shared-memory": "Limit of /dev/shm, as in 8Gi; default: half of the node's memory.",
        "spot-label": "Label of spot nodes, as in cloud.google.com/gke-spot=true; needed with --spot.",
        "node-selector": "Labels that nodes must have, as in pool=gpu,disk=ssd.",
        "service-account": "Service account of the Pods; default: that of the namespace.",
        "pull-secret": "Secret for the registry of the image.",
        "patience": f"Seconds that a Pod may wait for a node; default: {_DEFAULT_PATIENCE_S:g}.",
        "price": "Dollars per hour of a machine, where the catalogue does not know its node.",
    }
    costs_money: ClassVar[bool] = True

    def __init__(self, settings: ProviderSettings) -> None:
        given = settings.options
        self._launch = settings.launch
        self._context, self._namespace = given.get("context", ""), given.get("namespace", "")
        self._opened: KubernetesApi | None = None
        self._pods = PodOptions(
            gpus=int(_number("gpus", given.get("gpus", "0"))),
            cpu=given.get("cpu", ""),
            memory=given.get("memory", ""),
            shared_memory=given.get("shared-memory", ""),
            spot_label=_label("spot-label", given["spot-label"]) if "spot-label" in given else None,
            service_account=given.get("service-account", ""),
            pull_secret=given.get("pull-secret", ""),
            node_selector=dict(
                _label("node-selector", part) for part in given.get("node-selector", "").split(",") if part
            ),
        )
        self._patience_s = _number("patience", given.get("patience", f"{_DEFAULT_PATIENCE_S}"))
        self._price = _number("price", given["price"]) if "price" in given else None
        self._nodes: dict[str, ClusterNode] = {}
        self._nodes_until = 0.0

    def check(self, request: MachineRequest) -> None:
        if request.market == "spot" and self._pods.spot_label is None:
            raise UsageError(
                "--spot needs the label of the cluster's spot nodes: add --option spot-label=KEY=VALUE, as in "
                "cloud.google.com/gke-spot=true, eks.amazonaws.com/capacityType=SPOT or karpenter.sh/capacity-type=spot"
            )
        _wait_for(self._list("jobs"))

    def manifest(self, spec: LaunchSpec, request: MachineRequest) -> str:
        _check_image(spec)
        names = [f"{object_name(spec.launch)}-{number}" for number in range(request.count)]
        return manifest_yaml(names, spec, request, self._pods, self._manifest_namespace())

    async def request(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        _check_image(spec)
        await self._write_secret(spec)
        created: list[dict[str, Any]] = []
        try:
            for _ in range(request.count):
                name = f"{object_name(spec.launch)}-{secrets.token_hex(3)}"
                created.append(await self._api.create("jobs", machine_job(name, spec, request, self._pods)))
        except KubernetesRefusal as refusal:
            if refusal.status != 403 or "quota" not in str(refusal):
                raise
        if created:
            await self._own_secret()
        return [str(job["metadata"]["name"]) for job in created]

    async def machines(self) -> list[Machine]:
        jobs, pods = await asyncio.gather(self._list("jobs"), self._list("pods"))
        nodes = await self._list_nodes()
        of_job: dict[str, list[dict[str, Any]]] = {}
        for pod in pods:
            of_job.setdefault(pod["metadata"].get("labels", {}).get(JOB_LABEL, ""), []).append(pod)
        found = [(self._describe(job, own, nodes), own) for job in jobs for own in [of_job.get(_name(job), [])]]
        return [await self._give_up_waiting(machine, own) for machine, own in found]

    async def drain(self, ids: list[str], notice_s: float) -> None:
        """Delete the Jobs, and end their Pods with SIGTERM and `notice_s` seconds."""
        await self._delete(ids, max(_RELEASE_GRACE_S, int(notice_s)))

    async def release(self, ids: list[str]) -> None:
        await self._delete(ids, _RELEASE_GRACE_S)

    def notices(self) -> AsyncIterator[MachineNotice]:
        """None: Kubernetes announces the end of a Pod by SIGTERM to its agent."""
        return no_notices()

    def price(self, request: MachineRequest) -> float | None:
        listed = catalogue_price(request.instance, spot=request.market == "spot")
        return self._price if listed is None else listed

    async def down(self) -> None:
        jobs = await self._list("jobs")
        await self._delete([job["metadata"]["name"] for job in jobs], _RELEASE_GRACE_S)
        for pod in await self._list("pods"):  # of Jobs that another program or user has deleted
            await self._api.delete("pods", pod["metadata"]["name"], grace_s=_RELEASE_GRACE_S)
        await self._api.delete("secrets", object_name(self._launch))

    def _manifest_namespace(self) -> str:
        """The namespace for a manifest, also where there is no cluster."""
        try:
            return find_access(self._context, self._namespace).namespace
        except EngineMissing:
            return self._namespace or "default"

    @property
    def _api(self) -> KubernetesApi:
        if self._opened is None:
            self._opened = KubernetesApi(find_access(self._context, self._namespace))
        return self._opened

    async def _list(self, kind: str) -> list[dict[str, Any]]:
        return await self._api.list_labelled(kind, f"{LABEL}={self._launch}")

    async def _write_secret(self, spec: LaunchSpec) -> None:
        secret = token_secret(spec)
        try:
            await self._api.create("secrets", secret)
        except KubernetesRefusal as refusal:
            if refusal.status != 409:
                raise
            change = {"stringData": secret["stringData"]}
            await self._api.merge("secrets", object_name(spec.launch), change)

    async def _own_secret(self) -> None:
        """Let Kubernetes remove the Secret with the last Job of the launch, if `culm down` does not."""
        owners = [
            {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
            for job in await self._list("jobs")
            if "uid" in job["metadata"]
        ]
        if owners:
            await self._api.merge("secrets", object_name(self._launch), {"metadata": {"ownerReferences": owners}})

    async def _delete(self, ids: list[str], grace_s: int) -> None:
        """Delete Jobs first, so that their Pods are not replaced, and then the Pods."""
        wanted = set(ids)
        pods = [
            pod["metadata"]["name"]
            for pod in (await self._list("pods") if wanted else [])
            if pod["metadata"].get("labels", {}).get(JOB_LABEL) in wanted
        ]
        await asyncio.gather(*(self._api.delete("jobs", id_) for id_ in ids))
        await asyncio.gather(*(self._api.delete("pods", name, grace_s=grace_s) for name in pods))

    async def _list_nodes(self) -> dict[str, ClusterNode]:
        """What is known of the cluster's nodes; nothing where the user may not list them."""
        if time.monotonic() >= self._nodes_until:
            try:
                listed = await self._api.nodes()
            except KubernetesRefusal:
                listed = []
            spot_labels = [*_SPOT_NODES, *([self._pods.spot_label] if self._pods.spot_label else [])]
            self._nodes = {node["metadata"]["name"]: _read_node(node, spot_labels) for node in listed}
            self._nodes_until = time.monotonic() + _NODES_AGE_S
        return self._nodes

    def _describe(self, job: dict[str, Any], pods: list[dict[str, Any]], nodes: Mapping[str, ClusterNode]) -> Machine:
        metadata, labels_of_job = job["metadata"], _template(job).get("nodeSelector", {})
        pod = max(pods, key=lambda found: found["metadata"].get("creationTimestamp", ""), default=None)
        node = nodes.get(pod["spec"].get("nodeName", "")) if pod is not None else None
        instance = node.instance if node else labels_of_job.get(INSTANCE_LABEL, "")
        market = node.market if node else self._market_of(labels_of_job)
        listed = catalogue_price(instance, spot=market == "spot")
        machine = Machine(
            id=metadata["name"],
            state="pending",
            instance=instance,
            zone=node.zone if node else labels_of_job.get(ZONE_LABEL, ""),
            market=market,
            price_per_h=self._price if listed is None else listed,
            started_at=_unix_time((pod or job).get("status", {}).get("startTime") or metadata.get("creationTimestamp")),
        )
        ended = _final_condition(job)
        if ended is not None or metadata.get("deletionTimestamp"):
            failed = ended is not None and ended["type"] in ("Failed", "FailureTarget")
            reason = _agent_end(pods) or (ended or {}).get("message", "") or "it was deleted"
            return _changed(machine, state="ended", reason=reason, failed=failed)
        if pod is not None and pod.get("status", {}).get("phase") == "Running":
            if not pod["metadata"].get("deletionTimestamp"):
                return _changed(machine, state="running")
            return _changed(machine, state="running", reason="Kubernetes takes its Pod away")
        return _changed(machine, reason=_waiting_reason(pod))

    def _market_of(self, node_selector: Mapping[str, str]) -> Market:
        label = self._pods.spot_label
        return "spot" if label and node_selector.get(label[0]) == label[1] else "on-demand"

    async def _give_up_waiting(self, machine: Machine, pods: list[dict[str, Any]]) -> Machine:
        """End a machine whose Pod has waited too long for a node, so that another kind of machine can be tried."""
        waiting = [pod for pod in pods if pod.get("status", {}).get("phase") == "Pending"]
        since = max((_unix_time(pod["metadata"].get("creationTimestamp")) for pod in waiting), default=0.0)
        if machine.state != "pending" or not since or time.time() - since < self._patience_s:
            return machine
        await self._api.delete("jobs", machine.id)
        words = f"it waited {time.time() - since:.0f} s for a node ({machine.reason})"
        return _changed(machine, state="ended", reason=words)


def _changed(machine: Machine, **fields: Any) -> Machine:
    import msgspec

    return msgspec.structs.replace(machine, **fields)


def _name(found: dict[str, Any]) -> str:
    return str(found["metadata"]["name"])


def _template(job: dict[str, Any]) -> dict[str, Any]:
    """The specification of the Pods of a Job."""
    found: dict[str, Any] = job.get("spec", {}).get("template", {}).get("spec", {})
    return found


def _final_condition(job: dict[str, Any]) -> dict[str, Any] | None:
    """The condition that says that a Job has ended or will not start another Pod; None: it goes on."""
    for condition in job.get("status", {}).get("conditions") or []:
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed", "FailureTarget"):
            found: dict[str, Any] = condition
            return found
    return None


def _agent_end(pods: list[dict[str, Any]]) -> str:
    """How the agent of the last Pod ended; empty: not known."""
    for pod in sorted(pods, key=lambda found: found["metadata"].get("creationTimestamp", ""), reverse=True):
        for status in pod.get("status", {}).get("containerStatuses") or []:
            ended = status.get("state", {}).get("terminated")
            if ended:
                return describe_agent_end(ended.get("exitCode"), ended.get("message", ""))[0]
    return ""


def _waiting_reason(pod: dict[str, Any] | None) -> str:
    """What a Pod waits for, in a few words."""
    if pod is None:
        return "its Pod is being created"
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or []:
        waiting = container.get("state", {}).get("waiting")
        if waiting:
            return ": ".join(part for part in (waiting.get("reason", ""), waiting.get("message", "")) if part)
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason", ""))
    return "its Pod is replaced" if status.get("phase") in ("Failed", "Succeeded") else "its Pod starts"


def _read_node(node: dict[str, Any], spot_labels: list[tuple[str, str]]) -> ClusterNode:
    found = node["metadata"].get("labels", {})
    is_spot = any(found.get(label) == value for label, value in spot_labels)
    return ClusterNode(found.get(INSTANCE_LABEL, ""), found.get(ZONE_LABEL, ""), "spot" if is_spot else "on-demand")


def _unix_time(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def _check_image(spec: LaunchSpec) -> None:
    if not spec.image:
        raise UsageError("--image is missing: name a container image with culm; deploy/Dockerfile builds one")


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(f"--option {name} is {text!r}: use a number")
    return number


def _label(name: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[\w./-]+", key) or not re.fullmatch(r"[\w.-]*", value):
        raise UsageError(f"--option {name} is {text!r}: use KEY=VALUE")
    return key, value


def _wait_for(work: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine to its end from code that is not one, also inside of an event loop."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(asyncio.run, work).result()
