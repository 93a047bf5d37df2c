"""Packed: text or JSONL files through a tokenizer into sequences of one length, in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from culm.data.text_chunks import Files, split_into_chunks
from culm.data.token_file import check_length, cut_sequence, tokenized
from culm.data.tokenizer import TokenizerLike, load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor


class Packed:
    """Sequences of `length` tokens of all documents in a row, and the tokens that follow: (ids, ids shifted by one).

    A text file is one document, each line of a JSONL file is one (its field `field`). The end-of-text token of the
    tokenizer is between documents. A sequence may span several documents. Everything is tokenized at once, in this
    process: for a large corpus use `culm data tokenize` and `Tokens`, which give the same items. Raises JobError for a
    file that cannot be read, or if there are fewer tokens than one sequence needs.
    """

    def __init__(self, files: Files, tokenizer: TokenizerLike, length: int, *, field: str = "text") -> None:
        loaded = load_tokenizer(tokenizer)
        chunks = list(split_into_chunks(files))
        parts = [np.asarray(ids, dtype=np.uint32) for ids in tokenized(chunks, tokenizer, field, processes=1)]
        self._tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)
        check_length("Packed", length, len(self._tokens))
        self.length = length
        self.vocab = loaded.vocab
        """Number of token ids of the tokenizer; None: not known."""

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return cut_sequence(self._tokens, range(len(self))[index], self.length)
