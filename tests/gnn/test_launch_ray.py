"""Workers as tasks of a Ray cluster: what is refused, and how. A real one trains in test_launch_train."""

from __future__ import annotations

import asyncio
import importlib
import sys
from importlib.util import find_spec

import pytest

from culm.errors import RunError, UsageError
from culm.gnn.launch.base import Ticket
from culm.gnn.launch.ray import RayLauncher

from . import launch_standin as standin

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
]


def test_a_cluster_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(importlib.import_module("ray"), "init", refuse)

    async def story() -> None:
        launcher = RayLauncher(address="ray://10.0.0.9:10001", entry=standin.named(standin.serve))
        await launcher.launch(Ticket("r1", "secret", "127.0.0.1", 1, 60), 1)

    with pytest.raises(RunError, match=r"no Ray cluster at ray://10\.0\.0\.9:10001: no route"):
        asyncio.run(story())


def test_no_cpus_for_a_worker_is_refused() -> None:
    with pytest.raises(UsageError, match="cpus is 0"):
        RayLauncher(cpus=0)


def test_without_ray_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'culm\[ray\]'"):
        RayLauncher()
