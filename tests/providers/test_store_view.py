"""The view of a run from outside: read from its store, which is never written."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.cached_runs import cached_setup
from tests.etcd_servers import etcd_with
from tests.tiny_jobs import boom, job, layers

from culm.cluster.run_setup import NodeRecord, encode
from culm.cluster.store.etcd import parse_etcd_access
from culm.cluster.store.store import StoreChange
from culm.errors import CulmError, UsageError
from culm.observe.report.load_run import RunContents
from culm.observe.report.page_layout import layout_run
from culm.observe.report.report_data import build_report_data
from culm.observe.step_metrics import StepMetrics
from culm.providers.run_store import open_job_in_etcd
from culm.providers.store_view import StoreView, merge_step_pairs, watch_run_store
from culm.runtime.clock import RealClock
from culm.testing import Cluster, Faults
from culm.testing.simulated_cluster import NO_FAULTS, Script, run_prepared

JOB = job(steps=8)
SECRET = b"a secret of the test"
PATIENCE_S = 60.0


def watching(seen: list[RunContents]) -> Script:
    """Notes what is to be seen after each change of the store."""

    async def script(cluster: Cluster) -> None:
        heard = StoreView("watched", cluster.clock)

        def hear(change: StoreChange) -> None:
            heard.handle_change(*change)
            seen.append(heard.read())

        cluster.store.listen("", hear)

    return script


def watched(faults: Faults = NO_FAULTS) -> list[RunContents]:
    seen: list[RunContents] = []
    run_prepared(
        JOB, cached_setup(JOB, pipelines=2, stages=2), faults=faults, script=watching(seen), cost=lambda *_: 0.01
    )
    return seen


def test_a_run_is_followed_from_its_first_node_to_its_result() -> None:
    seen = watched(faults=Faults().kill(node=3, step=3))
    going = [build_report_data(contents) for contents in seen if contents.live and contents.steps]
    assert all(found.state == "running" and found.every_sample_once is not False for found in going)
    assert [found.steps for found in going] == sorted(found.steps for found in going)
    assert any(found.nodes_present == 4 for found in going)
    assert any(found.nodes_present == 3 and found.preemptions == 1 and found.recoveries for found in going)
    end = build_report_data(seen[-1])
    assert (end.state, end.steps, end.samples, end.every_sample_once) == ("done", 8, 64, True)
    assert [point.step for point in end.loss_curve] == list(range(8))
    assert end.summary["weights_sha256"]


def test_before_a_run_has_begun_it_is_waited_for() -> None:
    found = build_report_data(StoreView("to come", RealClock()).read())
    assert (found.name, found.state) == ("to come", "waiting")


def test_the_page_names_the_leader_and_the_layers_of_each_node() -> None:
    seen = [contents for contents in watched() if contents.steps and contents.live]
    rows = [row for contents in seen for row in contents.current["assignments"]]
    held = {(row["slot"], row["layers"]) for row in rows}
    assert held == {("0.0", "0-1"), ("0.1", "2-3"), ("1.0", "0-1"), ("1.1", "2-3")}
    assert {row["node"] for row in rows if row["more"].startswith("leads")} == {0}
    assert "Roles of the nodes" in layout_run(build_report_data(seen[-1])).data.decode()


def test_a_node_with_several_workers_has_one_row_with_all_of_its_slots() -> None:
    seen: list[RunContents] = []
    setup = cached_setup(JOB, pipelines=2, stages=2, workers_per_node=2)
    run_prepared(JOB, setup, script=watching(seen), cost=lambda *_: 0.01)
    rows = next(contents.current["assignments"] for contents in seen if contents.steps and contents.live)
    assert [(row["node"], row["slot"], row["layers"]) for row in rows] == [
        (0, "0.0, 0.1", "0-1 | 2-3"),
        (1, "1.0, 1.1", "0-1 | 2-3"),
    ]


def test_a_run_that_fails_says_why() -> None:
    seen: list[RunContents] = []
    described = job(layers=layers(2, 5, boom))
    with pytest.raises(CulmError):
        run_prepared(described, cached_setup(described, stages=2, strategy="none"), script=watching(seen))
    assert build_report_data(seen[-1]).state == "failed"
    assert "boom" in build_report_data(seen[-1]).why_state


def test_events_that_a_new_watch_repeats_are_delivered_once() -> None:
    """A session that was lost begins anew with all that is there."""

    async def script(cluster: Cluster) -> None:
        heard = StoreView("twice", cluster.clock)
        end = cluster.store.listen("", lambda change: heard.handle_change(*change))
        steps = cluster.store.subscribe("step")
        for _ in range(4):
            await steps.get()
        end()
        before = heard.read()
        cluster.store.listen("", lambda change: heard.handle_change(*change))
        assert heard.read().events == before.events
        assert heard.read().steps == before.steps
        checked.append(True)

    checked: list[bool] = []
    run_prepared(JOB, cached_setup(JOB, pipelines=2, stages=2), script=script, cost=lambda *_: 0.01)
    assert checked


def test_of_a_very_long_run_two_steps_become_one_and_no_sample_is_lost() -> None:
    steps = [StepMetrics(n, float(n), 1.0, 8, eval_loss=0.5 if n == 2 else None) for n in range(7)]
    few = merge_step_pairs(steps)
    assert [step.step for step in few] == [1, 3, 5, 6]
    assert sum(step.samples for step in few) == 56
    assert few[1].eval_loss == 0.5


@pytest.mark.real
def test_a_process_with_the_secret_can_observe_a_run_through_its_etcd(tmp_path: Path) -> None:
    setup = encode(cached_setup(JOB, pipelines=2, stages=2))
    with etcd_with(tmp_path / "etcd") as url:
        asyncio.run(asyncio.wait_for(_heard_through(url, setup), PATIENCE_S))


async def _heard_through(url: str, setup: bytes) -> None:
    access, said = parse_etcd_access(url), list[str]()
    async with open_job_in_etcd(access, "napping", 5.0, SECRET) as (store, place):
        with pytest.raises(UsageError, match="CULM_SECRET is not the secret of this job"):
            async with watch_run_store(msgspec.structs.replace(place, secret=SECRET + b"!"), said.append):
                raise AssertionError
        await store.put("setup", setup)
        async with watch_run_store(place, said.append) as heard:
            assert build_report_data(heard.read()).state in ("waiting", "running")
            await store.put("nodes/0", encode(NodeRecord(0, "10.0.0.1:5", ("10.0.0.1:6",), "cpu", zone="b")))
            await store.put("nodes/1", encode(NodeRecord(1, "10.0.0.2:5", ("10.0.0.2:6",), "cpu", leaves_in_s=20.0)))
            while build_report_data(heard.read()).nodes_present < 2:
                await asyncio.sleep(0.01)
            await store.delete("nodes/1")
            while (found := build_report_data(heard.read())).nodes_present > 1:
                await asyncio.sleep(0.01)
    assert (found.state, found.steps_requested, found.preemptions) == ("running", 8, 1)
    assert [stay.end_reason for stay in found.node_presences if stay.notices] == ["left"]
    assert said == []
