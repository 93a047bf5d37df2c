"""Data sets of files: packed text, token files, JSONL, images; tokenizers of every kind."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from culm.data import Images, Jsonl, Mapped, Packed, Tokens, load_tokenizer, tokenize_files
from culm.data import text_chunks as chunking
from culm.errors import JobError, UsageError


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """A text file and a JSONL file."""
    (tmp_path / "a.txt").write_text("".join(f"line {n} of the text\n" for n in range(200)))
    records = [json.dumps({"text": f"document {n}", "id": n}) for n in range(50)]
    (tmp_path / "b.jsonl").write_text("\n".join(records) + "\n\n")
    return [str(tmp_path / "a.txt"), str(tmp_path / "*.jsonl")]


def all_tokens(data: Any) -> list[int]:
    return [*data[0][0].tolist(), *(int(token) for n in range(len(data)) for token in data[n][1])]


def test_packed_sequences_hold_every_byte_once_with_the_end_of_text_between_documents(corpus: list[str]) -> None:
    data = Packed(corpus, "bytes", length=16)
    text = Path(corpus[0]).read_bytes()
    expected = [*text, 256, *(id_ for n in range(50) for id_ in (*f"document {n}".encode(), 256))]
    found = [int(data[0][0][0]), *(int(token) for n in range(len(data)) for token in data[n][1])]
    assert found == expected[: len(found)]
    assert len(expected) - len(found) < 16
    assert data.vocab == 257
    inputs, target = data[3]
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[1:], target[:-1])
    with pytest.raises(IndexError):
        data[len(data)]


@pytest.mark.real
def test_a_token_file_has_the_same_bytes_for_any_number_of_processes(
    corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 64)
    done: list[tuple[int, int]] = []
    one = tokenize_files(corpus, "bytes", tmp_path / "one.npy", progress=lambda *n: done.append(n))
    tokenize_files(corpus, "bytes", tmp_path / "two.npy", processes=2)
    assert (tmp_path / "one.npy").read_bytes() == (tmp_path / "two.npy").read_bytes()
    total = sum(Path(path).stat().st_size for path in (corpus[0], tmp_path / "b.jsonl"))
    assert done[-1] == (total, total)
    assert len(done) > 20
    data, packed = Tokens(tmp_path / "one.npy", 16), Packed(corpus, "bytes", 16)
    assert len(data) == len(packed) == (one.tokens - 1) // 16
    for n in range(len(data)):
        assert torch.equal(data[n][0], packed[n][0])
    assert data.vocab == 257
    assert not list(tmp_path.glob("*.tmp"))
    copied = pickle.loads(pickle.dumps(data))
    assert torch.equal(copied[2][1], data[2][1])


def test_raw_integers_of_other_tools_can_be_read(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    assert Tokens(tmp_path / "train.bin", 8, dtype="uint16")[2][0].tolist() == list(range(16, 24))


def test_jsonl_records_are_read_by_index(corpus: list[str]) -> None:
    data = Jsonl(corpus[1], lambda record: (torch.tensor(record["id"]), record["text"]))
    assert len(data) == 50
    assert data[41][1] == "document 41"
    assert data.record(-1) == {"text": "document 49", "id": 49}
    with pytest.raises(IndexError):
        data[50]


def test_mapped_applies_a_function_to_items() -> None:
    data = Mapped([1, 2, 3], lambda n: n * n)
    assert [data[n] for n in range(len(data))] == [1, 4, 9]


class _Encoding:
    ids = (7, 8)


class _WithIds:
    def encode(self, text: str) -> _Encoding:
        return _Encoding()

    def token_to_id(self, text: str) -> int | None:
        return {"</s>": 9}.get(text)

    def get_vocab_size(self) -> int:
        return 10


class _Called:
    eos_token_id = 3

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1, 2] if not add_special_tokens else [0, 1, 2, 3]}

    def __len__(self) -> int:
        return 5


def test_tokenizers_of_every_kind_are_used_alike(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}, unk_token="<|endoftext|>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    for given, text, ids, eos, vocab in (
        ("bytes", "é", [195, 169], 256, 257),
        (tmp_path / "tokenizer.json", "a b", [0, 1], 2, 3),
        (str(tmp_path), "b", [1], 2, 3),
        (_WithIds(), "", [7, 8], 9, 10),
        (_Called(), "", [1, 2], 3, 5),
        (lambda text: np.array([len(text)]), "four", [4], None, None),
    ):
        loaded = load_tokenizer(given)
        assert (loaded.encode(text), loaded.eos, loaded.vocab) == (ids, eos, vocab)


def test_an_image_folder_has_classes_and_normalised_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, colour in (("dog", (255, 0, 0)), ("cat", (0, 0, 255))):
        (tmp_path / name).mkdir()
        image.new("RGB", (20, 10), colour).save(tmp_path / name / "1.png")
    data = Images(tmp_path, size=8)
    assert data.classes == ("cat", "dog")
    assert [label for _, label in (data[0], data[1])] == [0, 1]
    assert data[1][0].shape == (3, 8, 8)
    torch.testing.assert_close(data[1][0][:, 0, 0], torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]))
    assert Images(tmp_path, transform=lambda picture: picture.size)[0][0] == (20, 10)
    (tmp_path / "cat" / "2.png").write_bytes(b"no image")
    with pytest.raises(JobError, match=r"cat/2.png cannot be read"):
        Images(tmp_path)[1]


def test_wrong_data_is_named(tmp_path: Path, corpus: list[str]) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "bad.jsonl").write_text('{"text": "x"}\n{"txt": 1}\n')
    (tmp_path / "latin.txt").write_bytes(b"\xff\xff")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "raw").write_bytes(bytes(16))
    (tmp_path / "out.npy").touch()
    for message, call in (
        (r"'missing.txt' does not exist", lambda: Packed("missing.txt", "bytes", 4)),
        (r"line 2 of .*bad.jsonl has no text in the field 'text': name another of its fields \(txt\)",
         lambda: Packed(tmp_path / "bad" / "bad.jsonl", "bytes", 4)),
        (r"bad' is a folder: name its files, as in", lambda: Packed(tmp_path / "bad", "bytes", 4)),
        (r"Packed has 0 tokens in all", lambda: Packed(tmp_path / "empty.txt", "bytes", 4)),
        (r"holds float32 of shape", lambda: Tokens(tmp_path / "raw", 1, dtype="float32")),
        ("is not UTF-8", lambda: Packed(tmp_path / "latin.txt", "bytes", 4)),
        (r"Packed.length is 0: use 1 to", lambda: Packed(corpus, "bytes", 0)),
        (r"Tokens.length is 9: use 1 to", lambda: _tokens(tmp_path, 9)),
        ("make it with culm data tokenize", lambda: Tokens(tmp_path / "none.npy", 4)),
        ("cannot be read", lambda: Tokens(tmp_path / "out.npy", 4)),
        ("not a file on this machine", lambda: load_tokenizer("nowhere.json")),
        ("the tokenizer is a int", lambda: load_tokenizer(3)),
        ("the tokenizer returned the id 300", lambda: Packed(corpus, _TooLarge(), 4)),
        ("does not exist on this machine", lambda: Images(tmp_path / "none")),
        (r"line 1 of .*latin.txt is not valid JSON", lambda: Jsonl(tmp_path / "latin.txt")[0]),
    ):  # fmt: skip
        with pytest.raises(JobError, match=message):
            call()
    with pytest.raises(UsageError, match="exists: name another file"):
        tokenize_files(corpus, "bytes", tmp_path / "out.npy")
    with pytest.raises(UsageError, match="save it and pass its path"):
        tokenize_files(corpus, _TooLarge(), tmp_path / "new.npy", processes=2)


class _TooLarge:
    n_vocab = 300

    def encode(self, text: str) -> list[int]:
        return [300]


def _tokens(folder: Path, length: int) -> Tokens:
    np.save(folder / "few.npy", np.arange(5, dtype=np.uint16))
    return Tokens(folder / "few.npy", length)
