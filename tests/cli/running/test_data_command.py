"""`culm data tokenize`: text to a token file, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from culm.cli import app
from culm.data import Tokens


def test_text_becomes_a_token_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n")
    out = tmp_path / "a.npy"
    result = CliRunner().invoke(
        app, ["data", "tokenize", str(tmp_path / "*.txt"), "--tokenizer", "bytes", "--out", str(out), "--processes=1"]
    )
    assert (result.exit_code, result.stdout) == (0, f"{out}: 11 tokens of 1 files, 257 token ids\n")
    assert bytes(Tokens(out, 9)[0][0].tolist()) == b"some text"


@pytest.mark.parametrize(
    ("tokenizer", "message"), [("none.json", "not a file on this machine"), ("bytes", "missing.txt")]
)
def test_wrong_requests_are_one_sentence(tmp_path: Path, tokenizer: str, message: str) -> None:
    file = str(tmp_path / "missing.txt")
    result = CliRunner().invoke(
        app, ["data", "tokenize", file, "--tokenizer", tokenizer, "--out", str(tmp_path / "a.npy"), "--processes=1"]
    )
    assert result.exit_code == 2
    assert message in result.stderr
