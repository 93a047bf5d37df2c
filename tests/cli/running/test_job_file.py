"""A job file is imported as what it is: part of its package, or a file alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.cli_process import culm

from culm.cluster.job_identity import job_identity
from culm.errors import JobError
from culm.job import load_job

LAYERS = """
from torch import nn

class Block(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
"""
JOB = """
import torch
from torch import nn
import culm
from {layers} import Block

def job():
    return culm.Job(
        layers=[Block, Block],
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=[(torch.ones(4), torch.zeros(4))] * 8,
        global_batch=4, micro_batch=2, steps=2,
    )
"""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """What a test imports is forgotten after it."""
    path = sys.path[:]
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.split(".")[0] in ("outer", "layers", "culm_job_job")]:
        del sys.modules[name]


def package(folder: Path, name: str, layers: str) -> str:
    """outer.name with a job, and the layers beside and above it."""
    inner = folder / "outer" / name
    inner.mkdir(parents=True)
    for home in (inner, inner.parent):
        (home / "__init__.py").touch()
        (home / "layers.py").write_text(LAYERS)
    (inner / "job.py").write_text(JOB.format(layers=layers))
    return f"{inner / 'job.py'}:job"


@pytest.mark.parametrize("layers", [".layers", "..layers", "outer.inner.layers", "layers"])
def test_a_job_in_a_package_may_import_modules_beside_and_above_it(tmp_path: Path, layers: str) -> None:
    job = load_job(package(tmp_path, "inner", layers))
    assert getattr(job.layers[0], "__name__", "") == "Block"
    assert job.loss is not None
    assert "outer.inner.job" in sys.modules


def test_nodes_agree_on_all_that_the_job_imported_from_its_package(tmp_path: Path) -> None:
    reference = package(tmp_path, "inner", "..layers")
    found = job_identity(load_job(reference), reference)
    files = {"file job.py", "file __init__.py", "file ../__init__.py", "file ../layers.py"}
    assert {name for name in found if name.startswith("file ")} == files


def test_a_job_whose_package_has_a_name_that_is_taken_is_imported_alone(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").touch()
    (tmp_path / "json" / "layers.py").write_text(LAYERS)
    file = tmp_path / "json" / "job.py"
    file.write_text(JOB.format(layers="layers"))
    assert len(load_job(str(file)).layers) == 2
    assert json.loads("1") == 1


def test_a_package_that_cannot_be_imported_is_reported_in_one_sentence(tmp_path: Path) -> None:
    reference = package(tmp_path, "inner", ".layers")
    (tmp_path / "outer" / "__init__.py").write_text("import no_such_module\n")
    with pytest.raises(JobError, match=r"job\.py could not be imported: ModuleNotFoundError: No module named 'no_such"):
        load_job(reference)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_a_job_in_a_package_runs_on_real_nodes(tmp_path: Path) -> None:
    ended = culm("run", package(tmp_path, "inner", "..layers"), "--stages", "2", "--quiet", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["steps"] == 2
