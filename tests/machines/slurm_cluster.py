"""A real Slurm cluster on this machine: one controller and several nodes, of Debian's packages. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

NODES = 4
GRACE_S = 60
"""Jobs of the partition `urgent` preempt those of the default partition, which have this time to end."""
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue", "sinfo")
_START_TIMEOUT_S = 30.0
_MUNGE = ("key-file", "socket", "pid-file", "log-file", "seed-file")


def why_not() -> str:
    """Why this machine cannot have such a cluster; empty: it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is missing: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "only root can start munged and slurmd"


def _free_ports(count: int) -> list[int]:
    """Consecutive free ports below the ephemeral ones."""
    found: list[int] = []
    for port in range(23000 + os.getpid() * 8 % 7000, 31000):  # test processes with near ids look at different ports
        try:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            found.clear()
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("there are no free ports")


class SlurmCluster:
    """Use `slurm_cluster`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = folder / "slurm.conf"
        self._munge = Path(tempfile.mkdtemp(prefix="culm-munge-", dir="/run"))
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """What commands of this cluster need."""
        return {"SLURM_CONF": str(self.config)}

    def start(self) -> None:
        self._start_munge()
        host = socket.gethostname().partition(".")[0]
        controller, *ports = _free_ports(1 + NODES)
        for name in ("state", "spool"):
            (self._folder / name).mkdir()
        self.config.write_text(
            f"""ClusterName=culm
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self._munge}/socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={self._folder}/state
SlurmdSpoolDir={self._folder}/spool/%n
SlurmctldPidFile={self._folder}/slurmctld.pid
SlurmdPidFile={self._folder}/slurmd-%n.pid
SlurmctldLogFile={self._folder}/slurmctld.log
SlurmdLogFile={self._folder}/slurmd-%n.log
ReturnToService=2
KillWait=3
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
NodeName=n[0-{NODES - 1}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[0]}-{ports[-1]}] CPUs=1 RealMemory=500
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={GRACE_S}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""
        )
        self._start("slurmctld", "-D")
        for number in range(NODES):
            self._start("slurmd", "-D", "-N", f"n{number}")
        until = time.monotonic() + _START_TIMEOUT_S
        while self.run("sinfo", "--noheader", "--format=%t %D", check=False).strip() != f"idle {NODES}":
            assert time.monotonic() < until, self.logs()
            time.sleep(0.1)

    def _start_munge(self) -> None:
        """A munged of this cluster alone. It refuses files below folders that others may write, so not in `folder`."""
        self._munge.chmod(0o755)
        key = self._munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        self._start(
            "munged", "--foreground", *(f"--{name}={self._munge / name.removesuffix('-file')}" for name in _MUNGE)
        )
        until = time.monotonic() + _START_TIMEOUT_S
        with socket.socket(socket.AF_UNIX) as probe:
            while probe.connect_ex(str(self._munge / "socket")) != 0:
                assert self._daemons[-1].poll() is None and time.monotonic() < until, self.logs()
                time.sleep(0.05)

    def _start(self, *command: str) -> None:
        name = "-".join(word for word in command if "=" not in word)
        with (self._folder / f"{name}.out").open("wb") as log:
            environment = {**os.environ, **self.environment}
            self._daemons.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def run(self, *command: str, check: bool = True) -> str:
        """The output of a command of Slurm."""
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def logs(self) -> str:
        """The ends of all logs."""
        paths = [*self._folder.glob("*.log"), *self._folder.glob("*.out"), *self._munge.glob("log")]
        return "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in paths)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self._munge, ignore_errors=True)


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A cluster of four nodes; afterwards none of its daemons is left."""
    made = SlurmCluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
