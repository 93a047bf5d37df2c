"""Step reports that agents collect for the leader: a large cluster learns the same as one that sends each by itself."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tests.testing.small_job import job

from culm.cluster.agent.report_collector import ReportCollector
from culm.cluster.leader import leader_state
from culm.runtime import messages
from culm.runtime.clock import Clock
from culm.testing import Faults, simulate
from culm.transport.interface import Transport


class Sent:
    """The endpoint and the clock of an agent: time passes when `waited` is set."""

    def __init__(self) -> None:
        self.bundles: list[tuple[str, list[int]]] = []
        self.waited = asyncio.Event()

    def send_message(self, to: str, body: bytes) -> None:
        bundle = messages.decode(body)
        assert isinstance(bundle, messages.ReportBundle)
        self.bundles.append((to, [report.worker for report in bundle.reports]))

    async def sleep(self, seconds: float) -> None:
        del seconds
        await self.waited.wait()


def report(worker: int, step: int = 0) -> messages.CollectReport:
    counts = messages.count_runs((1,), (1,))
    return messages.CollectReport("leader", 3, messages.StepReport(worker, 1, step, 0.0, counts))


def test_reports_are_sent_together_when_all_are_there_or_have_waited() -> None:
    async def main() -> list[tuple[str, list[int]]]:
        sent = Sent()
        collector = ReportCollector(cast(Transport, sent), cast(Clock, sent))
        for worker, step in ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1)):
            collector.add(report(worker, step))
        assert sent.bundles == [("leader", [0, 1, 2])], "step 1 waits for worker 2"
        sent.waited.set()
        while len(sent.bundles) < 2:
            await asyncio.sleep(0)
        collector.add(report(2, 1))
        collector.close()
        return sent.bundles

    assert asyncio.run(main()) == [("leader", [0, 1, 2]), ("leader", [0, 1])]


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "checkpoint"])
def test_a_run_whose_reports_are_collected_learns_the_same(
    strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Node 2, which collects for its pipeline, is lost, and then the leader."""
    collected = list[int]()
    add = ReportCollector.add

    def counted(self: ReportCollector, message: messages.CollectReport) -> None:
        collected.append(message.report.worker)
        add(self, message)

    monkeypatch.setattr(ReportCollector, "add", counted)
    faults = Faults().kill(2, at="0S+", step=1).kill(0, at="0B1", step=2)
    shape: dict[str, Any] = {
        "pipelines": 4,
        "stages": 2,
        "strategy": strategy,
        "reconfigure": "never",
        "checkpoint_every": 1,
    }
    alone = simulate(job(), faults=faults, out=str(tmp_path_factory.mktemp("alone") / "run"), **shape)
    assert collected == []
    monkeypatch.setattr(leader_state, "COLLECT_FROM_WORKERS", 0)
    together = simulate(job(), faults=faults, out=str(tmp_path_factory.mktemp("together") / "run"), **shape)
    assert len(set(collected)) == 8
    assert together.state_sha256 == alone.state_sha256
    assert together.summary["preemptions"] >= 1
