"""The Kubernetes objects of a launch, as plain data: one Job of one Pod for each machine, and a Secret with the token.

One Job with N indexes could not give up a particular machine, and all its Pods would have the same zone and node type.
With one Job for each machine, a machine is removed by deleting its Job, and Kubernetes still replaces its Pod after a
preemption, which does not count as a failure.
"""

from __future__ import annotations

import importlib
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from culm.errors import UsageError
from culm.machines.engines.zoned_command import zoned_command_line
from culm.machines.join_token import TOKEN_VARIABLE
from culm.machines.machine_provider import LABEL, MACHINE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from culm.machines.machine_provider import LaunchSpec, MachineRequest

INSTANCE_LABEL = "node.kubernetes.io/instance-type"
ZONE_LABEL = "topology.kubernetes.io/zone"
JOB_LABEL = "batch.kubernetes.io/job-name"
"""The label of a Pod that Kubernetes sets to the name of its Job."""
TAKEN_STATUS = 143
"""Exit status of a Pod that was told to end, so that its Job replaces it."""
_REFUSED_STATUS = 2
"""Exit status of an agent whose request was wrong: trying again does not help."""
_RETRIES = 3
_USER = 10001
_KEEP_ENDED_S = 3600
"""How long Kubernetes keeps Jobs that have ended, so that their logs can be read."""
_STOP_MARGIN_S = 15
"""Seconds between the end of an agent's grace and the moment when the kubelet kills it."""
_LEAST_CPU, _LEAST_MEMORY = "1", "2Gi"
"""Requests of a Pod, if the user names none. Without requests Kubernetes would put all Pods on one node, and evict them
first."""
_HOME = "/home/culm"
_SPOT_TAINTS = ("cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority", "karpenter.sh/capacity-type")
"""Taints that clouds and autoscalers put on spot nodes."""


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """What a Pod needs from its node."""

    gpus: int = 0
    cpu: str = ""
    """As in "4" or "500m"; empty: a small request."""
    memory: str = ""
    """As in "16Gi", which is also the limit; empty: a small request without a limit."""
    shared_memory: str = ""
    """Limit of /dev/shm, as in "8Gi"; empty: half of the node's memory."""
    spot_label: tuple[str, str] | None = None
    """Label and value of the cluster's spot nodes; None: the market of a request does not choose the nodes."""
    service_account: str = ""
    pull_secret: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)


def object_name(launch: str) -> str:
    """The name of the objects that a launch has once, and the beginning of the names of its Jobs."""
    return f"culm-{launch}"


def labels(launch: str, further: Mapping[str, str] | None = None) -> dict[str, str]:
    """The labels of everything of a launch."""
    return {**(further or {}), "app.kubernetes.io/name": "culm", LABEL: launch}


def token_secret(spec: LaunchSpec) -> dict[str, Any]:
    """The Secret with the join token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": object_name(spec.launch), "labels": labels(spec.launch)},
        "type": "Opaque",
        "stringData": spec.secret_environment,
    }


def machine_job(name: str, spec: LaunchSpec, request: MachineRequest, options: PodOptions) -> dict[str, Any]:
    """The Job that is one machine."""
    return _job(name, labels(spec.launch, request.labels), job_spec(spec, request, options))


def _job(name: str, labelled: dict[str, str], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": labelled}, "spec": spec}


def job_spec(spec: LaunchSpec, request: MachineRequest, options: PodOptions) -> dict[str, Any]:
    """What all Jobs for machines of one kind have in common."""
    return {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": _RETRIES,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [_REFUSED_STATUS]}},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [TAKEN_STATUS]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "ttlSecondsAfterFinished": _KEEP_ENDED_S,
        "template": {"metadata": {"labels": labels(spec.launch, request.labels)}, "spec": _pod(spec, request, options)},
    }


def _pod(spec: LaunchSpec, request: MachineRequest, options: PodOptions) -> dict[str, Any]:
    shared = {"medium": "Memory", **({"sizeLimit": options.shared_memory} if options.shared_memory else {})}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # the Job replaces the Pod, on any node
        "terminationGracePeriodSeconds": int(spec.grace_s + _STOP_MARGIN_S),
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(spec, request, options)],
        "volumes": [
            {"name": "home", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shared-memory", "emptyDir": shared},
        ],
        "affinity": _affinity(spec, request, options),
    }
    if selector := _node_selector(request, options):
        pod["nodeSelector"] = selector
    if tolerations := _tolerations(request, options):
        pod["tolerations"] = tolerations
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    if options.pull_secret:
        pod["imagePullSecrets"] = [{"name": options.pull_secret}]
    return pod


def _container(spec: LaunchSpec, request: MachineRequest, options: PodOptions) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "agent",
        "image": spec.image,
        "command": ["/bin/sh", "-c", agent_script(spec, request)],
        "env": _environment(spec),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "home", "mountPath": _HOME},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    resources = {"requests": {"cpu": options.cpu or _LEAST_CPU, "memory": options.memory or _LEAST_MEMORY}}
    limits: dict[str, Any] = {"memory": options.memory} if options.memory else {}
    if options.gpus:
        limits["nvidia.com/gpu"] = options.gpus
    container["resources"] = {**resources, **({"limits": limits} if limits else {})}
    return container


def _environment(spec: LaunchSpec) -> list[dict[str, Any]]:
    secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": object_name(spec.launch), "key": name}}}
        for name in sorted(spec.secret_environment)
    ]
    of_pod = [
        {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}
        for variable, label in ((MACHINE_VARIABLE, JOB_LABEL), ("CULM_ZONE", ZONE_LABEL))
    ]
    given = {"HOME": _HOME, **spec.environment}
    return [*secret, *of_pod, *({"name": name, "value": value} for name, value in given.items())]


def agent_script(spec: LaunchSpec, request: MachineRequest) -> str:
    """The shell script of a Pod: the agent, and the exit status that tells the Job whether to replace the Pod.

    A Pod that is told to end hands over its state and its agent ends well; it must fail nevertheless, or its Job would
    count it as done. `request` has the zone for clusters that do not copy the zone of a node to the labels of its Pods.
    """
    zone = f'"${{CULM_ZONE:-{shlex.quote(request.zone) if request.zone else ""}}}"'
    return f"""\
{zoned_command_line(spec, request, zone)} &
agent=$!
taken=
trap 'taken=1; kill -TERM $agent' TERM
wait $agent
status=$?
while [ "$taken" ] && kill -0 $agent 2>/dev/null; do
  wait $agent
  status=$?
done
[ "$taken" ] && exit {TAKEN_STATUS}
exit $status
"""


def _node_selector(request: MachineRequest, options: PodOptions) -> dict[str, str]:
    selector = dict(options.node_selector)
    if request.instance:
        selector[INSTANCE_LABEL] = request.instance
    if request.zone:
        selector[ZONE_LABEL] = request.zone
    if options.spot_label and request.market == "spot":
        selector[options.spot_label[0]] = options.spot_label[1]
    return selector


def _affinity(spec: LaunchSpec, request: MachineRequest, options: PodOptions) -> dict[str, Any]:
    """Machines of a launch on different nodes if there are enough, and on-demand machines not on spot nodes."""
    same_launch = {"matchLabels": {LABEL: spec.launch}}
    apart = {"labelSelector": same_launch, "topologyKey": "kubernetes.io/hostname"}
    affinity: dict[str, Any] = {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": apart}]
        }
    }
    if options.spot_label and request.market == "on-demand":
        name, value = options.spot_label
        other = {"matchExpressions": [{"key": name, "operator": "NotIn", "values": [value]}]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [other]}}
    return affinity


def _tolerations(request: MachineRequest, options: PodOptions) -> list[dict[str, str]]:
    tolerated = list(_SPOT_TAINTS) if request.market == "spot" else []
    if request.market == "spot" and options.spot_label and options.spot_label[0] not in tolerated:
        tolerated.append(options.spot_label[0])
    if options.gpus:
        tolerated.append("nvidia.com/gpu")
    return [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in tolerated]


def manifest_yaml(
    names: Sequence[str], spec: LaunchSpec, request: MachineRequest, options: PodOptions, namespace: str
) -> str:
    """The Jobs as one YAML List for `kubectl apply`. Jobs after the first refer to its spec (a YAML alias). The Secret
    is a comment, because its value is secret."""
    common = job_spec(spec, request, options)
    jobs = [_job(name, labels(spec.launch, request.labels), common) for name in names]
    text = dump_yaml({"apiVersion": "v1", "kind": "List", "items": jobs})
    variable = f"--from-file={TOKEN_VARIABLE}=TOKEN_FILE"
    return (
        f"# kubectl --namespace {namespace} create secret generic {object_name(spec.launch)} {variable}\n"
        f"# kubectl --namespace {namespace} apply -f THIS_FILE\n{text}"
    )


def dump_yaml(value: Any) -> str:
    """A value as YAML, with scripts as blocks. Raises UsageError without PyYAML."""
    yaml = import_yaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        """Writes strings of several lines as they are, and names what is used several times."""

        def generate_anchor(self, node: Any) -> str:
            return str(super().generate_anchor(node)).replace("id", "machine-")

    def represent(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=120))


def import_yaml() -> Any:
    """The module yaml. Raises UsageError if PyYAML is missing."""
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise UsageError("--on kubernetes needs PyYAML: pip install 'culm[kubernetes]'") from None
