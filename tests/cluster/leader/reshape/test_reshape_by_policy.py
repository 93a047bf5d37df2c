"""Changes of shape by policy: by the gain until the next expected loss, by Bamboo's rule, or never."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.reshape_runs import events, job, members, reshaped

from culm.errors import UsageError
from culm.testing import Faults

LONG = job(steps=11, micro_batches=6)
TWO_MORE = Faults().join(0, step=1, count=2)


def test_waiting_nodes_get_slots_when_the_gain_exceeds_the_cost(tmp_path: Path) -> None:
    run = reshaped(described=LONG, pipelines=2, stages=2, faults=TWO_MORE, out=str(tmp_path))
    assert sorted(members(run)[-1].split()) == ["0", "1", "2", "3", "4", "5"]
    (decision,) = events(tmp_path, "decision")
    assert decision["verdict"] in ("grow", "depth", "uneven")
    assert "until the next expected loss, " in decision["why"]


def test_an_empty_slot_without_a_replacement_is_closed_by_reshaping(tmp_path: Path) -> None:
    run = reshaped(described=LONG, pipelines=2, stages=3, faults=Faults().kill(1, step=1, nth=2), out=str(tmp_path))
    assert len(events(tmp_path, "reshaped")) == 1
    assert sorted(members(run)[-1].replace("-", "").split()) == ["0", "2", "3", "4", "5"]


def test_a_node_without_a_gain_keeps_waiting(tmp_path: Path) -> None:
    run = reshaped(described=LONG, pipelines=2, stages=2, faults=Faults().join(0, step=1), out=str(tmp_path))
    assert [event["verdict"] for event in events(tmp_path, "decision")] == ["stay"]
    assert members(run) == ["0 1 2 3"]


def test_under_the_bamboo_rule_a_pipeline_is_added_as_soon_as_it_fits(tmp_path: Path) -> None:
    run = reshaped(described=LONG, pipelines=2, stages=2, faults=TWO_MORE, reconfigure="bamboo", out=str(tmp_path))
    (decision,) = events(tmp_path, "decision")
    assert (decision["layout"], decision["why"]) == ("3 x 2", "a further pipeline fits: 3")
    assert len(members(run)) == 2


def test_under_never_the_shape_stays() -> None:
    run = reshaped(described=LONG, pipelines=2, stages=2, faults=TWO_MORE, reconfigure="never")
    assert members(run) == ["0 1 2 3"]


def test_under_never_empty_slots_are_still_filled() -> None:
    faults = Faults().kill(1, step=1, nth=3).join(0, step=3)
    run = reshaped(pipelines=2, stages=2, faults=faults, reconfigure="never")
    assert members(run)[-1] == "0 4 2 3"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no --reconfigure 'costs': did you mean cost\?"):
        reshaped(pipelines=2, stages=2, reconfigure="costs")
