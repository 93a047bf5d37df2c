"""Machines that join a run which was started elsewhere: each with a fork server of its own, and one etcd."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.etcd_servers import etcd_with

import culm
from culm.cluster.run_setup import RunResult, RunSetup
from culm.cluster.store.encrypted_store import connection_secret
from culm.cluster.store.etcd import EtcdStore, parse_etcd_access
from culm.config import RunConfig
from culm.errors import RunError, UsageError
from culm.job import load_job
from culm.providers.fork_server import JobSource, StartNode
from culm.providers.join_run import RunParticipant
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.providers.run_events import NodeJoinedEvent, NodeLostEvent
from culm.providers.run_store import StoreLocation
from culm.providers.shared_run import SharedRun
from culm.testing import reference

pytestmark = [pytest.mark.real, pytest.mark.waits(5), pytest.mark.usefixtures("forked_programs")]
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
def elsewhere(forked_programs: None) -> Iterator[ForkServerClient]:
    """The fork server of another machine."""
    with ForkServerClient() as made:
        yield made


class GpuMachines(NamedTuple):
    """The fork servers of three machines, and a file with their number of GPUs."""

    here: ForkServerClient
    first: ForkServerClient
    second: ForkServerClient
    file_of_gpus: Path


@pytest.fixture
def gpu_machines(forked_programs: None, file: Path) -> Iterator[GpuMachines]:
    """Machines that report GPUs and compute on the CPU."""
    count = file.parent / "gpus"
    patch = (
        f"torch.cuda.is_available = lambda: False\ntorch.cuda.device_count = lambda: int(open({str(count)!r}).read())\n"
    )
    file.write_text(JOB.replace("class Nap", f"{patch}\nclass Nap"))
    with ForkServerClient() as here, ForkServerClient() as first, ForkServerClient() as second:
        yield GpuMachines(here, first, second, count)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with etcd_with(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "napping.py"
    made.write_text(JOB)
    return made


def place(url: str, secret: bytes = SECRET) -> StoreLocation:
    return StoreLocation(parse_etcd_access(url), "napping", secret=secret)


@asynccontextmanager
async def led(
    fork_server: ForkServerClient,
    url: str,
    file: Path,
    *,
    local_nodes: int = 1,
    on_changed: Callable[[RunSetup], None] = lambda _: None,
    **request: Any,
) -> AsyncIterator[RunHandle]:
    """A run of two pipelines whose first nodes are here; it waits for another machine."""
    source = JobSource(str(file), {}, path=tuple(sys.path))
    shared = SharedRun(access=parse_etcd_access(url), job="napping", secret=SECRET, local_nodes=local_nodes)
    config = RunConfig(**{"pipelines": 2, "stages": 1, **request})
    async with local_run(fork_server, source, config, shared=shared, on_changed=on_changed) as run:
        yield run


def attendance(elsewhere: ForkServerClient, at: StoreLocation, said: list[str], **settings: Any) -> RunParticipant:
    order = StartNode(0, at, connection_secret(at.secret, at.job), zone="b", run=1_000_000 + len(said))
    return RunParticipant(elsewhere, at, order, said.append, **settings)


@asynccontextmanager
async def attending(
    elsewhere: ForkServerClient, at: StoreLocation, said: list[str], **settings: Any
) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(attendance(elsewhere, at, said, **settings).run(tuple(sys.path)))
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
    async with await EtcdStore.open(parse_etcd_access(url), "napping") as store:
        return await store.list_keys("")


def test_a_machine_joins_is_killed_and_comes_back_as_a_new_node_and_no_bit_differs(
    fork_server: ForkServerClient, elsewhere: ForkServerClient, url: str, file: Path
) -> None:
    """What is in etcd cannot be read without the secret, and nothing is left there afterwards."""
    said: list[str] = []
    seen: list[bytes] = []

    async def main() -> RunResult:
        async with (
            led(fork_server, url, file, strategy="reroute") as run,
            attending(elsewhere, place(url), said) as task,
        ):
            await run.wait_for_first_step()
            async with await EtcdStore.open(parse_etcd_access(url), "napping") as raw:
                seen.extend([await raw.get("job") or b"", await raw.get("epoch") or b""])
            (agent,) = children(elsewhere.pid)
            os.kill(agent, signal.SIGKILL)
            news = [await run.next_event() for _ in range(3)]
            assert NodeLostEvent(1) in news
            result = await run.wait_for_result()
            await task
            return result

    result = patiently(main())
    assert result.summary is not None, result.message
    expected = reference(load_job(str(file)))
    assert result.summary["state_sha256"] == expected.state_sha256
    assert result.summary["preemptions"] == 1
    assert "joining job napping as node 1" in said
    assert "joining job napping as node 2" in said
    assert said[-1] == "node 2 has left job napping: the run has ended"
    assert all(value and b"napping" not in value and b"127.0.0.1" not in value for value in seen)
    assert asyncio.run(keys_left(url)) == []


def test_a_machine_that_the_run_has_no_use_for_is_released(
    fork_server: ForkServerClient, elsewhere: ForkServerClient, url: str, file: Path
) -> None:
    said: list[str] = []
    settings = {"machine": "spare-1", "idle_timeout_s": 0.5}

    async def main() -> RunResult:
        file.write_text(JOB.replace("steps=40", "steps=1000"))
        async with led(fork_server, url, file, local_nodes=2, reconfigure="never", slow_factor=0.0) as run:
            await run.wait_for_first_step()
            async with attending(elsewhere, place(url), said, **settings) as task:
                assert await run.next_event() == NodeJoinedEvent(2, has_empty_slot=False)
                assert run.machines_in_run == {"spare-1": False}
                await task
            assert await run.next_event() == NodeLostEvent(2)
            assert run.machines_in_run == {}
            run.finish_at_next_step()
            return await run.wait_for_result()

    result = patiently(main())
    assert result.summary is not None, result.message
    assert "node 2 has had no slot for 0 s: it is released" in said
    assert said[-1] == "node 2 has left job napping"


def test_nodes_have_a_worker_for_each_gpu_of_the_first_machine_that_joins(
    gpu_machines: GpuMachines, url: str, file: Path
) -> None:
    """A machine with fewer GPUs is refused in one sentence, and one with more says how many it does not use."""
    few: list[str] = []
    many: list[str] = []
    shapes: list[RunSetup] = []
    here, first, second, gpus = gpu_machines
    gpus.write_text("2")

    async def main() -> RunResult:
        opening = led(here, url, file, local_nodes=0, pipelines=None, stages=None, nodes=2, on_changed=shapes.append)
        async with attending(first, place(url), many), opening as run:
            assert (run.setup.nodes, run.setup.workers_per_node) == (2, 2)
            gpus.write_text("1")
            with pytest.raises(UsageError, match="this machine has 1 GPU, and nodes of the run have 2 workers"):
                async with attending(second, place(url), few) as refused:
                    await refused
            gpus.write_text("3")
            async with attending(second, place(url), few) as joined:
                result = await run.wait_for_result()
                await joined
            return result

    result = patiently(main())
    assert result.summary is not None, result.message
    file.write_text(JOB)
    assert result.summary["state_sha256"] == reference(load_job(str(file))).state_sha256
    assert [shape.workers_per_node for shape in shapes] == [2]
    assert "this machine has 3 GPUs, and nodes of the run have 2 workers: 1 of them stays unused" in few


def test_nodes_of_this_machine_divide_its_gpus(gpu_machines: GpuMachines, url: str, file: Path) -> None:
    gpu_machines.file_of_gpus.write_text("4")

    async def main() -> tuple[int, int]:
        async with led(gpu_machines.here, url, file, local_nodes=2, pipelines=4, stages=1) as run:
            await run.wait_for_first_step()
            return run.setup.nodes, run.setup.workers_per_node

    assert patiently(main()) == (2, 2)


def test_a_run_without_machines_ends_after_its_start_timeout(
    fork_server: ForkServerClient, url: str, file: Path
) -> None:
    async def main() -> None:
        async with led(fork_server, url, file, local_nodes=0, start_timeout=0.2):
            raise AssertionError("there is no machine")

    with pytest.raises(RunError, match=r"no machine has joined after 0 s \(--start-timeout\)"):
        patiently(main())
    assert asyncio.run(keys_left(url)) == []


def test_a_machine_that_differs_is_refused_by_name_and_nothing_is_disturbed(
    fork_server: ForkServerClient, elsewhere: ForkServerClient, url: str, file: Path, tmp_path: Path
) -> None:
    async def main() -> RunResult:
        async with led(fork_server, url, file) as run:
            file.write_text(JOB.replace("steps=40", "steps=40, seed=7"))
            said: list[str] = []
            with pytest.raises(UsageError, match=r"cannot join: file napping.py is \w+ here and \w+ in the job; batch"):
                async with attending(elsewhere, place(url), said) as task:
                    await task
            assert not run.has_joined(1)
            file.write_text(JOB)
            stranger = attending(elsewhere, place(url, b"some other secret"), said)
            with pytest.raises(UsageError, match="CULM_SECRET is not the secret of this job"):
                async with stranger as task:
                    await task
            with pytest.raises(UsageError, match="--job 'napping' is in use by another culm run"):
                async with led(elsewhere, url, file):
                    pass
            run.fail("enough")
            return await run.wait_for_result()

    result = patiently(main())
    assert result.message == "enough"


def test_a_run_on_several_machines_is_started_and_joined_from_python(
    fork_server: ForkServerClient, elsewhere: ForkServerClient, url: str, file: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    config = culm.RunConfig(etcd=url, secret_file=str(secret), address="127.0.0.1", job_name="napping")
    said: list[str] = []
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(culm.join, config, zone="b", fork_server=elsewhere, on_line=said.append)
        summary = culm.train(f"{file}:job", config, pipelines=2, stages=1, local_nodes=1, fork_server=fork_server)
        joined.result(PATIENCE_S)
    assert summary.state_sha256 == reference(load_job(str(file))).state_sha256
    assert "joining job napping as node 1" in said
    assert summary.config["secret_file"] == str(secret)
    assert SECRET.decode() not in str(summary.config)
