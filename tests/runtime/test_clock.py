"""The clock means the same on every machine of a run."""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_jobs import job

from culm.runtime import clock
from culm.testing import Faults, simulate


def machine(monkeypatch: pytest.MonkeyPatch, up_s: float) -> Callable[[], float]:
    """The clock of a machine that was started that many seconds ago."""
    monkeypatch.setattr(time, "monotonic", lambda: up_s)
    found: Callable[[], float] = runpy.run_path(str(clock.__file__))["real_now"]
    return found


def test_machines_that_were_started_on_different_days_agree_on_when_a_step_was_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers report when they were done. If that was counted from the start of their machine, a run would seem to take
    days."""
    with monkeypatch.context() as patch:
        here = machine(patch, up_s=60.0)()
    with monkeypatch.context() as patch:
        there = machine(patch, up_s=30 * 86400.0)()
    assert abs(there - here) < 3600


def test_setting_the_system_clock_changes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before = clock.real_now()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert clock.real_now() >= before


def test_time_continues_if_the_leader_is_lost_before_the_first_commit(tmp_path: Path) -> None:
    faults = Faults().kill(node=0, at="0F1", step=0)
    shape: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute", "cost": lambda *_: 0.01}
    simulate(job(), faults=faults, out=str(tmp_path), latency=0.001, **shape)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert "leader" in [event["kind"] for event in told]
    times = [event["t"] for event in told]
    assert times == sorted(times)


def test_only_a_clock_with_faults_has_to_be_told_of_actions() -> None:
    class NoFault:
        def on_action_done(self, node: int, step: int, action: str) -> None: ...

        def killed_at(self, node: int) -> None: ...

    assert not clock.RealClock().has_action_hooks
    assert clock.RealClock(NoFault()).has_action_hooks
