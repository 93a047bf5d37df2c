"""`--on ray`: each machine is a Ray actor on a node of its own, which runs one agent.

The actors are independent (`max_restarts=0`, no placement group): a lost node ends one agent and restarts none. When
Ray drains a node, its agent gets a notice. The actors are detached, with the launch as their namespace: they go on when
the process that launched them ends, another process finds them, and each ends soon after its agent.

PROVIDER FOLDER/used    exists from before the first actor is started
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

from culm.cluster.agent.preemption_notice import NOTICE_FILE_VARIABLE
from culm.errors import RunError, UsageError, message_suffix
from culm.machines.agent_process import describe_agent_end, log_end
from culm.machines.machine_provider import (
    MACHINE_VARIABLE,
    LaunchSpec,
    Machine,
    MachineNotice,
    MachineRequest,
    MachineState,
    ProviderSettings,
)
from culm.providers import die_with_parent

A = ParamSpec("A")
T = TypeVar("T")
_ANSWER_TIMEOUT_S = 10.0
_POLL_S = 1.0
_LINGER_S = 60.0
"""How long an actor stays after its agent, so that the launching process can ask how that ended."""


class RayAgent:
    """The actor: starts one agent, and ends it when the actor ends."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - no file is left when the actor is killed
        self._notice = tempfile.TemporaryFile("w")  # noqa: SIM115 - the same
        self._process: subprocess.Popen[bytes] | None = None
        self._is_started = threading.Event()
        threading.Thread(target=self._end_after_agent, daemon=True).start()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the agent. Not done by the constructor: Ray keeps the arguments of that, which contain the token."""
        notice_file = f"/proc/{os.getpid()}/fd/{self._notice.fileno()}"
        program = shutil.which(command[0]) or command[0]
        wrapper = [sys.executable, die_with_parent.__file__, str(os.getpid()), program, *command[1:]]
        self._process = subprocess.Popen(
            wrapper,
            env={**os.environ, **environment, NOTICE_FILE_VARIABLE: notice_file},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._is_started.set()

    def _end_after_agent(self) -> None:
        """End the actor when nobody needs it any more: it holds resources of its node."""
        if self._is_started.wait(_LINGER_S) and self._process is not None:
            self._process.wait()
            time.sleep(_LINGER_S)
        os._exit(0)

    def poll(self) -> tuple[int | None, str]:
        """(exit status of the agent; None: it runs, the end of its log)."""
        status = None if self._process is None else self._process.poll()
        return status, "" if status is None else log_end(Path(f"/proc/self/fd/{self._log.fileno()}"))

    def drain(self, notice_s: float) -> None:
        """Give the agent a notice of so many seconds."""
        self._notice.write(f"{notice_s:g}")
        self._notice.flush()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End the agent at once."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@dataclass
class RayMachine:
    """An actor and the node that it is on."""

    actor: Any
    node: str
    started_at: float
    state: MachineState = "pending"
    reason: str = ""
    failed: bool = False


class RayMachines:
    """Machines that are nodes of a Ray cluster."""

    name: ClassVar[str] = "ray"
    options: ClassVar[Mapping[str, str]] = {
        "address": "address of the cluster, as in ray.init (auto)",
        "cpus": "logical CPUs that an agent takes (1)",
        "gpus": "logical GPUs that an agent takes (0)",
        "resources": 'custom resources that an agent takes, as in {"spot": 1}',
    }
    costs_money: ClassVar[bool] = False

    def __init__(self, settings: ProviderSettings) -> None:
        self._settings = settings
        given = settings.options
        self._cpus, self._gpus = _number("cpus", given.get("cpus", "1")), _number("gpus", given.get("gpus", "0"))
        try:
            self._resources: dict[str, float] = json.loads(given.get("resources", "{}"))
        except ValueError:
            raise UsageError(f'--option resources is {given["resources"]!r}: use JSON, as in {{"spot": 1}}') from None
        self._used_mark = Path(settings.folder) / "used"
        self._machines: dict[str, RayMachine] = {}
        self._is_connected = False

    def check(self, request: MachineRequest) -> None:
        if request.instance or request.zone:
            field, value = ("instance", request.instance) if request.instance else ("zone", request.zone)
            raise UsageError(f"--{field} is {value!r}: choose nodes of Ray with --option resources")

    def manifest(self, spec: LaunchSpec, request: MachineRequest) -> str:
        shown = {
            "actors": request.count,
            "max_restarts": 0,
            **self._actor_options(),
            "command": spec.agent_command_line(request),
            "environment": [*spec.environment, *spec.secret_environment],
        }
        return json.dumps(shown, indent=2) + "\n"

    def _actor_options(self) -> dict[str, Any]:
        return {"num_cpus": self._cpus, "num_gpus": self._gpus, "resources": self._resources}

    async def request(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        return await _in_thread(self._start_all, spec, request)

    def _start_all(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        self._connect()
        self._used_mark.touch()
        used = {machine.node for machine in self._machines.values() if machine.state != "ended"}
        free = [node for node in self._fitting_nodes() if node not in used]
        if len(free) < request.count:
            self._ask_autoscaler(len(used) + request.count)
        return [self._start(spec, request, node) for node in free[: request.count]]

    def _connect(self) -> None:
        """Connect to the cluster once. Raises UsageError if there is none."""
        import ray

        if self._is_connected or ray.is_initialized():
            return
        address = self._settings.options.get("address", "auto")
        try:
            ray.init(address, namespace=self._settings.launch, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"--option address is {address!r}: there is no Ray cluster{message_suffix(error)}"
            ) from None
        self._is_connected = True

    def _fitting_nodes(self) -> list[str]:
        """The nodes that live, are not drained, and have in all what an agent takes."""
        import ray

        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        wanted = {"CPU": self._cpus, "GPU": self._gpus, **self._resources}
        draining = _draining_nodes()
        return [
            node["NodeID"]
            for node in nodes
            if node["Alive"]
            and node["NodeID"] not in draining
            and all(node["Resources"].get(name, 0.0) >= amount for name, amount in wanted.items())
        ]

    def _ask_autoscaler(self, count: int) -> None:
        """Let Ray's autoscaler, if there is one, start more nodes."""
        from ray.autoscaler.sdk import request_resources

        bundle = {name: amount for name, amount in (("CPU", self._cpus), ("GPU", self._gpus)) if amount}
        request_resources(bundles=[{**bundle, **self._resources} for _ in range(count)])

    def _start(self, spec: LaunchSpec, request: MachineRequest, node: str) -> str:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        id_ = f"ray-{len(self._machines) + 1}"
        environment = {**spec.environment, **spec.secret_environment, MACHINE_VARIABLE: id_}
        on_node = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"max_restarts": 0, "name": id_, "lifetime": "detached", "scheduling_strategy": on_node}
        options |= self._actor_options()
        actor: Any = ray.remote(RayAgent).options(**options).remote()
        actor.start.remote(spec.agent_command(request), environment)
        self._machines[id_] = RayMachine(actor, node, time.time())
        return id_

    async def machines(self) -> list[Machine]:
        await _in_thread(self._look)
        return [
            Machine(
                id=id_,
                state=machine.state,
                price_per_h=0.0,
                started_at=machine.started_at,
                reason=machine.reason,
                failed=machine.failed,
            )
            for id_, machine in self._machines.items()
        ]

    def _look(self) -> None:
        """Ask every actor how its agent is."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        if not self._machines:
            self._find_machines()
        polls = {id_: m.actor.poll.remote() for id_, m in self._machines.items() if m.state != "ended"}
        ready, _ = ray.wait(list(polls.values()), num_returns=len(polls), timeout=_POLL_S) if polls else ([], [])
        for id_, answer in polls.items():
            machine = self._machines[id_]
            if answer not in ready:
                continue  # its actor has not started yet, or its node does not answer yet
            try:
                status, log = ray.get(answer, timeout=_ANSWER_TIMEOUT_S)
            except RayActorError as error:
                machine.state, machine.reason = "ended", _first_line(error, "its node or actor was lost")
            except GetTimeoutError:
                continue
            else:
                machine.state = "running"
                if status is not None:
                    machine.state = "ended"
                    machine.reason, machine.failed = describe_agent_end(status, log)
                    ray.kill(machine.actor)  # the resources of its node are free for another one

    def _find_machines(self) -> None:
        """Find the actors of a launch that another process has started."""
        import ray
        from ray.util import list_named_actors

        if not self._used_mark.exists():
            return
        self._connect()
        for found in list_named_actors(all_namespaces=True):
            if found["namespace"] == self._settings.launch:
                with contextlib.suppress(ValueError):  # it has just ended
                    actor = ray.get_actor(found["name"], namespace=self._settings.launch)
                    self._machines[found["name"]] = RayMachine(actor, "", 0.0)

    async def drain(self, ids: list[str], notice_s: float) -> None:
        for machine in self._of(ids):
            machine.actor.drain.remote(notice_s)

    async def release(self, ids: list[str]) -> None:
        await _in_thread(self._end, self._of(ids))

    def _of(self, ids: Sequence[str]) -> list[RayMachine]:
        return [self._machines[id_] for id_ in ids if id_ in self._machines and self._machines[id_].state != "ended"]

    def _end(self, machines: Sequence[RayMachine]) -> None:
        import ray

        ending = [machine.actor.end.remote() for machine in machines]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=_ANSWER_TIMEOUT_S)
        for machine in machines:
            ray.kill(machine.actor)

    async def notices(self) -> AsyncIterator[MachineNotice]:
        reported: set[str] = set()
        while True:
            await asyncio.sleep(_POLL_S)
            for id_, machine in list(self._machines.items()):
                if machine.state == "ended" or id_ in reported:
                    continue
                deadline_ms = (await _in_thread(_draining_nodes)).get(machine.node)
                if deadline_ms is not None:
                    reported.add(id_)
                    left_s = deadline_ms / 1000 - time.time() if deadline_ms else 30.0
                    yield MachineNotice(id_, max(0.0, left_s), "Ray drains its node")

    def price(self, request: MachineRequest) -> float | None:
        del request
        return 0.0

    async def down(self) -> None:
        await _in_thread(self._end_all)

    def _end_all(self) -> None:
        """End all actors of the launch, and disconnect."""
        import ray

        self._find_machines()
        self._end([machine for machine in self._machines.values() if machine.state != "ended"])
        self._used_mark.unlink(missing_ok=True)
        if self._is_connected:
            ray.shutdown()
        self._is_connected = False


def _draining_nodes() -> dict[str, int]:
    """The nodes that Ray drains, and when they end in Unix milliseconds; 0: not known."""
    from ray._private.state import state

    found: dict[str, int] = state.get_draining_nodes()
    return found


def _first_line(error: Exception, default: str) -> str:
    lines = str(error).strip().splitlines()
    return f"{default} ({lines[0][:120]})" if lines else default


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--option {name} is {text!r}: use a number") from None


async def _in_thread(function: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
    """Call a blocking function of Ray. Raises RunError if Ray fails."""
    from ray.exceptions import RayError

    try:
        return await asyncio.to_thread(function, *args, **kwargs)
    except RayError as error:
        raise RunError(f"Ray has failed{message_suffix(error)}") from error
