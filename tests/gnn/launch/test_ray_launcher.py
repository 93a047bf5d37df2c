"""Errors of the Ray launcher. A real training on Ray is in test_launcher_training."""

from __future__ import annotations

import asyncio
import importlib
import sys
from importlib.util import find_spec

import pytest
from tests.gnn import fake_worker

from culm.errors import RunError, UsageError
from culm.gnn.launch.launcher import Ticket
from culm.gnn.launch.ray_launcher import RayLauncher

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
]


def test_an_unreachable_cluster_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(importlib.import_module("ray"), "init", refuse)

    async def scenario() -> None:
        launcher = RayLauncher(address="ray://10.0.0.9:10001", entry=fake_worker.entry_name(fake_worker.serve))
        await launcher.launch(Ticket("r1", "secret", "127.0.0.1", 1, 60), 1)

    with pytest.raises(RunError, match=r"no Ray cluster at ray://10\.0\.0\.9:10001: no route"):
        asyncio.run(scenario())


def test_no_cpus_for_a_worker_is_refused() -> None:
    with pytest.raises(UsageError, match="cpus is 0"):
        RayLauncher(cpus=0)


def test_without_ray_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'culm\[ray\]'"):
        RayLauncher()
