"""Instructions with answers, from a JSONL file: only the tokens of the answers count in the loss."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        self._lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not self._lines:
            raise JobError(f"{self.path!r} has no instructions: it needs at least one line")

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        prompt, answer = self._texts(range(len(self))[index])
        before = self.tokenizer.encode(prompt, add_special_tokens=True)
        after = self.tokenizer.encode(answer, add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        tokens = [*before, *after, *([] if end is None else [end])][: self.length + 1]
        labels = [*[IGNORED] * len(before), *tokens[len(before) :]][: len(tokens)]
        pad = self.tokenizer.pad_token_id
        ids = torch.full((self.length,), end or 0 if pad is None else pad)
        target = torch.full((self.length,), IGNORED)
        count = len(tokens) - 1
        ids[:count] = torch.tensor(tokens[:-1])
        target[:count] = torch.tensor(labels[1:])
        return ids, target

    def _texts(self, index: int) -> tuple[str, str]:
        """(prompt, answer) of a line."""
        try:
            item = json.loads(self._lines[index])
        except json.JSONDecodeError as error:
            raise JobError(f"line {index + 1} of {self.path!r} is not JSON: {error}") from None
        found = _split(item, self.tokenizer) if isinstance(item, Mapping) else None
        if found is None:
            raise JobError(f"line {index + 1} of {self.path!r} has no prompt and answer: use {_FORMS}")
        return found


def _split(item: Mapping[str, Any], tokenizer: Any) -> tuple[str, str] | None:
    for prompt, answer in (("prompt", "completion"), ("prompt", "response"), ("question", "answer")):
        if prompt in item and answer in item:
            return item[prompt], item[answer]
    if "instruction" in item and "output" in item:
        more = f"\n\n{item['input']}" if item.get("input") else ""
        return f"### Instruction:\n{item['instruction']}{more}\n\n### Response:\n", item["output"]
    if item.get("messages"):
        *earlier, last = item["messages"]
        if getattr(tokenizer, "chat_template", None):
            prompt = tokenizer.apply_chat_template(earlier, tokenize=False, add_generation_prompt=True)
        else:
            prompt = "".join(f"{m['role']}: {m['content']}\n" for m in earlier) + f"{last['role']}: "
        return prompt, last["content"]
    return None


def instructions(path: str | os.PathLike[str], tokenizer: Any, length: int) -> Instructions:
    """The instructions of a JSONL file, as data for a causal language model. A line is {"prompt", "completion"},
    {"instruction", "input", "output"} or {"messages": [...]}, of which the last message is the answer. Longer items are
    cut off at `length` tokens.

    Raises JobError, which names the line, for a line of another form.
    """
    return Instructions(path, tokenizer, length)
