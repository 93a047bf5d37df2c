"""Job.init: a file, a folder, a URL, a model in the cache of Hugging Face; and errors with the closest matches."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save, save_file
from tests import tiny_jobs

from culm.errors import JobError
from culm.runtime.compute.initial_weights import InitialWeights
from culm.runtime.compute.model_check import check_model
from culm.testing import reference

TENSORS = {
    f"{layer}.{name}": torch.randn(4, *more) for layer in range(4) for name, more in [("weight", [4]), ("bias", [])]
}
HALVES = {f"model-{n:05d}-of-00002.safetensors": dict(list(TENSORS.items())[4 * n - 4 : 4 * n]) for n in (1, 2)}


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, tensors in HALVES.items():
        save_file(tensors, folder / name)
    return folder


def starts_from(init: str) -> None:
    job = tiny_jobs.job(init=init, steps=0)
    check_model(job)
    found = reference(job).snapshot.parameters
    assert all(torch.equal(found[name], value) for name, value in TENSORS.items())


def test_a_folder_of_files_with_and_without_an_index(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    starts_from(str(folder))
    save_file({"0.weight": torch.zeros(1)}, folder / "zzz-other.safetensors")
    names = {name: file for file, tensors in HALVES.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    starts_from(str(folder))


def test_a_url_of_a_file_or_a_folder_of_which_a_node_reads_its_own_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    for name, tensors in HALVES.items():
        fsspec.filesystem("memory").pipe_file(f"{root}/{name}", save(tensors))
    fsspec.filesystem("memory").pipe_file(f"{root}-one/model.safetensors", save(TENSORS))
    starts_from(root)
    starts_from(f"{root}-one/model.safetensors")
    read: list[int] = []
    weights = InitialWeights(root)
    original = weights._storage.read_range

    def read_range(name: str, begin: int, end: int) -> bytes:
        read.append(end - begin)
        return original(name, begin, end)

    monkeypatch.setattr(weights._storage, "read_range", read_range)
    assert set(weights.read(["2.weight"], {})) == {"2.weight"}
    assert read == [64]


def test_a_model_in_the_cache_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--name"
    write_folder(folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    starts_from("org/name")
    starts_from(str(folder))


def test_types_and_empty_tensors_are_read_as_they_are(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros(0, 2), "c": torch.tensor(True)}
    save_file(tensors, tmp_path / "a.safetensors")
    found = InitialWeights(str(tmp_path / "a.safetensors")).read(tensors, {})
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in tensors.items())


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("modle", r"no such file or folder on this machine: did you mean '.*/model'\?"),
        ("model/model-00001-of-0002.safetensors", r"did you mean '.*model-00001-of-00002.safetensors'"),
        ("mdoel/model-00001-of-00002.safetensors", r"did you mean '.*/model'"),
        ("empty", r"has no .safetensors file \(it is empty or not there\).*culm export"),
        ("broken.safetensors", "cannot be read as safetensors: broken.safetensors"),
        ("cut.safetensors", "cannot be read as safetensors: cut.safetensors: ValueError: its end is missing"),
    ],
)
def test_a_wrong_place_is_refused_with_what_is_close_to_it(init: str, message: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"nothing of the kind")
    (tmp_path / "cut.safetensors").write_bytes(save(TENSORS)[:-1])
    with pytest.raises(JobError, match=message):
        check_model(tiny_jobs.job(init=str(tmp_path / init)))


def test_a_url_with_nothing_there_is_refused() -> None:
    described: dict[str, Any] = {"init": f"memory://{uuid.uuid4().hex}/model.safetensors"}
    with pytest.raises(JobError, match=r"Job.init is 'memory://.*could not read .*it does not exist"):
        check_model(tiny_jobs.job(**described))
