"""Trainings with workers of each launcher, on a tiny graph."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
from tests.gnn import fake_worker

from culm.errors import RunError, UsageError
from culm.gnn import train
from culm.gnn.launch.lambda_package import build_package
from culm.gnn.launch.launcher import Ticket

if TYPE_CHECKING:
    from culm.gnn.launch.launcher import Launcher

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked_programs")]
GRAPH = "gen:sbm,vertices=300,classes=3,degree=8"


class LambdaProcesses:
    """Lambda from a worker's point of view: every launch is a process with nothing but the handler and its event.

    The processes are forked; the tests of the package check that handler and worker can be imported in a new process.
    """

    name = "lambda"

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self.hosts: set[str] = set()
        """Hosts that workers were told to connect to."""

    async def launch(self, ticket: Ticket, count: int) -> None:
        self.hosts.add(ticket.host)
        event = json.dumps(asdict(ticket))
        self._started += [
            subprocess.Popen([sys.executable, "-m", "tests.gnn.lambda_invocation", event]) for _ in range(count)
        ]

    async def close(self) -> None:
        """Wait for all processes: invocations cannot be stopped, so they must end by themselves."""
        self.codes = [await asyncio.to_thread(process.wait, 60) for process in self._started]


def losses(launcher: str | Launcher, **options: Any) -> list[float]:
    result: Any = train(GRAPH, "gcn", epochs=3, dropout=0.0, workers=1, launcher=launcher, seed=1, **options)
    assert result.summary["workers_lost"] == 0
    assert result.summary["launcher"] in ("local", "ray", "lambda")
    return list(result.losses)


@pytest.fixture(scope="module")
def local_losses(forked_programs: None) -> list[float]:
    """The losses that every launcher has to reproduce."""
    return losses("local")


def test_workers_behind_the_lambda_handler_train_like_local_ones_and_end_by_themselves(
    local_losses: list[float],
) -> None:
    invocations = LambdaProcesses()
    assert losses(invocations, host="127.0.0.2") == local_losses
    assert invocations.hosts == {"127.0.0.2"}
    assert set(invocations.codes) == {0}


class BorrowedLauncher:
    """A launcher that outlives the trainings that use it."""

    def __init__(self, launcher: Launcher) -> None:
        self.name, self.launch = launcher.name, launcher.launch

    async def close(self) -> None:
        """The owner of the launcher closes it."""


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def test_workers_on_a_ray_cluster_train_like_local_ones_and_end_with_the_launcher(
    local_losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    from culm.gnn.launch.ray_launcher import RayLauncher

    async def scenario() -> list[int]:
        launcher = RayLauncher(cpus=0.25)
        async with fake_worker.open_pool() as pool:
            ticket = Ticket("r1", "secret", "127.0.0.1", pool.port, 600)
            with (
                monkeypatch.context() as patched
            ):  # both kinds of workers use one cluster, which takes seconds to start
                patched.setattr(launcher, "_entry", fake_worker.entry_name(fake_worker.serve))
                introductions = []
                for _ in range(2):
                    await launcher.launch(ticket, 1)
                    introductions.append(await pool.next_worker())
            assert {(c["run"], c["token"]) for c in introductions} == {("r1", "secret")}
            assert await asyncio.to_thread(losses, BorrowedLauncher(launcher)) == local_losses
            assert pool.ended_pids.empty()
            await launcher.close()
            await launcher.close()
            ended_pids = [await asyncio.wait_for(pool.ended_pids.get(), 60) for _ in introductions]
            assert sorted(ended_pids) == sorted(c["pid"] for c in introductions)
            with pytest.raises(RunError, match="closed"):
                await launcher.launch(ticket, 1)
        return ended_pids

    pids = asyncio.run(scenario())
    assert len(set(pids)) == 2
    assert all(map(fake_worker.process_ends, pids))
    assert not ray.is_initialized()


def test_the_real_worker_needs_an_image_on_lambda_because_torch_exceeds_the_zip_limit() -> None:
    with pytest.raises(UsageError, match=r"of which torch \d+.*image=URI"):
        build_package()
