"""Summary: the keys of summary.json as typed fields."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from tests.tiny_jobs import job

from culm.cluster.leader.recovery_record import RecoveryRecord
from culm.errors import UsageError
from culm.summary import SUMMARY_KEYS, RecoveryFields, Summary
from culm.testing import Faults, simulate

TRACE_KEYS = {"capacity_share", "ideal_goodput", "of_ideal"}
"""Only runs on a market trace have them."""


def make_summary(**changes: Any) -> Summary:
    fields: dict[str, Any] = {
        "steps": 1, "samples": 8, "samples_expected": 8, "samples_lost": 0, "samples_duplicated": 0, "wall_s": 1.0,
        "goodput": 8.0, "strategy": "none", "pipelines": 1, "stages": 1, "schedule": "1f1b", "exact": False,
        "final_loss": 0.5, "weights_sha256": "", "state_sha256": "", "preemptions": 0, "recoveries": [],
        "cost_usd": 0.0, "checkpoints": [],
    }  # fmt: skip
    return Summary(**(fields | changes))


def test_a_run_produces_exactly_these_keys() -> None:
    run = simulate(job(), pipelines=2, stages=2, strategy="reroute", faults=Faults().kill(node=1, step=1))
    assert set(run.summary) == SUMMARY_KEYS - TRACE_KEYS
    summary = Summary.from_fields(run.summary)
    assert summary.extra == {}
    assert summary.config["strategy"] == "reroute"
    assert summary.preemptions == 1
    assert set(summary.recoveries[0]) == set(get_type_hints(RecoveryFields)) == set(RecoveryRecord.__struct_fields__)


def test_keys_of_a_later_version_are_kept() -> None:
    fields = {name: value for name, value in vars(make_summary()).items() if name in SUMMARY_KEYS}
    summary = Summary.from_fields({**fields, "evaluations": {"3": 0.5}, "later_key": 7}, "runs/a")
    assert summary.extra == {"later_key": 7}
    assert summary.evaluations == {3: 0.5}
    assert summary.out == "runs/a"


def test_a_run_without_a_folder_has_no_weights() -> None:
    with pytest.raises(UsageError, match="train with out='runs/a'"):
        make_summary().weights()
