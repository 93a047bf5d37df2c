"""A run on two hosts with a bad network: one with etcd, the launcher and a node, the other with `culm agent`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests import network_namespaces
from tests.network_namespaces import Lab, NoLab

from culm.job import load_job
from culm.providers.private_etcd import etcd_binary
from culm.testing import reference

pytestmark = [
    pytest.mark.real,
    pytest.mark.waits(8),
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.skipif(not network_namespaces.possible(), reason="needs root and network namespaces"),
]
PATIENCE_S = 240
JOB = """
import os, pathlib, time
import torch
from culm import STOP, Job
from torch import nn

END = pathlib.Path(os.environ["CULM_TEST_END"])

class Nap(nn.Module):
    seconds = 0.012
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        time.sleep(self.seconds)
        return self.linear(x)

DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.zeros(4)) for i in range(32)]

def job():
    return Job(
        layers=[Nap] * 4, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        data=DATA, global_batch=8, micro_batch=2, steps=10**6, exact=True,
        on_step=lambda _: STOP if END.exists() else None,
    )
"""


@pytest.fixture(autouse=True)
def end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that ends the run."""
    monkeypatch.setenv("CULM_TEST_END", str(tmp_path / "end"))
    return tmp_path / "end"


class Command:
    """A culm command on a host. Its output is read line by line."""

    def __init__(self, lab: Lab, host: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            lab.command(host, sys.executable, "-m", "culm", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "CULM_SECRET": "a secret of the test"},
        )
        self._bound = threading.Timer(PATIENCE_S, self._process.kill)  # so that a missing line does not hang the test
        self._bound.start()
        self.said: list[str] = []

    def hear(self, part: str) -> None:
        """Read until a line contains this text."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line)
            if part in line:
                return
        raise AssertionError(f"{part!r} was never said, but:\n{''.join(self.said)}")

    def ended(self) -> int:
        assert self._process.stdout is not None
        self.said += list(self._process.stdout)
        return self._process.wait()

    def close(self) -> None:
        self._bound.cancel()
        self._process.kill()
        self._process.communicate()


@contextmanager
def two_hosts(folder: Path, *shape: str, slow_ms: int = 0) -> Iterator[tuple[Lab, Command, Command]]:
    """The run and the agent, after the first step."""
    (folder / "napping.py").write_text(JOB)
    with network_namespaces.lab("lead", "far") as lab:
        if slow_ms:
            lab.slow("far", slow_ms)
        url, peers = f"http://{lab.address('lead')}:2379", "http://127.0.0.1:2380"
        etcd = [etcd_binary(), f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={url}"]
        alone = [f"--advertise-client-urls={url}", f"--listen-peer-urls={peers}", "--log-level=panic"]
        store = subprocess.Popen(lab.command("lead", *etcd, *alone))
        file, out = str(folder / "napping.py"), str(folder / "out")
        shape = ("--pipelines", "2", "--stages", "1", "--strategy", "reroute", *shape)
        run = Command(
            lab, "lead", "run", file, *shape, "--etcd", url, "--local", "1", "--suspect-after", "2", "--out", out
        )
        far = Command(lab, "far", "agent", "--etcd", url, "--job", "napping", "--zone", "far")
        try:
            run.hear("steps 1/")
            yield lab, run, far
        finally:
            far.close()
            run.close()
            store.kill()
            store.wait()


def has_its_place(folder: Path, node: int) -> bool:
    events = map(json.loads, (folder / "out" / "events.jsonl").read_text().splitlines())
    return any(node in event["members"] for event in events if event["kind"] == "epoch")


def summary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The summary of the run; checks that its weights equal those of one process."""
    found: dict[str, object] = json.loads((folder / "out" / "summary.json").read_text())
    job = load_job(str(folder / "napping.py"), {"steps": str(found["steps"])})
    monkeypatch.setattr(job.layers[0], "seconds", 0.0)
    assert found["state_sha256"] == reference(job).state_sha256
    return found


def test_a_host_silent_for_too_long_is_fenced_and_rejoins_when_the_network_heals(
    tmp_path: Path, end: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_hosts(tmp_path) as (lab, run, far):
        lab.silence("far")
        run.hear("is gone")
        lab.heal("far")
        far.hear("this machine rejoins as a new node")
        run.hear("node 2 joined")
        while not has_its_place(tmp_path, 2):
            run.hear("steps ")
        run.hear("steps ")
        end.touch()
        assert run.ended() == 0, run.said
        assert far.ended() == 0, far.said
    found = summary(tmp_path, monkeypatch)
    assert found["preemptions"] == 1
    assert (found["samples_lost"], found["samples_duplicated"]) == (0, 0)


def test_a_slow_link_costs_no_node_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with two_hosts(tmp_path, "--steps", "20", slow_ms=100) as (_, run, far):
            assert run.ended() == 0, run.said
            assert far.ended() == 0, far.said
    except NoLab as reason:
        pytest.skip(str(reason))
    found = summary(tmp_path, monkeypatch)
    assert (found["steps"], found["preemptions"]) == (20, 0)
