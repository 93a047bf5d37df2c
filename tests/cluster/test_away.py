"""Training through an outage of the store: steps are committed, and whoever leads next knows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.known import hurt

from culm import Job
from culm.cluster.minutes import Minutes
from culm.cluster.recovered import Recovered
from culm.cluster.store import MemoryStore
from culm.cluster.toll import Toll
from culm.runtime.clock import RealClock
from culm.testing import Faults, Simulated
from culm.testing.loop import run_virtual

from .jobs import job

TWELVE = job(steps=12, exact=True)
AWAY_S = 100.0


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def through(faults: Faults, out: Path, described: Job, **request: Any) -> Simulated:
    asked = {"pipelines": 2, "stages": 2, "strategy": "reroute", "out": str(out), **request}
    run = hurt(described, faults, cost=lambda *_: 0.01, **asked)
    assert [row["step"] for row in lines(out / "steps.jsonl")] == list(range(described.steps))
    return run


@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
def test_training_goes_on_while_the_store_is_out_of_reach(strategy: str, tmp_path: Path) -> None:
    away = Faults().outage(1, seconds=AWAY_S, step=2, nth=2)
    through(away, tmp_path, TWELVE, strategy=strategy)
    assert lines(tmp_path / "steps.jsonl")[-1]["t"] < AWAY_S
    kinds = [event["kind"] for event in lines(tmp_path / "events.jsonl")]
    assert kinds.count("store_away") == 1
    assert "lost" not in kinds
    assert "stalled" not in kinds


def test_when_the_store_is_back_nodes_come_and_go_again(tmp_path: Path) -> None:
    faults = Faults().outage(1, seconds=2.0, step=2, nth=2).kill(3, step=4)
    through(faults, tmp_path, job(steps=60, exact=True))
    events = lines(tmp_path / "events.jsonl")
    kinds = [event["kind"] for event in events if event["kind"] in ("store_away", "store_back", "lost", "recovered")]
    assert kinds == ["store_away", "lost", "recovered", "store_back"], "the commit after that finds it in reach"


@pytest.mark.parametrize("killed", [(0,), (0, 1)], ids=["the leader", "the leader and another"])
@pytest.mark.parametrize("at", ["0F1", "0W1", "commit"])
def test_who_leads_after_an_outage_hears_from_the_workers_what_was_committed_in_it(
    at: str, killed: tuple[int, ...], tmp_path: Path
) -> None:
    faults = Faults().outage(1, seconds=AWAY_S, step=2, nth=2).kill(killed, at=at, step=8)
    run = through(faults, tmp_path, TWELVE, schedule="zb")
    assert run.summary["preemptions"] == len(killed)
    assert run.summary["samples_duplicated"] == 0
    epochs = [event for event in lines(tmp_path / "events.jsonl") if event["kind"] == "epoch"]
    assert min(epochs[1]["open_steps"] or [epochs[1]["step"]]) >= 7, "what was committed in the outage stays so"


@pytest.mark.parametrize("at", ["standing", "adopt"])
def test_what_was_committed_in_an_outage_is_known_though_who_heard_of_it_is_lost_before_its_first_commit(
    at: str, tmp_path: Path
) -> None:
    faults = Faults().outage(1, seconds=AWAY_S, step=2, nth=2).kill(0, at="0F1", step=8)
    faults = faults.kill(1, at=at, nth={"standing": 1, "adopt": 2}[at])
    run = through(faults, tmp_path, TWELVE, schedule="zb")
    assert run.summary["preemptions"] == 2
    assert run.summary["samples_duplicated"] == 0


def test_what_is_owed_is_what_no_record_knows_to_have_been_made_good() -> None:
    """A record of the workers is newer than that of the store, but does not know who was missed since."""
    toll = Toll(RealClock())
    toll.inherit((), owed=(1,))
    toll.owed.add(0)
    toll.inherit((Recovered(3, (1,), 0.0, 0.0, 0.0, 0.0, 0, "peers"),), owed=())
    assert toll.owed == {0}


def test_of_several_records_that_wait_the_last_is_written_and_every_step() -> None:
    async def main() -> None:
        memory = MemoryStore()
        heard = memory.subscribe("")
        minutes = Minutes(memory.client("leader"), 1.0)
        for step in b"012":
            minutes.give("record", b"r%c" % step)
            minutes.give("step", b"s%c" % step, each=True)
        assert minutes.behind
        await minutes.written()
        assert [heard.get_nowait() for _ in range(heard.qsize())] == [
            ("step", b"s0"),
            ("step", b"s1"),
            ("record", b"r2"),
            ("step", b"s2"),
        ]

    run_virtual(main())
