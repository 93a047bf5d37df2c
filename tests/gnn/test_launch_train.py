"""Whole trainings whose workers come from each back end. The graph is tiny: what counts is that they dial back."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from culm.errors import UsageError
from culm.gnn import train
from culm.gnn.launch.handler import HANDLER_NAME
from culm.gnn.launch.package import package

if TYPE_CHECKING:
    from culm.gnn.launch.base import Launcher, Ticket

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked")]
GRAPH = "gen:sbm,vertices=300,classes=3,degree=8"
INVOKED = f"""
import importlib, json, sys
handler = importlib.import_module("{HANDLER_NAME.rpartition(".")[0]}").handler
class Context:
    def get_remaining_time_in_millis(self):
        return 60_000
handler(json.loads(sys.argv[1]), Context())
"""


class Invocations:
    """Lambda as far as a worker can tell: every launch is a process that has nothing but the handler and its event."""

    name = "lambda"

    def __init__(self) -> None:
        self._started: list[asyncio.subprocess.Process] = []
        self.hosts: set[str] = set()
        """Where workers were told to call."""

    async def launch(self, ticket: Ticket, count: int) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.hosts.add(ticket.host)
        for _ in range(count):
            event = json.dumps(asdict(ticket))
            self._started.append(await asyncio.create_subprocess_exec(sys.executable, "-c", INVOKED, event, env=env))

    async def close(self) -> None:
        """Wait for them: nothing else could be done about invocations, so they must end by themselves."""
        self.codes = [await asyncio.wait_for(process.wait(), 60) for process in self._started]


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


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def test_workers_on_ray_train_like_local_ones(local: list[float]) -> None:
    pytest.importorskip("ray")
    from culm.gnn.launch.ray import RayLauncher

    assert losses(RayLauncher(cpus=0.5)) == local


def test_the_real_worker_needs_an_image_on_lambda_because_torch_is_no_zip() -> None:
    with pytest.raises(UsageError, match=r"of which torch \d+.*image=URI"):
        package()
