"""culm doctor: what is wrong with a machine is said with what to do about it, and what can be tried is tried."""

from __future__ import annotations

import json

import pytest

from culm.cli.doctor import Finding, cores, extras, library, open_files, room, system

from .command import culm


@pytest.mark.parametrize(
    ("found", "state", "fix"),
    [
        (system("Linux", (3, 12)), "good", ""),
        (system("Linux", (3, 15)), "weak", "3.11 to 3.13"),
        (system("Darwin", (3, 12)), "broken", "Linux"),
        (library("torch", "2.13.0+cpu", "torch<2.14,>=2.11"), "good", ""),
        (library("torch", "2.11.0a1", "torch<2.14,>=2.11"), "good", ""),
        (library("torch", "2.14.0", "torch<2.14,>=2.11"), "broken", "pip install 'torch<2.14,>=2.11'"),
        (library("torch", "2.9.1", "torch<2.14,>=2.11"), "broken", "pip install 'torch<2.14,>=2.11'"),
        (library("torch", None, "torch<2.14,>=2.11"), "broken", "pip install 'torch<2.14,>=2.11'"),
        (cores(16, 1 << 37), "good", ""),
        (cores(1, 1 << 30), "weak", "one core"),
        (open_files(256), "weak", "ulimit -n 1024"),
        (open_files(-1), "good", ""),
        (room("/tmp", 1 << 40), "good", ""),
        (room("/tmp", 1 << 20), "weak", "TMPDIR"),
        (extras({"ray": True, "gnn": False}), "good", "pip install 'culm[gnn]'"),
    ],
)
def test_what_is_found_says_how_it_is_and_what_to_do(found: Finding, state: str, fix: str) -> None:
    assert found.state == state
    assert fix in found.fix
    assert bool(found.fix) == bool(fix)


@pytest.mark.real
@pytest.mark.usefixtures("forked")
def test_a_machine_that_can_run_the_tests_is_fit_but_for_an_etcd_that_is_not_there() -> None:
    done = culm("doctor", "--json", "--etcd", "http://127.0.0.1:1")
    told = json.loads(done.stdout)
    by_name = {finding["name"]: finding for finding in told["findings"]}
    assert by_name.pop("your etcd")["state"] == "broken"
    assert not [finding for finding in by_name.values() if finding["state"] == "broken"], told
    assert (
        "one of two nodes was lost to SIGKILL, and what was learned is what one process learns"
        in by_name["a run"]["what"]
    )
    assert (done.returncode, told["fit"]) == (1, False)
    assert "NOT fit for culm" in done.stderr
