"""`templates`, as in Oobleck: a loss discards the open step, and pipelines are rebuilt from the remaining nodes with
the layers and optimizer state of their peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.reshape_runs import events, job, members, reshaped

from culm.errors import UsageError
from culm.testing import Faults, SimulatedRun


def hurt(faults: Faults, **request: Any) -> SimulatedRun:
    return reshaped(faults=faults, **{"strategy": "templates", "pipelines": 2, "stages": 3, **request})


@pytest.mark.parametrize("victim", [0, 4])
def test_a_loss_rebuilds_unequal_pipelines_from_the_remaining_nodes(tmp_path: Path, victim: int) -> None:
    run = hurt(Faults().kill(victim, step=3, nth=4), out=str(tmp_path), described=job(micro_batches=6))
    (recovered,) = run.summary["recoveries"]
    assert [event["layout"] for event in events(tmp_path, "reshaped")] == ["3+2"]
    assert (recovered["source"], recovered["lost"]) == ("peers", [victim])
    assert recovered["redone_actions"] > 0, "what was begun of the step was given up"


def test_a_step_with_updated_weights_is_completed_first() -> None:
    """An optimizer step cannot be undone: the others complete it too, and then pipelines are rebuilt."""
    run = hurt(Faults().kill(1, at="1S+", step=3))
    assert len(members(run)) == 3


def test_losses_one_after_the_other() -> None:
    run = hurt(Faults().kill(1, step=1, nth=5).kill(5, step=3, nth=4).kill(2, step=5, nth=3))
    assert sorted(members(run)[-1].replace("-", "").split()) == ["0", "3", "4"]


def test_a_joining_node_makes_the_pipelines_longer_again() -> None:
    run = hurt(Faults().kill(1, step=1, nth=5).join(0, step=2), described=job(steps=11, micro_batches=6))
    assert sorted(members(run)[-1].replace("-", "").split()) == ["0", "2", "3", "4", "5", "6"]


def test_two_losses_at_once() -> None:
    run = hurt(Faults().kill((0, 4), step=3, nth=5), described=job(("clip", "tied", "batch norm")))
    assert sorted(members(run)[-1].replace("-", "").split()) == ["1", "2", "3", "5"]


@pytest.mark.parametrize("moment", ["adopt", "layers_received"])
def test_a_further_loss_while_layers_are_in_transfer(moment: str) -> None:
    faults = Faults().kill(0, step=3, nth=5).kill(4, at=moment, nth=2 if moment == "adopt" else 1)
    assert hurt(faults).summary["preemptions"] == 2


def test_without_a_holder_all_nodes_restart_from_the_checkpoint(tmp_path: Path) -> None:
    run = hurt(Faults().kill((1, 4), step=5, nth=3), checkpoint_every=1, out=str(tmp_path))
    assert [recovered["source"] for recovered in run.summary["recoveries"]] == ["checkpoint"]


def test_templates_need_two_pipelines() -> None:
    with pytest.raises(UsageError, match="--strategy templates needs peers, and there is 1 pipeline"):
        hurt(Faults(), pipelines=1)
