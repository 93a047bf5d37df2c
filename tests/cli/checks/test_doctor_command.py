"""culm doctor: what is wrong with a machine is said with what to do about it, and what can be tried is tried."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from tests.cli.cli_process import culm

from culm import training
from culm.errors import RunError
from culm.machine_checks import machine_check
from culm.machine_checks.check_result import CheckResult
from culm.machine_checks.machine_check import (
    _run_with_kill,
    check_cores,
    check_extras,
    check_free_space,
    check_library,
    check_open_files,
    check_system,
)
from culm.runtime.compute import device


@pytest.mark.parametrize(
    ("found", "state", "fix"),
    [
        (check_system("Linux", (3, 12)), "good", ""),
        (check_system("Linux", (3, 15)), "weak", "3.11 to 3.13"),
        (check_system("Darwin", (3, 12)), "broken", "Linux"),
        (check_library("torch", "2.13.0+cpu", "torch<2.14,>=2.11"), "good", ""),
        (check_library("torch", "2.11.0a1", "torch<2.14,>=2.11"), "good", ""),
        (check_library("torch", "2.14.0", "torch<2.14,>=2.11"), "broken", "pip install 'torch<2.14,>=2.11'"),
        (check_library("torch", "2.9.1", "torch<2.14,>=2.11"), "broken", "pip install 'torch<2.14,>=2.11'"),
        (check_library("torch", None, "torch<2.14,>=2.11"), "broken", "pip install 'torch<2.14,>=2.11'"),
        (check_cores(16, 1 << 37), "good", ""),
        (check_cores(1, 1 << 30), "weak", "one core"),
        (check_open_files(256), "weak", "ulimit -n 1024"),
        (check_open_files(-1), "good", ""),
        (check_free_space("/tmp", 1 << 40), "good", ""),
        (check_free_space("/tmp", 1 << 20), "weak", "TMPDIR"),
        (check_extras({"ray": True, "gnn": False}), "good", "pip install 'culm[gnn]'"),
    ],
)
def test_what_is_found_says_how_it_is_and_what_to_do(found: CheckResult, state: str, fix: str) -> None:
    assert found.state == state
    assert fix in found.fix
    assert bool(found.fix) == bool(fix)


@pytest.mark.real
@pytest.mark.usefixtures("forked_programs")
def test_a_machine_that_can_run_the_tests_is_fit_but_for_an_etcd_that_is_not_there() -> None:
    done = culm("doctor", "--json", "--etcd", "http://127.0.0.1:1")
    told = json.loads(done.stdout)
    by_name = {finding["name"]: finding for finding in told["findings"]}
    assert by_name.pop("your etcd")["state"] == "broken"
    assert not [finding for finding in by_name.values() if finding["state"] == "broken"], told
    assert "one of two nodes was killed, and the weights equal those of a single process" in by_name["a run"]["what"]
    assert (done.returncode, told["fit"]) == (1, False)
    assert "this machine can NOT run culm" in done.stderr


@pytest.mark.parametrize("same", [True, False])
def test_on_a_gpu_a_run_with_a_loss_is_compared_with_a_failure_free_one(
    same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single process computes on the CPU, whose kernels have other bits."""
    runs: list[tuple[str, ...]] = []

    def train(job: object, *, kills: tuple[str, ...], **options: object) -> SimpleNamespace:
        runs.append(kills)
        return SimpleNamespace(preemptions=len(kills), weights_sha256="same" if same else f"{len(runs)}")

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(device, "select_device", lambda job: torch.device("cuda"))
    monkeypatch.setattr(device, "fingerprint", lambda job: "an H200")
    if same:
        assert "equal those of a failure-free run" in _run_with_kill()
    else:
        with pytest.raises(RunError, match="differ from those of a failure-free run"):
            _run_with_kill()
    assert list(map(bool, runs)) == [True, False]


def test_culm_may_run_from_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(machine_check, "requires", not_installed)
    assert machine_check._requirement("torch") == "torch"
    assert check_library("torch", "2.11.0", "torch").state == "good"
