"""Tokenizers: one interface for those of tokenizers, transformers, tiktoken, for functions, and for raw bytes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from culm.errors import JobError

TokenizerLike: TypeAlias = Any
""""bytes", a path to a tokenizer.json or to a folder with one, an object with `encode`, or a function from text to
token ids."""

_END_OF_TEXT = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")
"""Names of the token that ends a document, for tokenizers that do not say which it is."""


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids, the id that ends a document (None: there is none), and the number of ids (None: unknown)."""

    encode: Callable[[str], list[int]]
    eos: int | None
    vocab: int | None


def load_tokenizer(tokenizer: TokenizerLike) -> Tokenizer:
    """The tokenizer that a user named or passed. Raises JobError if it is none."""
    if tokenizer == "bytes":
        return Tokenizer(_encode_bytes, eos=256, vocab=257)
    if isinstance(tokenizer, str | Path):
        return _adapt(_load_file(Path(tokenizer)))
    return _adapt(tokenizer)


def _encode_bytes(text: str) -> list[int]:
    return list(text.encode())


def _load_file(path: Path) -> Any:
    """The tokenizer of a tokenizer.json, or of a folder that a transformers tokenizer was saved to."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise JobError(
            f"the tokenizer {str(path)!r} is not a file on this machine: give the path of a tokenizer.json, a "
            "folder with one, or 'bytes'"
        )
    try:
        from tokenizers import Tokenizer as RustTokenizer
    except ImportError:
        raise JobError(
            f"the tokenizer {str(path)!r} needs the package tokenizers: install it with pip install tokenizers"
        ) from None
    try:
        return RustTokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise JobError(f"the tokenizer {str(file)!r} cannot be read: {error}") from None


def _adapt(tokenizer: Any) -> Tokenizer:
    encode = getattr(tokenizer, "encode", None)
    if not callable(encode):
        encode = tokenizer if callable(tokenizer) else None
    if encode is None:
        raise JobError(
            f"the tokenizer is a {type(tokenizer).__name__}: pass 'bytes', the path of a tokenizer.json, an object "
            "with encode(text), or a function"
        )
    without_special = _accepts(encode, "add_special_tokens")

    def encode_text(text: str) -> list[int]:
        return _ids(encode(text, add_special_tokens=False) if without_special else encode(text))

    return Tokenizer(encode_text, _find_eos(tokenizer), _find_vocab(tokenizer))


def _accepts(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # built-in code without a signature
        return False


def _ids(encoded: Any) -> list[int]:
    """Token ids as a list: of a list, an array, an Encoding of tokenizers, or a BatchEncoding of transformers."""
    if hasattr(encoded, "ids"):
        encoded = encoded.ids
    elif hasattr(encoded, "keys"):
        encoded = encoded["input_ids"]
    if hasattr(encoded, "tolist"):
        encoded = encoded.tolist()
    ids = list(encoded)
    if ids and not isinstance(ids[0], int):
        raise JobError(f"the tokenizer returned {type(ids[0]).__name__}s: encode one text to a list of token ids")
    return ids


def _find_eos(tokenizer: Any) -> int | None:
    for name in ("eos_token_id", "eot_token"):
        if isinstance(found := getattr(tokenizer, name, None), int):
            return found
    if hasattr(tokenizer, "token_to_id"):
        return next((id_ for text in _END_OF_TEXT if (id_ := tokenizer.token_to_id(text)) is not None), None)
    return None


def _find_vocab(tokenizer: Any) -> int | None:
    if hasattr(tokenizer, "get_vocab_size"):
        return int(tokenizer.get_vocab_size())
    if hasattr(tokenizer, "n_vocab"):
        return int(tokenizer.n_vocab)
    return len(tokenizer) if hasattr(tokenizer, "__len__") else None
