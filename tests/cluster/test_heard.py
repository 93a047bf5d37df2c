"""What the store of a run tells whoever watches from outside, read and never written."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.known import ready

from culm.cluster.etcd import parse_access
from culm.cluster.setup import NodeRecord, encode
from culm.cluster.store import Change
from culm.errors import CulmError, UsageError
from culm.observe.facts import facts
from culm.observe.reading import Contents, Step
from culm.observe.view import of_run
from culm.providers.heard import Heard, halved, listening
from culm.providers.stores import in_etcd
from culm.runtime.clock import RealClock
from culm.testing import Cluster, Faults
from culm.testing.cluster import NO_FAULTS, Script, enact

from .etcds import etcd_with
from .jobs import boom, job, layers

JOB = job(steps=8)
SECRET = b"a secret of the test"
PATIENCE_S = 60.0


def watching(seen: list[Contents]) -> Script:
    """Notes what is to be seen after each change of the store."""

    async def script(cluster: Cluster) -> None:
        heard = Heard("watched", cluster.clock)

        def hear(change: Change) -> None:
            heard.hear(*change)
            seen.append(heard.look())

        cluster.store.listen("", hear)

    return script


def watched(faults: Faults = NO_FAULTS) -> list[Contents]:
    seen: list[Contents] = []
    enact(JOB, ready(JOB, pipelines=2, stages=2), faults=faults, script=watching(seen), cost=lambda *_: 0.01)
    return seen


def test_a_run_is_followed_from_its_first_node_to_its_result() -> None:
    seen = watched(faults=Faults().kill(node=3, step=3))
    going = [facts(contents) for contents in seen if contents.live and contents.steps]
    assert all(found.state == "running" and found.once is not False for found in going)
    assert [found.steps for found in going] == sorted(found.steps for found in going)
    assert any(found.there == 4 for found in going)
    assert any(found.there == 3 and found.preemptions == 1 and found.recoveries for found in going)
    end = facts(seen[-1])
    assert (end.state, end.steps, end.samples, end.once) == ("done", 8, 64, True)
    assert [point.step for point in end.losses] == list(range(8))
    assert end.summary["weights_sha256"]


def test_before_a_run_has_begun_it_is_waited_for() -> None:
    found = facts(Heard("to come", RealClock()).look())
    assert (found.name, found.state) == ("to come", "waiting")


def test_it_says_who_leads_and_who_has_which_layers() -> None:
    seen = [contents for contents in watched() if contents.steps and contents.live]
    rows = [row for contents in seen for row in contents.now["posts"]]
    held = {(row["slot"], row["layers"]) for row in rows}
    assert held == {("0.0", "0-1"), ("0.1", "2-3"), ("1.0", "0-1"), ("1.1", "2-3")}
    assert {row["node"] for row in rows if row["more"].startswith("leads")} == {0}
    assert "Who does what" in of_run(facts(seen[-1])).data.decode()


def test_a_run_that_fails_says_why() -> None:
    seen: list[Contents] = []
    described = job(layers=layers(2, 5, boom))
    with pytest.raises(CulmError):
        enact(described, ready(described, stages=2, strategy="none"), script=watching(seen))
    assert facts(seen[-1]).state == "failed"
    assert "boom" in facts(seen[-1]).why_state


def test_what_is_told_again_by_a_new_watch_is_not_told_twice() -> None:
    """A session that was lost begins anew with all that is there."""

    async def script(cluster: Cluster) -> None:
        heard = Heard("twice", cluster.clock)
        end = cluster.store.listen("", lambda change: heard.hear(*change))
        steps = cluster.store.subscribe("step")
        for _ in range(4):
            await steps.get()
        end()
        before = heard.look()
        cluster.store.listen("", lambda change: heard.hear(*change))
        assert heard.look().events == before.events
        assert heard.look().steps == before.steps
        checked.append(True)

    checked: list[bool] = []
    enact(JOB, ready(JOB, pipelines=2, stages=2), script=script, cost=lambda *_: 0.01)
    assert checked


def test_of_a_very_long_run_two_steps_become_one_and_no_sample_is_lost() -> None:
    steps = [Step(n, float(n), 1.0, 8, eval_loss=0.5 if n == 2 else None) for n in range(7)]
    few = halved(steps)
    assert [step.step for step in few] == [1, 3, 5, 6]
    assert sum(step.samples for step in few) == 56
    assert few[1].eval_loss == 0.5


@pytest.mark.real
def test_a_run_elsewhere_is_heard_of_through_its_etcd_by_who_knows_the_secret(tmp_path: Path) -> None:
    setup = encode(ready(JOB, pipelines=2, stages=2))
    with etcd_with(tmp_path / "etcd") as url:
        asyncio.run(asyncio.wait_for(_heard_through(url, setup), PATIENCE_S))


async def _heard_through(url: str, setup: bytes) -> None:
    access, said = parse_access(url), list[str]()
    async with in_etcd(access, "napping", 5.0, SECRET) as (store, place):
        with pytest.raises(UsageError, match="CULM_SECRET is not the secret of this job"):
            async with listening(msgspec.structs.replace(place, secret=SECRET + b"!"), said.append):
                raise AssertionError
        await store.put("setup", setup)
        async with listening(place, said.append) as heard:
            assert facts(heard.look()).state in ("waiting", "running")
            await store.put("nodes/0", encode(NodeRecord(0, "10.0.0.1:5", "10.0.0.1:6", "cpu", zone="b")))
            await store.put("nodes/1", encode(NodeRecord(1, "10.0.0.2:5", "10.0.0.2:6", "cpu", leaves_in=20.0)))
            while facts(heard.look()).there < 2:
                await asyncio.sleep(0.01)
            await store.delete("nodes/1")
            while (found := facts(heard.look())).there > 1:
                await asyncio.sleep(0.01)
    assert (found.state, found.asked, found.preemptions) == ("running", 8, 1)
    assert [stay.how for stay in found.stays if stay.notices] == ["left"]
    assert said == []
