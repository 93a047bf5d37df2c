"""Machines that join a run which was started elsewhere: each with a nursery of its own, and one etcd."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from culm.cluster.etcd import EtcdStore, parse_access
from culm.cluster.sealed import wire_secret
from culm.cluster.setup import Request, Result
from culm.errors import UsageError
from culm.job import load
from culm.providers.attend import Attendance
from culm.providers.local import LocalNursery, LocalRun, Shared, local_run
from culm.providers.nursery import JobSource, Start
from culm.providers.run import Lost
from culm.providers.stores import Place
from culm.testing import reference

from .etcds import etcd_with

pytestmark = [pytest.mark.real, pytest.mark.waits(5), pytest.mark.usefixtures("forked")]
PATIENCE_S = 180.0
SECRET = b"a secret of the test"
JOB = """
import time
import torch
from culm import Job
from torch import nn

class Nap(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        time.sleep(0.004)
        return self.linear(x)

DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.zeros(4)) for i in range(32)]

def job():
    return Job(
        layers=[Nap] * 4, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        data=DATA, global_batch=8, micro_batch=2, steps=40, exact=True,
    )
"""


@pytest.fixture(scope="module")
def elsewhere(forked: None) -> Iterator[LocalNursery]:
    """The nursery of another machine."""
    with LocalNursery() as made:
        yield made


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with etcd_with(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "napping.py"
    made.write_text(JOB)
    return made


def place(url: str, secret: bytes = SECRET) -> Place:
    return Place(parse_access(url), "napping", secret=secret)


@asynccontextmanager
async def led(nursery: LocalNursery, url: str, file: Path, **request: Any) -> AsyncIterator[LocalRun]:
    """A run of two pipelines whose first node is here; it waits for another machine."""
    source = JobSource(str(file), {}, path=tuple(sys.path))
    shared = Shared(access=parse_access(url), job="napping", secret=SECRET, local=1)
    async with local_run(nursery, source, Request(pipelines=2, stages=1, **request), shared=shared) as run:
        yield run


def attendance(elsewhere: LocalNursery, at: Place, said: list[str]) -> Attendance:
    order = Start(0, at, wire_secret(at.secret, at.job), zone="b", run=1_000_000 + len(said))
    return Attendance(elsewhere, at, order, said.append)


@asynccontextmanager
async def attending(elsewhere: LocalNursery, at: Place, said: list[str]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(attendance(elsewhere, at, said).run(tuple(sys.path)))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def patiently(main: Any) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main, PATIENCE_S)

    return asyncio.run(bounded())


def children(pid: int) -> list[int]:
    return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


async def keys_left(url: str) -> list[str]:
    async with await EtcdStore.open(parse_access(url), "napping") as store:
        return await store.names("")


def test_a_machine_joins_is_killed_and_comes_back_as_a_new_node_and_no_bit_differs(
    nursery: LocalNursery, elsewhere: LocalNursery, url: str, file: Path
) -> None:
    """What is in etcd can not be read without the secret, and nothing is left there afterwards."""
    said: list[str] = []
    seen: list[bytes] = []

    async def main() -> Result:
        async with led(nursery, url, file, strategy="reroute") as run, attending(elsewhere, place(url), said) as task:
            await run.begun()
            async with await EtcdStore.open(parse_access(url), "napping") as raw:
                seen.extend([await raw.get("job") or b"", await raw.get("epoch") or b""])
            (agent,) = children(elsewhere.pid)
            os.kill(agent, signal.SIGKILL)
            news = [await run.news() for _ in range(3)]
            assert Lost(1) in news
            result = await run.result()
            await task
            return result

    result = patiently(main())
    assert result.summary is not None, result.message
    expected = reference(load(str(file)))
    assert result.summary["state_sha256"] == expected.state_sha256
    assert result.summary["preemptions"] == 1
    assert "joining job napping as node 1" in said
    assert "joining job napping as node 2" in said
    assert all(value and b"napping" not in value and b"127.0.0.1" not in value for value in seen)
    assert asyncio.run(keys_left(url)) == []


def test_a_machine_that_differs_is_refused_by_name_and_nothing_is_disturbed(
    nursery: LocalNursery, elsewhere: LocalNursery, url: str, file: Path, tmp_path: Path
) -> None:
    async def main() -> Result:
        async with led(nursery, url, file) as run:
            file.write_text(JOB.replace("steps=40", "steps=40, seed=7"))
            said: list[str] = []
            with pytest.raises(
                UsageError, match=r"can not join: file napping.py is \w+ here and \w+ in the job; batch"
            ):
                async with attending(elsewhere, place(url), said) as task:
                    await task
            assert not run.joined(1)
            file.write_text(JOB)
            stranger = attending(elsewhere, place(url, b"some other secret"), said)
            with pytest.raises(UsageError, match="CULM_SECRET is not the secret of this job"):
                async with stranger as task:
                    await task
            with pytest.raises(UsageError, match="--job 'napping' is in use by another culm run"):
                async with led(elsewhere, url, file):
                    pass
            run.fail("enough")
            return await run.result()

    result = patiently(main())
    assert result.message == "enough"
