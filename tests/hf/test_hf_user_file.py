"""The program of docs/huggingface.md runs as it is printed: real processes, a kill, and back to from_pretrained."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.hf.test_hf_finetuning import tiny_tokenizer
from tests.hf.tiny_hf import tiny_model

DOCS = Path(__file__).parents[2] / "docs" / "huggingface.md"


def user_file() -> str:
    found = re.search(r"<!-- user file -->\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_program_has_at_most_15_lines() -> None:
    assert len(user_file().strip().splitlines()) <= 15


@pytest.mark.real
def test_the_program_trains_through_a_kill_and_the_result_is_loaded(tmp_path: Path) -> None:
    import transformers

    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    lines = [{"prompt": f"a {letter}", "completion": "b c"} for letter in "abcdefgh"]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "program.py").write_text(user_file())
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["preemptions"] == 1 and summary["samples_lost"] == 0
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    before = tiny_model("llama").state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "trained")
    assert tokenizer.encode("a b") == tiny_tokenizer().encode("a b")
