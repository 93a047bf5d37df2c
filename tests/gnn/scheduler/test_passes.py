"""The passes of a run."""

from __future__ import annotations

from culm.gnn.scheduler.passes import Pass, list_passes


def test_evaluations_follow_every_n_epochs_and_the_last() -> None:
    assert list_passes(3, 2) == (
        Pass(0, 0, True),
        Pass(1, 1, True),
        Pass(2, 1, False),
        Pass(3, 2, True),
        Pass(4, 2, False),
    )
    assert [p.newest_version for p in list_passes(3, 2)] == [0, 1, 2, 2, 3]
