"""Whole trainings whose workers come from each back end. The graph is tiny: what counts is that they dial back."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from culm.errors import RunError, UsageError
from culm.gnn import train
from culm.gnn.launch.base import Ticket
from culm.gnn.launch.package import package

from . import launch_standin as standin

if TYPE_CHECKING:
    from culm.gnn.launch.base import Launcher

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked")]
GRAPH = "gen:sbm,vertices=300,classes=3,degree=8"


class Invocations:
    """Lambda as far as a worker can tell: every launch is a process that has nothing but the handler and its event.

    It is forked: that handler and worker can be imported in a new process is seen where they are packaged.
    """

    name = "lambda"

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self.hosts: set[str] = set()
        """Where workers were told to call."""

    async def launch(self, ticket: Ticket, count: int) -> None:
        self.hosts.add(ticket.host)
        event = json.dumps(asdict(ticket))
        self._started += [subprocess.Popen([sys.executable, "-m", "tests.gnn.invoked", event]) for _ in range(count)]

    async def close(self) -> None:
        """Wait for them: nothing else could be done about invocations, so they must end by themselves."""
        self.codes = [await asyncio.to_thread(process.wait, 60) for process in self._started]


def losses(launcher: str | Launcher, **options: Any) -> list[float]:
    made: Any = train(GRAPH, "gcn", epochs=3, dropout=0.0, workers=1, launcher=launcher, seed=1, **options)
    assert made.summary["workers_lost"] == 0
    assert made.summary["launcher"] in ("local", "ray", "lambda")
    return list(made.losses)


@pytest.fixture(scope="module")
def local(forked: None) -> list[float]:
    """The losses that every back end has to come to."""
    return losses("local")


def test_workers_behind_the_lambda_handler_train_like_local_ones_and_end_by_themselves(
    local: list[float],
) -> None:
    invocations = Invocations()
    assert losses(invocations, host="127.0.0.2") == local
    assert invocations.hosts == {"127.0.0.2"}
    assert set(invocations.codes) == {0}


class Lent:
    """A launcher that outlives the trainings it is lent to."""

    def __init__(self, launcher: Launcher) -> None:
        self.name, self.launch = launcher.name, launcher.launch

    async def close(self) -> None:
        """Whoever has lent it does that."""


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def test_workers_on_a_ray_cluster_dial_back_train_like_local_ones_and_end_with_the_launcher(
    local: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    from culm.gnn.launch.ray import RayLauncher

    async def story() -> list[int]:
        launcher = RayLauncher(cpus=0.25)
        async with standin.desk() as desk:
            ticket = Ticket("r1", "secret", "127.0.0.1", desk.port, 600)
            with monkeypatch.context() as other:  # one cluster for both kinds of workers: it takes seconds to start
                other.setattr(launcher, "_entry", standin.named(standin.serve))
                cards = []
                for _ in range(2):
                    await launcher.launch(ticket, 1)
                    cards.append(await desk.worker())
            assert {(c["run"], c["token"]) for c in cards} == {("r1", "secret")}
            assert await asyncio.to_thread(losses, Lent(launcher)) == local
            assert desk.gone.empty()
            await launcher.close()
            await launcher.close()
            gone = [await asyncio.wait_for(desk.gone.get(), 60) for _ in cards]
            assert sorted(gone) == sorted(c["pid"] for c in cards)
            with pytest.raises(RunError, match="closed"):
                await launcher.launch(ticket, 1)
        return gone

    pids = asyncio.run(story())
    assert len(set(pids)) == 2
    assert all(map(standin.ended, pids))
    assert not ray.is_initialized()


def test_the_real_worker_needs_an_image_on_lambda_because_torch_is_no_zip() -> None:
    with pytest.raises(UsageError, match=r"of which torch \d+.*image=URI"):
        package()
