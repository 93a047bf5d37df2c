"""Every example trains for a few steps through a kill, to the same bits, and is one screen long."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.cached_runs import run_with_faults

from culm.job import load_job
from culm.testing import Faults, reference

EXAMPLES = Path(__file__).parents[2] / "examples"
HUGGING_FACE = ["pretrain_gpt.py", "finetune_llama.py", "lora.py", "bert_mlm.py"]
NAMES = [*HUGGING_FACE, "resnet_images.py", "own_model.py", "own_metric.py"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_an_example_trains_through_a_kill_to_the_same_bits(name: str) -> None:
    if name in HUGGING_FACE:
        pytest.importorskip("peft", reason="the extra 'hf' is not installed: pip install 'culm[hf]'")
    job = dataclasses.replace(load_job(str(EXAMPLES / name)), steps=3, exact=True)
    last = job.micro_batches - 1
    run_with_faults(job, Faults().kill(3, at=f"1B{last}", step=1), pipelines=2, stages=2)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["finetune_llama.py", "bert_mlm.py", "own_model.py"])
def test_an_example_learns(name: str) -> None:
    if name in HUGGING_FACE:
        pytest.importorskip("peft", reason="the extra 'hf' is not installed: pip install 'culm[hf]'")
    losses = reference(dataclasses.replace(load_job(str(EXAMPLES / name)), steps=20)).losses
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_one_screen_and_starts_with_its_command(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= 60
    assert f"culm run examples/{name} --pipelines 2 --stages 2 --steps 50" in text.split('"""')[1]
