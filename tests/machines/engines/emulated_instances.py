"""Emulated EC2 instances: local processes in place of the instances that a moto server believes to run.

Each runs the real boot script in a folder of its own, with commands that answer as on an instance, and then its agent.
When the agent ends, the instance is terminated; when moto has terminated the instance, the agent is stopped.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.machines.engines.fake_aws import FakeAws

_POLL_S = 0.5
_SHUTDOWN_S = 60.0
"""How long the agent of a terminated instance has before it is killed."""
_ALIVE = ("pending", "running")


def run_boot_script(script: str, folder: Path, commands: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a boot script with `folder` in place of /, and commands that record their arguments in `folder`/calls."""
    script = script.replace("/etc/", f"{folder}/etc/").replace("/dev/console", str(folder / "console"))
    (folder / "etc/systemd/system").mkdir(parents=True)
    (folder / "bin").mkdir()
    for name, does in commands.items():
        text = f'#!/bin/sh\necho "{name} $*" >>{shlex.quote(str(folder))}/calls\n{does}\n'
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(["sh"], input=script, text=True, cwd=folder, env=environment, check=False)


def instance_commands(instance: str, zone: str, parameter: str) -> dict[str, str]:
    """The commands of an instance. `parameter`: a shell command that prints the parameter with the token."""
    return {
        "curl": f'case "$*" in *instance-id) echo {instance};; *zone) echo {zone};; *) echo session;; esac',
        "aws": parameter,
        "id": "true",
        "systemctl": "true",
        "shutdown": "true",
    }


@dataclass
class EmulatedInstance:
    """One instance with its agent."""

    id: str
    folder: Path
    agent: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def end(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.agent.pid, number)
        self.agent.wait()


@dataclass
class EmulatedInstances:
    """The instances of a moto server. `interrupt` gives one the notice that EC2 gives."""

    aws: FakeAws
    folder: Path
    environment: dict[str, str]
    """Environment variables of all agents."""
    metadata_url: str = ""
    known: dict[str, EmulatedInstance] = field(default_factory=dict)
    notices: dict[str, str] = field(default_factory=dict)
    """What the metadata service tells an instance, by its id."""
    advised: set[str] = field(default_factory=set)
    """Instances that EC2 recommends to replace."""
    shut_down_at: dict[str, float] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)

    def advise(self, instance: str) -> None:
        """Recommend to replace an instance."""
        self.advised.add(instance)

    def interrupt(self, instance: str) -> None:
        """Announce that an instance will be terminated in two minutes."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
        self.notices[instance] = json.dumps({"action": "terminate", "time": when})

    def follow(self, stopped: threading.Event) -> None:
        """Start and end agents as moto starts and ends instances, until stopped."""
        try:
            while not stopped.wait(_POLL_S):
                alive = {each["InstanceId"]: each for each in self.aws.instances(*_ALIVE)}
                for id_ in alive.keys() - self.known.keys():
                    self.known[id_] = self._boot(alive[id_])
                for id_, instance in self.known.items():
                    if id_ in alive and instance.agent.poll() is not None:
                        self.aws.interrupt(id_)  # the unit powers the instance off, which terminates it
                    elif id_ not in alive and instance.agent.poll() is None:
                        self._shut_down(instance)
        except BaseException as error:
            self.errors.append(error)
        finally:
            for instance in self.known.values():
                instance.end(signal.SIGKILL)

    def _shut_down(self, instance: EmulatedInstance) -> None:
        """As systemd does: SIGTERM to the agent, and SIGKILL to what is left later."""
        if instance.id not in self.shut_down_at:
            self.shut_down_at[instance.id] = time.monotonic()
            instance.agent.send_signal(signal.SIGTERM)
        elif time.monotonic() - self.shut_down_at[instance.id] > _SHUTDOWN_S:
            instance.end(signal.SIGKILL)

    def _boot(self, found: dict[str, Any]) -> EmulatedInstance:
        id_ = found["InstanceId"]
        folder = self.folder / id_
        folder.mkdir()
        attribute = self.aws.client("ec2").describe_instance_attribute(InstanceId=id_, Attribute="userData")
        script = base64.b64decode(attribute["UserData"]["Value"]).decode()
        (launch,) = (tag["Value"] for tag in found["Tags"] if tag["Key"] == "culm-launch")
        stored = self.aws.client("ssm").get_parameter(Name=f"/culm/{launch}/token", WithDecryption=True)
        commands = instance_commands(
            id_, found["Placement"]["AvailabilityZone"], f"echo {stored['Parameter']['Value']}"
        )
        done = run_boot_script(script, folder, commands)
        assert done.returncode == 0, done
        variables = dict(line.split("=", 1) for line in (folder / "etc/culm/agent.env").read_text().splitlines())
        exec_word, *command = shlex.split((folder / "etc/culm/agent.sh").read_text())
        assert (exec_word, command[-1]) == ("exec", "$CULM_ZONE")
        service = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"{self.metadata_url}/{id_}"}
        with (folder / "log").open("wb") as log:
            agent = subprocess.Popen(  # without the shell, so that `forked_programs` starts it
                [*command[:-1], variables["CULM_ZONE"]],
                cwd=folder,
                env={**self.environment, **variables, **service},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return EmulatedInstance(id_, folder, agent)

    def answer(self, method: str, path: str) -> tuple[int, str]:
        """The answer of the metadata service. The first part of a path is the id of the instance."""
        _, instance, rest = path.split("/", 2)
        if method == "PUT":
            return 200, "session"
        if rest.endswith("spot/instance-action") and instance in self.notices:
            return 200, self.notices[instance]
        if rest.endswith("recommendations/rebalance") and instance in self.advised:
            return 200, '{"noticeTime": "2026-05-01T11:50:00Z"}'
        return 404, ""


@contextmanager
def emulated_instances(aws: FakeAws, folder: Path, environment: dict[str, str]) -> Iterator[EmulatedInstances]:
    """Instances for as long as the block runs. No process of them is left afterwards."""
    folder.mkdir()
    emulated = EmulatedInstances(aws, folder, environment)

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = emulated.answer(self.command, self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    emulated.metadata_url = f"http://127.0.0.1:{server.server_address[1]}"
    stopped = threading.Event()
    threads = [
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}),
        threading.Thread(target=emulated.follow, args=(stopped,)),
    ]
    for thread in threads:
        thread.start()
    try:
        yield emulated
    finally:
        stopped.set()
        threads[1].join()
        server.shutdown()
        threads[0].join()
        server.server_close()
    assert not emulated.errors, emulated.errors
