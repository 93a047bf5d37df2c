"""Machines of SkyPilot: each is a managed job of one node, which SkyPilot starts again after a preemption.

One job of N nodes would restart all of them when one is lost. The region is pinned: SkyPilot would otherwise move a
machine to another region to recover it, far from the rest of the run.
"""

from __future__ import annotations

import asyncio
import importlib
import secrets
import shlex
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from culm.errors import RunError, UsageError
from culm.machines.engines.catalogue_price import catalogue_price
from culm.machines.engines.kubernetes_manifests import dump_yaml
from culm.machines.engines.zoned_command import zoned_command_line
from culm.machines.join_token import TOKEN_VARIABLE
from culm.machines.machine_provider import (
    LABEL,
    MACHINE_VARIABLE,
    EngineMissing,
    LaunchSpec,
    Machine,
    MachineNotice,
    MachineRequest,
    MachineState,
    ProviderSettings,
    no_notices,
)

_NOTICES = {"aws": "aws", "gcp": "gcp", "azure": "azure"}
"""Clouds of SkyPilot whose metadata service announces preemptions."""
_STATES: dict[str, MachineState] = {
    "PENDING": "pending",
    "SUBMITTED": "pending",
    "STARTING": "pending",
    "RECOVERING": "pending",
    "RUNNING": "running",
    "WINDING_DOWN": "running",
    "CANCELLING": "running",
}
_WAITING_REASONS = {"RECOVERING": "SkyPilot replaces a preempted machine", "STARTING": "SkyPilot starts a machine"}
_READ_ZONE = "import json, os; print(json.loads(os.environ['SKYPILOT_CLUSTER_INFO']).get('zone') or '')"


class SkyPilotMachines:
    """Managed jobs, found by their names."""

    name: ClassVar[str] = "skypilot"
    options: ClassVar[Mapping[str, str]] = {
        "infra": "Cloud and region, as in aws/us-east-1; needed.",
        "cpus": "CPUs of a machine without --instance, as in 8 or 8+.",
        "memory": "Memory in GiB of a machine without --instance, as in 32+.",
        "disk": "Size of the disk in GiB; default: that of SkyPilot.",
        "setup": "Shell command that a machine runs before its agent.",
    }
    costs_money: ClassVar[bool] = True

    def __init__(self, settings: ProviderSettings) -> None:
        self._launch, self._options = settings.launch, settings.options
        self._infra = settings.options.get("infra", "")
        disk = settings.options.get("disk", "0")
        if not disk.isdecimal():
            raise UsageError(f"--option disk is {disk!r}: use a whole number")

    def check(self, request: MachineRequest) -> None:
        self._check_infra()
        task = task_config(self._job_name("check"), _EXAMPLE, request, self._options)
        sky = _import_sky()
        try:
            sky.Task.from_yaml_config(task)
        except Exception as error:
            raise UsageError(f"SkyPilot refuses such a machine: {_first_line(error)}") from None

    def manifest(self, spec: LaunchSpec, request: MachineRequest) -> str:
        self._check_infra()
        task = task_config(f"culm-{self._launch}", self._prepare(spec), request, self._options)
        numbers = f"0 to {request.count - 1}" if request.count > 1 else "0"
        return (
            f"# One managed job for each machine, NUMBER from {numbers}:\n"
            f"#   sky jobs launch --name culm-{self._launch}-NUMBER --secret {TOKEN_VARIABLE} "
            f"--env {MACHINE_VARIABLE}=culm-{self._launch}-NUMBER THIS_FILE\n"
            f"{dump_yaml(task)}"
        )

    async def request(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        self._check_infra()
        return await asyncio.to_thread(self._submit, self._prepare(spec), request)

    def _submit(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        sky = _import_sky()
        submitted: list[tuple[str, Any]] = []
        failures: list[str] = []
        for _ in range(request.count):
            name = self._job_name(secrets.token_hex(3))
            config = task_config(name, spec, request, self._options)
            config["secrets"] = dict(spec.secret_environment)
            try:
                submitted.append((name, sky.jobs.launch(sky.Task.from_yaml_config(config), name=name)))
            except Exception as error:
                failures.append(_first_line(error))
        started = []
        for name, request_id in submitted:
            try:
                sky.get(request_id)
                started.append(name)
            except Exception as error:
                failures.append(_first_line(error))
        if failures and not started:
            raise RunError(f"SkyPilot started no machine: {failures[0]}")
        return started

    async def machines(self) -> list[Machine]:
        return await asyncio.to_thread(lambda: [_describe(job) for job in self._jobs()])

    async def drain(self, ids: list[str], notice_s: float) -> None:
        """Cancel the jobs. SkyPilot sends SIGTERM and soon terminates the machine, whatever `notice_s` says."""
        del notice_s
        await self.release(ids)

    async def release(self, ids: list[str]) -> None:
        await asyncio.to_thread(self._cancel, set(ids))

    def notices(self) -> AsyncIterator[MachineNotice]:
        """None: the agents ask the metadata service of their machine themselves."""
        return no_notices()

    def price(self, request: MachineRequest) -> float | None:
        return catalogue_price(request.instance, spot=request.market == "spot")

    async def down(self) -> None:
        jobs = await asyncio.to_thread(self._jobs)
        await self.release([job["job_name"] for job in jobs])

    def _jobs(self) -> list[Any]:
        """The managed jobs of the launch; none if there is no jobs controller."""
        sky = _import_sky()
        try:
            found = sky.get(sky.jobs.queue(refresh=False))
        except Exception as error:
            if type(error).__name__ == "ClusterNotUpError":
                return []
            raise RunError(f"SkyPilot cannot list the managed jobs: {_first_line(error)}") from None
        prefix = f"culm-{self._launch}-"
        return [job for job in found if (job["job_name"] or "").startswith(prefix)]

    def _cancel(self, names: set[str]) -> None:
        going = [job["job_id"] for job in self._jobs() if job["job_name"] in names and _status(job) in _STATES]
        if not going:
            return
        sky = _import_sky()
        try:
            sky.get(sky.jobs.cancel(job_ids=going))
        except Exception as error:
            raise RunError(f"SkyPilot cannot cancel the managed jobs: {_first_line(error)}") from None

    def _job_name(self, suffix: str) -> str:
        return f"culm-{self._launch}-{suffix}"

    def _prepare(self, spec: LaunchSpec) -> LaunchSpec:
        notice = _NOTICES.get(self._infra.partition("/")[0].lower(), "none")
        return replace(spec, notice=notice) if spec.notice == "none" else spec

    def _check_infra(self) -> None:
        if "/" not in self._infra.strip("/"):
            raise UsageError(
                f"--option infra is {self._infra!r}: name a cloud and one region, as in infra=aws/us-east-1, so that "
                "all machines of the run are close to each other"
            )


_EXAMPLE = LaunchSpec(launch="check", job="check", token="")


def task_config(name: str, spec: LaunchSpec, request: MachineRequest, options: Mapping[str, str]) -> dict[str, Any]:
    """One machine as a task of SkyPilot, as in its YAML files. Its secret has no value."""
    infra = options.get("infra", "")
    resources: dict[str, Any] = {
        "infra": f"{infra}/{request.zone}" if request.zone else infra,
        "use_spot": request.market == "spot",
        "job_recovery": {"strategy": "FAILOVER", "max_restarts_on_errors": 0},
        "labels": {**request.labels, LABEL: spec.launch},
    }
    if ":" in request.instance:
        resources["accelerators"] = request.instance
    elif request.instance:
        resources["instance_type"] = request.instance
    for option in ("cpus", "memory"):
        if options.get(option):
            resources[option] = options[option]
    if options.get("disk"):
        resources["disk_size"] = int(options["disk"])
    if spec.image:
        resources["image_id"] = spec.image
    task: dict[str, Any] = {"name": name, "resources": resources, "num_nodes": 1}
    task["envs"] = {MACHINE_VARIABLE: name, **spec.environment}
    task["secrets"] = dict.fromkeys(spec.secret_environment)
    if options.get("setup"):
        task["setup"] = options["setup"]
    zone = f'"$(python3 -c {shlex.quote(_READ_ZONE)})"'
    task["run"] = f"exec {zoned_command_line(spec, request, zone)}\n"
    return task


def _describe(job: Any) -> Machine:
    status = _status(job)
    state = _STATES.get(status, "ended")
    resources = str(job.get("cluster_resources") or job.get("resources") or "")
    market_is_spot = "[spot]" in resources.lower()
    instance = _instance_of(resources)
    ended = "its agent has left the run" if status == "SUCCEEDED" else f"its job is {status.lower().replace('_', ' ')}"
    reason = str(job.get("failure_reason") or ended) if state == "ended" else _WAITING_REASONS.get(status, "")
    return Machine(
        id=job["job_name"],
        state=state,
        instance=instance,
        zone=_known(job.get("zone")),
        market="spot" if market_is_spot else "on-demand",
        price_per_h=catalogue_price(instance, spot=market_is_spot),
        started_at=float(job.get("start_at") or job.get("submitted_at") or 0.0),
        reason=reason.strip().splitlines()[0] if reason.strip() else "",
        failed=status in ("FAILED", "FAILED_SETUP", "FAILED_PRECHECKS"),
    )


def _instance_of(resources: str) -> str:
    """The instance type in SkyPilot's words for resources, as in "1x(gpus=A10G:1, g5.xlarge, ...)[spot]"."""
    inner = resources.partition("(")[2].partition(")")[0] or resources
    words = [word.strip() for word in inner.split(",")]
    return next((word for word in words if word and "=" not in word and catalogue_price(word, spot=False)), "")


def _known(value: Any) -> str:
    """A zone; empty where SkyPilot shows a dash for none."""
    return "" if value in (None, "-") else str(value)


def _status(job: Any) -> str:
    found = job["status"]
    return str(getattr(found, "value", found))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _import_sky() -> Any:
    try:
        return importlib.import_module("sky")
    except ImportError:
        raise EngineMissing("--on skypilot needs SkyPilot: pip install 'skypilot[aws]', or with your clouds") from None
