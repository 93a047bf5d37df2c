"""Instructions with answers, from a JSONL file: only the tokens of the answers count in the loss."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from culm.errors import JobError
from culm.hf.hf_batches import IGNORED

_FORMS = "{'prompt', 'completion'}, {'instruction', 'input', 'output'} or {'messages': [{'role', 'content'}]}"


class Instructions:
    """A map-style data set of (ids, targets), each of one length. Targets are shifted by one; -100 masks the prompt and
    the padding. Lines are tokenized when they are read."""

    def __init__(self, path: str | os.PathLike[str], tokenizer: Any, length: int) -> None:
        self.path, self.tokenizer, self.length = os.fspath(path), tokenizer, length
        file = Path(path)
        if not file.is_file():
            raise JobError(f"there is no file {self.path!r} with instructions: give a JSONL file")
        if length < 2:
            raise JobError(f"the length of instructions is {length}: use at least 2 tokens")
        try:
            lines = file.read_text(encoding="utf-8-sig").split("\n")  # splitlines would also split inside of texts
        except UnicodeDecodeError as error:
            raise JobError(
                f"{self.path!r} is not UTF-8 ({error.reason} at byte {error.start}): convert it first"
            ) from None
        self._lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if not self._lines:
            raise JobError(f"{self.path!r} has no instructions: it needs at least one line")

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        texts = self._texts(range(len(self))[index])
        before = self.tokenizer.encode(texts.prompt, add_special_tokens=not texts.has_special_tokens)
        after = self.tokenizer.encode(texts.answer, add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        ending = [] if end is None or texts.is_closed else [end]
        tokens = [*before, *after, *ending][: self.length + 1]
        labels = [*[IGNORED] * len(before), *tokens[len(before) :]][: len(tokens)]
        pad = self.tokenizer.pad_token_id
        ids = torch.full((self.length,), end or 0 if pad is None else pad)
        target = torch.full((self.length,), IGNORED)
        count = len(tokens) - 1
        ids[:count] = torch.tensor(tokens[:-1])
        target[:count] = torch.tensor(labels[1:])
        return ids, target

    def _texts(self, index: int) -> _Texts:
        number, line = self._lines[index]
        where = f"line {number} of {self.path!r}"
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise JobError(f"{where} is not JSON: {error}") from None
        found = _split(item, self.tokenizer) if isinstance(item, Mapping) else None
        if found is None:
            raise JobError(f"{where} has no prompt and answer: use {_FORMS}")
        for text in (found.prompt, found.answer):
            if not isinstance(text, str):
                raise JobError(f"{where} has {text!r} where a text is expected: use {_FORMS}")
        return found


class _Texts(NamedTuple):
    """What a line says."""

    prompt: str
    answer: str
    has_special_tokens: bool = False
    """Whether the prompt has the tokens that the tokenizer would add at its beginning."""
    is_closed: bool = False
    """Whether the answer has the token that ends it."""


def _split(item: Mapping[str, Any], tokenizer: Any) -> _Texts | None:
    for prompt, answer in (("prompt", "completion"), ("prompt", "response"), ("question", "answer")):
        if prompt in item and answer in item:
            return _Texts(item[prompt], item[answer])
    if "instruction" in item and "output" in item:
        more = f"\n\n{item['input']}" if item.get("input") else ""
        return _Texts(f"### Instruction:\n{item['instruction']}{more}\n\n### Response:\n", item["output"])
    return _split_messages(item.get("messages"), tokenizer)


def _split_messages(messages: Any, tokenizer: Any) -> _Texts | None:
    """The last message is the answer. A chat template decides what is before and after it."""
    if not isinstance(messages, list) or len(messages) < 2:
        return None
    if not all(isinstance(m, Mapping) and isinstance(m.get("content"), str) and "role" in m for m in messages):
        return None
    *earlier, last = messages
    if last["role"] in ("user", "system"):
        return None
    if not getattr(tokenizer, "chat_template", None):
        prompt = "".join(f"{m['role']}: {m['content']}\n" for m in earlier) + f"{last['role']}: "
        return _Texts(prompt, last["content"])
    prompt = tokenizer.apply_chat_template(earlier, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    if not whole.startswith(prompt):
        return _Texts(prompt, last["content"], has_special_tokens=True)
    answer = whole[len(prompt) :]
    return _Texts(
        prompt, answer, has_special_tokens=True, is_closed=not answer.strip().endswith(last["content"].strip())
    )


def instructions(path: str | os.PathLike[str], tokenizer: Any, length: int) -> Instructions:
    """The instructions of a JSONL file, as data for a causal language model. A line is {"prompt", "completion"},
    {"instruction", "input", "output"} or {"messages": [...]}, of which the last message is the answer: the tokenizer's
    chat template, if it has one, decides what is written around the messages. Longer items are cut off at `length`
    tokens.

    Raises JobError, which names the line, for a line of another form.
    """
    return Instructions(path, tokenizer, length)
