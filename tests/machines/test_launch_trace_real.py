"""`culm launch --on trace`: a market trace decides which machines of another provider are there, and until when."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.machines.launched_jobs import launched_job

pytestmark = [pytest.mark.real, pytest.mark.waits(28), pytest.mark.usefixtures("forked_programs")]
TRACE = """t_s,kind,node,zone
0,add,a,east
0,add,b,west
1000,remove,b,west
1040,add,c,west
100000,remove,a,east
"""


def test_machines_come_and_go_with_the_trace_and_the_weights_are_those_of_a_failure_free_run(tmp_path: Path) -> None:
    (tmp_path / "market.csv").write_text(TRACE)
    options = ["--on", "trace", "--option", f"trace={tmp_path / 'market.csv'}", "--option", "speedup=40"]
    options += ["--option", "notice=3", "--grace", "3", "--nodes", "2", "--pipelines", "2", "--suspect-after", "2"]
    with launched_job(tmp_path, *options, "--address", "127.0.0.1") as launched:
        launched.wait_for("machine machine-2 will be taken away")
        launched.wait_for("node 2 runs layers")
        launched.wait_for_steps(3)
        summary = launched.finish()
        assert summary["state_sha256"] == launched.expected_sha256()
        assert summary["samples_lost"] == summary["samples_duplicated"] == 0
    assert launched.processes() == []
    assert list((launched.home / "launches").iterdir()) == []


LATE = """t_s,kind,node,zone
0,add,a,east
400,add,b,west
100000,remove,a,east
"""


def test_a_run_begins_with_the_machine_that_is_there_and_grows_when_another_comes(tmp_path: Path) -> None:
    (tmp_path / "market.csv").write_text(LATE)
    options = ["--on", "trace", "--option", f"trace={tmp_path / 'market.csv'}", "--option", "speedup=40"]
    options += ["--nodes", "2", "--pipelines", "2", "--start-after", "1", "--suspect-after", "2"]
    with launched_job(tmp_path, *options, "--address", "127.0.0.1") as launched:
        launched.wait_for("the run begins, because 1 of 2 nodes have joined within 1 s")
        launched.wait_for("node 1 runs layers 0-1 in slot 1.0; every slot is filled")
        launched.wait_for_steps(3)
        summary = launched.finish()
        assert summary["state_sha256"] == launched.expected_sha256()
        first = launched.wait_for_event("epoch", number=1)
        assert (first["members"], first["why"].partition(":")[0]) == ([0], "1 of 2 nodes have joined within 1 s")
    assert launched.processes() == []
