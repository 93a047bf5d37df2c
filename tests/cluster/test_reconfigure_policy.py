"""When the shape changes by itself: by what it gains until the next loss is due, by Bamboo's rule, or never."""

from __future__ import annotations

from pathlib import Path

import pytest

from culm.errors import UsageError
from culm.testing import Faults

from .reshaping import events, job, members, reshaped

LONG = job(steps=11, micro_batches=6)
TWO_MORE = Faults().join(0, step=1, count=2)


def test_nodes_without_a_slot_are_taken_in_when_that_gains_more_than_it_costs(tmp_path: Path) -> None:
    run = reshaped(described=LONG, pipelines=2, stages=2, faults=TWO_MORE, out=str(tmp_path))
    assert sorted(members(run)[-1].split()) == ["0", "1", "2", "3", "4", "5"]
    (decision,) = events(tmp_path, "decision")
    assert decision["verdict"] in ("grow", "depth", "uneven")
    assert "until the next loss is due, against" in decision["why"]


def test_a_hole_that_nobody_fills_is_closed_and_nobody_idles(tmp_path: Path) -> None:
    run = reshaped(described=LONG, pipelines=2, stages=3, faults=Faults().kill(1, step=1, nth=2), out=str(tmp_path))
    assert len(events(tmp_path, "reshaped")) == 1
    assert sorted(members(run)[-1].replace("-", "").split()) == ["0", "2", "3", "4", "5"]


def test_a_node_that_gains_nothing_waits(tmp_path: Path) -> None:
    run = reshaped(described=LONG, pipelines=2, stages=2, faults=Faults().join(0, step=1), out=str(tmp_path))
    assert [event["verdict"] for event in events(tmp_path, "decision")] == ["stay"]
    assert members(run) == ["0 1 2 3"]


def test_by_the_rule_of_bamboo_a_further_pipeline_is_made_as_soon_as_it_fits(tmp_path: Path) -> None:
    run = reshaped(described=LONG, pipelines=2, stages=2, faults=TWO_MORE, reconfigure="bamboo", out=str(tmp_path))
    (decision,) = events(tmp_path, "decision")
    assert (decision["layout"], decision["why"]) == ("3 x 2", "a further pipeline fits: 3")
    assert len(members(run)) == 2


def test_never_is_never() -> None:
    run = reshaped(described=LONG, pipelines=2, stages=2, faults=TWO_MORE, reconfigure="never")
    assert members(run) == ["0 1 2 3"]


def test_holes_are_filled_all_the_same() -> None:
    faults = Faults().kill(1, step=1, nth=3).join(0, step=3)
    run = reshaped(pipelines=2, stages=2, faults=faults, reconfigure="never")
    assert members(run)[-1] == "0 4 2 3"


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no --reconfigure 'costs': did you mean cost\?"):
        reshaped(pipelines=2, stages=2, reconfigure="costs")
