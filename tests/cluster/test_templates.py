"""`templates`, as Oobleck does it: a loss costs the open step, and pipelines are made anew out of those that are left,
with the layers of their peers and all that the optimizer knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from culm.errors import UsageError
from culm.testing import Faults, Simulated

from .reshaping import events, job, members, reshaped


def hurt(faults: Faults, **request: Any) -> Simulated:
    return reshaped(faults=faults, **{"strategy": "templates", "pipelines": 2, "stages": 3, **request})


@pytest.mark.parametrize("victim", [0, 4])
def test_a_loss_makes_unequal_pipelines_of_those_that_are_left(tmp_path: Path, victim: int) -> None:
    run = hurt(Faults().kill(victim, step=3, nth=4), out=str(tmp_path), described=job(micro_batches=6))
    (recovered,) = run.summary["recoveries"]
    assert [event["layout"] for event in events(tmp_path, "reshaped")] == ["3+2"]
    assert (recovered["source"], recovered["lost"]) == ("peers", [victim])
    assert recovered["redone_actions"] > 0, "what was begun of the step was given up"


def test_a_step_that_somebody_has_made_is_completed_first() -> None:
    """Nobody can go back behind an optimizer step: the others make it, too, and then pipelines are made anew."""
    run = hurt(Faults().kill(1, at="1S+", step=3))
    assert len(members(run)) == 3


def test_losses_one_after_the_other() -> None:
    run = hurt(Faults().kill(1, step=1, nth=5).kill(5, step=3, nth=4).kill(2, step=5, nth=3))
    assert sorted(members(run)[-1].replace("-", "").split()) == ["0", "3", "4"]


def test_a_newcomer_makes_the_pipelines_longer_again() -> None:
    run = hurt(Faults().kill(1, step=1, nth=5).join(0, step=2), described=job(steps=11, micro_batches=6))
    assert sorted(members(run)[-1].replace("-", "").split()) == ["0", "2", "3", "4", "5", "6"]


def test_two_losses_at_once() -> None:
    run = hurt(Faults().kill((0, 4), step=3, nth=5), described=job(("clip", "tied", "batch norm")))
    assert sorted(members(run)[-1].replace("-", "").split()) == ["1", "2", "3", "5"]


@pytest.mark.parametrize("moment", ["adopt", "moved"])
def test_a_further_loss_while_layers_are_on_their_way(moment: str) -> None:
    faults = Faults().kill(0, step=3, nth=5).kill(4, at=moment, nth=2 if moment == "adopt" else 1)
    assert hurt(faults).summary["preemptions"] == 2


def test_where_a_layer_has_no_holder_left_everyone_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    run = hurt(Faults().kill((1, 4), step=5, nth=3), checkpoint_every=1, out=str(tmp_path))
    assert [recovered["source"] for recovered in run.summary["recoveries"]] == ["checkpoint"]


def test_one_pipeline_has_no_peers() -> None:
    with pytest.raises(UsageError, match="--strategy templates needs peers, and there is 1 pipeline"):
        hurt(Faults(), pipelines=1)
