"""`culm verify`: a run is retrained to the same bits; a tampered checkpoint and a changed job are found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.cli.cli_process import culm, one_sentence

from culm.checkpoint import CheckpointCatalog, Storage
from culm.cli import main
from culm.cluster.prepare_run import prepare_run
from culm.config import RunConfig
from culm.job import load_job
from culm.testing import Faults
from culm.testing.simulated_cluster import run_prepared
from culm.verify import recorded_run

JOB = str(Path(__file__).with_name("verified_job.py"))


def train(
    out: str | Path,
    *,
    described: str = JOB,
    faults: Faults | None = None,
    overrides: dict[str, str] | None = None,
    **config: Any,
) -> None:
    """A simulated run of six steps that records its job as `culm run` does. `described`: FILE[:function]."""
    overrides = {"exact": "true"} if overrides is None else overrides
    job = load_job(described, overrides)
    request: dict[str, Any] = {
        "pipelines": 2,
        "stages": 2,
        "checkpoint_every": 2,
        "keep_last": 3,
        "strategy": "reroute",
    } | config
    setup = prepare_run(job, RunConfig(out=str(out), **request))
    setup = msgspec.structs.replace(setup, name="verified_job.py", job_file=described, overrides=overrides)
    run_prepared(job, setup, faults=faults or Faults())


@pytest.fixture(scope="module")
def exact_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exact run that lost a node in step 3."""
    out = tmp_path_factory.mktemp("runs") / "a"
    train(out, faults=Faults().kill(node=1, step=3))
    return out


@pytest.fixture
def run(exact_run: Path, tmp_path: Path) -> Path:
    """A copy, to be tampered with."""
    return Path(shutil.copytree(exact_run, tmp_path / "run"))


def verify(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON, which must be all of stdout."""
    with pytest.raises(SystemExit) as end:
        main(["verify", *map(str, arguments), "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    assert isinstance(end.value.code, int)
    return end.value.code, json.loads(line)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The sentence of a request that ends with exit code 2, without what was said about progress."""
    with pytest.raises(SystemExit) as end:
        main(["verify", *map(str, arguments)])
    shown = capsys.readouterr()
    assert (end.value.code, shown.out) == (2, "")
    said = [line for line in shown.err.splitlines() if not line.startswith("importing torch")]
    return one_sentence("\n".join(said))


def verified(folder: Path) -> object:
    return json.loads((folder / "summary.json").read_text())["verified"]


def edit_events(folder: Path, **changes: Any) -> None:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    changed = [event | changes if event["kind"] == "run_started" else event for event in events]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in changed))


def tamper(folder: Path, step: int, tensor: str) -> None:
    """Change one bit of a tensor, and write shard and manifest again with correct checksums."""
    catalog = CheckpointCatalog(Storage(str(folder / "checkpoints")))
    manifest = catalog.check(step)
    with catalog.open(manifest) as reader:
        tensors = reader.load()
    bits = tensors[tensor].view(torch.int32).reshape(-1)
    bits[0] ^= 1
    receipt = catalog.write_shard(step, catalog.shard_name(step, "tampered"), tensors)
    catalog.commit(step, [receipt], manifest.scalars, manifest.facts, manifest.created)


def safetensors_names(path: Path) -> set[str]:
    data = path.read_bytes()
    return set(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))


def test_an_exact_run_through_a_kill_is_equal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads((run / "summary.json").read_text())["preemptions"] == 1
    assert verified(run) == 0
    code, found = verify(capsys, run)
    assert (code, found["equal"], found["steps"], found["first_difference"]) == (0, True, 4, None)
    assert found["checkpoints"] == [4, 6]
    assert verified(run) == 4
    code, found = verify(capsys, run, "--steps", "0:6")
    assert (code, found["steps"], found["checkpoints"]) == (0, 6, [2, 4, 6])
    verify(capsys, run, "--steps", "2:4")
    assert verified(run) == 6


def test_the_sentence_names_the_steps_and_progress_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["verify", str(run)])
    shown = capsys.readouterr()
    assert not end.value.code
    assert shown.out.startswith("equal: 4 steps retrained (2:6), weights and optimizer state of 4 layers are the same")
    assert "retraining steps 2:6 4/4" in shown.err


@pytest.mark.parametrize(
    ("tensor", "layer", "what"),
    [
        ("2.weight", 2, "weights"),
        ("0.1.running_mean", 0, "buffers"),
        ("optimizer.3.bias.exp_avg", 3, "optimizer"),
    ],
)
def test_one_changed_bit_in_a_checkpoint_is_found(
    run: Path, capsys: pytest.CaptureFixture[str], tensor: str, layer: int, what: str
) -> None:
    tamper(run, 6, tensor)
    code, found = verify(capsys, run)
    assert (code, found["equal"], found["steps"]) == (1, False, 2)
    assert found["first_difference"] == {
        "step": 6, "layer": layer, "what": what, "tensor": tensor, "after": 4, "loss_step": None,
    }  # fmt: skip
    assert verified(run) == 0


def test_a_flipped_bit_in_a_file_is_the_tensor_that_differs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last bytes of a shard belong to its last tensor. The manifest has the checksum of what was written."""
    (shard, *_) = sorted((run / "checkpoints" / "step-00000006").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-2] ^= 1
    shard.write_bytes(data)
    code, found = verify(capsys, run)
    assert (code, found["equal"], found["steps"]) == (1, False, 2)
    difference = found["first_difference"]
    assert (difference["step"], difference["after"], difference["loss_step"]) == (6, 4, None)
    assert difference["tensor"] in safetensors_names(shard)
    assert f"{shard.name} is damaged" in found["damage"]


@pytest.mark.parametrize("kept_bytes", [0, 100, None], ids=["empty", "cut off", "missing"])
def test_a_checkpoint_that_can_not_be_read_differs(
    run: Path, capsys: pytest.CaptureFixture[str], kept_bytes: int | None
) -> None:
    (shard, *_) = sorted((run / "checkpoints" / "step-00000004").glob("*.safetensors"))
    if kept_bytes is None:
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:kept_bytes])
    code, found = verify(capsys, run)
    assert (code, found["equal"], found["steps"]) == (1, False, 0)
    assert (found["first_difference"]["step"], found["first_difference"]["what"]) == (4, "file")
    assert shard.name in found["damage"]


def test_a_changed_start_is_found_from_the_step_before(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tamper(run, 2, "1.weight")
    assert verify(capsys, run)[0] == 1
    code, found = verify(capsys, run, "--steps", "0:6")
    assert (code, found["first_difference"]["step"], found["first_difference"]["layer"]) == (1, 2, 1)


def test_another_learning_rate_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verify(capsys, run, "--job", f"{JOB}:other_lr")
    assert (code, found["steps"], found["first_difference"]["step"]) == (1, 0, 4)
    assert found["first_difference"]["loss_step"] == 3
    assert found["first_difference"]["what"] == "weights"


def test_another_digest_in_the_summary_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"weights_sha256": "0" * 64}))
    code, found = verify(capsys, run)
    assert (code, found["first_difference"]["layer"]) == (1, None)
    assert found["first_difference"]["what"] == "weights_sha256"


def test_one_pipeline_without_exact_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has a single checkpoint, so that it is retrained from the initial weights."""
    train(tmp_path / "a", overrides={}, pipelines=1, stages=2, checkpoint_every=0, strategy="none")
    code, found = verify(capsys, tmp_path / "a")
    assert (code, found["steps"], found["range"]) == (0, 6, [0, 6])


def test_checkpoints_without_frozen_weights_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As those of an adapter."""
    train(tmp_path / "a", described=f"{JOB}:adapter")
    code, found = verify(capsys, tmp_path / "a")
    assert (code, found["equal"], found["steps"]) == (0, True, 4)


def test_several_pipelines_without_exact_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "a", overrides={})
    assert "was trained by 2 pipelines without exact" in refusal(capsys, tmp_path / "a")


def test_a_run_on_a_url_is_verified_and_not_changed(memory_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    train(memory_url)
    code, found = verify(capsys, memory_url)
    assert (code, found["steps"]) == (0, 4)
    assert json.loads(Storage(memory_url).read("summary.json"))["verified"] == 0


@pytest.mark.real
@pytest.mark.usefixtures("forked_programs")
def test_a_real_run_records_its_job(tmp_path: Path) -> None:
    """Verified from another folder, without naming the job: its layers are modules, which are drawn at import."""
    shutil.copy(JOB, tmp_path / "job.py")
    ended = culm(
        "run", "job.py:modules", "--pipelines", "2", "--exact", "--set", "clip_norm=0.5", "--steps", "3",
        "--kill", "node=1 step=1", "--out", "runs/a", "--quiet", cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    ended = culm("verify", str(tmp_path / "runs" / "a"), "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["equal"], found["steps"], found["range"]) == (True, 3, [0, 3])


def test_runs_of_graph_networks_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_events(run, graph="cora")
    assert "is a run of culm gnn" in refusal(capsys, run)


def test_wrong_requests_are_one_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "there is no folder" in refusal(capsys, tmp_path / "nowhere")
    assert "--steps '4' is not a range" in refusal(capsys, run, "--steps", "4")
    assert "--steps '4:2' is not a range" in refusal(capsys, run, "--steps", "4:2")
    assert "--steps 3:6: begin at 0 or a checkpoint and end at one" in refusal(capsys, run, "--steps", "3:6")
    assert "there is no job file 'gone.py'" in refusal(capsys, run, "--job", "gone.py")
    batch = refusal(capsys, run, "--job", f"{JOB}:other_batch")
    assert "was made with micro_batch=2, the job has 4: name the job of the run with --job" in batch
    edit_events(run, job="gone.py", job_file="/nowhere/gone.py")
    assert "the job file '/nowhere/gone.py' of the run is not there" in refusal(capsys, run)
    edit_events(run, job="", job_file="")
    assert "put the job into a file and name it with --job" in refusal(capsys, run)
    for step in (2, 4):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    monkeypatch.setattr(recorded_run, "CHEAP_S", -1.0)
    assert "ask for it with --steps 0:6" in refusal(capsys, run)
    shutil.rmtree(run / "checkpoints")
    assert "has no checkpoint to verify" in refusal(capsys, run)


def test_a_run_with_dropped_samples_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    lines[3] |= {"samples_lost": 2, "samples_duplicated": 0, "skipped": False}
    (run / "steps.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "left out or repeated samples in step 3" in refusal(capsys, run)
    assert verify(capsys, run, "--steps", "4:6")[0] == 0


def test_a_resume_with_other_fields_is_verified_apart(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (started,) = [
        e for e in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if e["kind"] == "run_started"
    ]
    with (run / "events.jsonl").open("a") as file:
        for overrides in ({"exact": "true", "steps": "9"}, {"exact": "true", "clip_norm": "1"}):
            file.write(json.dumps(started | {"start": 4, "overrides": overrides}) + "\n")
    assert "was resumed at step 4 with another job or other fields" in refusal(capsys, run)
    assert verify(capsys, run, "--steps", "2:4")[0] == 0
    assert verify(capsys, run, "--steps", "4:6")[0] == 1
