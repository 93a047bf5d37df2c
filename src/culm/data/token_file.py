"""Token files: all tokens of a corpus in one memory-mapped file, made once in parallel by `culm data tokenize`.

The file is a one-dimensional numpy array (.npy) of uint16 or uint32. PATH.json beside it has the number of tokens,
the number of token ids and the tokenizer. Its bytes do not depend on the number of processes that made it.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from culm.data.text_chunks import Files, TextChunk, find_files, split_into_chunks
from culm.data.tokenizer import TokenizerLike, load_tokenizer
from culm.errors import JobError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

_CHUNKS_PER_PROCESS = 4
"""Chunks that are tokenized ahead of the one that is written next, per process: they bound the memory."""


class Tokens:
    """Sequences of `length` tokens of a token file, and the tokens that follow: (ids, ids shifted by one).

    Sequence i begins at token i * length, so every token is a target once in a pass, except the first one and the
    rest at the end that fills no sequence. Only the pages that are read are in memory. `dtype` is needed for a file
    of raw integers without a header, as in "uint16". Raises JobError if the file holds no sequence.
    """

    def __init__(self, path: str | PathLike[str], length: int, *, dtype: str | None = None) -> None:
        self.path, self.length, self._dtype = fspath(path), length, dtype
        self._map = _open_tokens(self.path, dtype)
        check_length("Tokens", length, len(self._map))
        self.vocab = _read_vocab(self.path)
        """Number of token ids of the tokenizer; None: not known."""

    def __len__(self) -> int:
        return (len(self._map) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return cut_sequence(self._map, range(len(self))[index], self.length)

    def __getstate__(self) -> dict[str, Any]:
        """Without the mapping: another process opens the file itself."""
        return {**self.__dict__, "_map": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map = _open_tokens(self.path, self._dtype)


def cut_sequence(tokens: Any, index: int, length: int) -> tuple[Tensor, Tensor]:
    """Sequence `index` of an array of tokens, and the tokens that follow, as int64 tensors."""
    import torch

    piece = torch.from_numpy(np.asarray(tokens[index * length : (index + 1) * length + 1], dtype=np.int64))
    return piece[:-1], piece[1:]


def check_length(owner: str, length: int, tokens: int) -> None:
    """Raise JobError unless there is at least one sequence of this length and the token after it."""
    if tokens < 2:
        raise JobError(f"{owner} has {tokens} tokens in all: a sequence needs at least one and the token after it")
    if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length < tokens:
        raise JobError(f"{owner}.length is {length!r}: use 1 to {tokens - 1}, since there are {tokens} tokens")


def _open_tokens(path: str, dtype: str | None) -> Any:
    try:
        if dtype is not None:
            tokens = np.memmap(path, dtype=dtype, mode="r")
        else:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise JobError(
            f"the token file {path!r} does not exist on this machine: make it with culm data tokenize"
        ) from None
    except (ValueError, TypeError, EOFError, OSError) as error:
        raise JobError(
            f"the token file {path!r} cannot be read ({error}): make it with culm data tokenize, or name the dtype of "
            "raw integers, as in Tokens(path, length, dtype='uint16')"
        ) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise JobError(
            f"the token file {path!r} holds {tokens.dtype} of shape {tokens.shape}: it must have one dimension, and "
            "integers as token ids"
        )
    return tokens


def _read_vocab(path: str) -> int | None:
    sidecar = Path(f"{path}.json")
    if not sidecar.is_file():
        return None
    try:
        return cast("int | None", json.loads(sidecar.read_text()).get("vocab"))
    except (ValueError, AttributeError):
        raise JobError(f"{sidecar} is not as culm data tokenize writes it: make the token file again") from None


@dataclass(frozen=True)
class TokenFileReport:
    """What `tokenize_files` wrote."""

    path: str
    tokens: int
    vocab: int | None
    files: int


def tokenize_files(
    files: Files,
    tokenizer: TokenizerLike,
    out: str | PathLike[str],
    *,
    field: str = "text",
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> TokenFileReport:
    """Write the tokens of text and JSONL files to one token file, atomically.

    `progress` is called with the bytes done and the bytes of all files. With more than one process, the tokenizer is
    "bytes" or a path. Raises UsageError if the target exists, JobError for a file that cannot be read.
    """
    path = fspath(out)
    if Path(path).exists():
        raise UsageError(f"{path} exists: name another file, or delete it first")
    if processes > 1 and not isinstance(tokenizer, str | Path):
        raise UsageError("a tokenizer object cannot be used by several processes: save it and pass its path")
    loaded = load_tokenizer(tokenizer)
    chunks, found = list(split_into_chunks(files)), find_files(files)
    total, done, count = sum(chunk.end - chunk.start for chunk in chunks), 0, 0
    kind = np.dtype(np.uint16 if loaded.vocab is not None and loaded.vocab <= 1 << 16 else np.uint32)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(f"{path}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as raw:
            for chunk, ids in zip(chunks, tokenized(chunks, tokenizer, field, processes), strict=True):
                raw.write(np.asarray(ids, dtype=kind).tobytes())
                count, done = count + len(ids), done + chunk.end - chunk.start
                progress(done, total)
        _write_array(temporary, Path(path), kind, count)
    finally:
        temporary.unlink(missing_ok=True)
    facts = {"tokens": count, "vocab": loaded.vocab, "eos": loaded.eos, "tokenizer": _name(tokenizer), "files": found}
    Path(f"{path}.json").write_text(json.dumps(facts, indent=2) + "\n")
    return TokenFileReport(path, count, loaded.vocab, len(found))


def _name(tokenizer: TokenizerLike) -> str:
    return str(tokenizer) if isinstance(tokenizer, str | Path) else type(tokenizer).__name__


def tokenized(chunks: list[TextChunk], tokenizer: TokenizerLike, field: str, processes: int) -> Iterator[list[int]]:
    """The tokens of each chunk, in order."""
    if processes <= 1:
        loaded = load_tokenizer(tokenizer)
        yield from (chunk.tokens(loaded, field) for chunk in chunks)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, _set_tokenizer, (tokenizer,)) as pool:
        waiting = iter(chunks)
        ahead: deque[tuple[TextChunk, Future[list[int]]]] = deque()

        def submit(number: int) -> None:
            ahead.extend((chunk, pool.submit(_tokenize_chunk, chunk, field)) for chunk in islice(waiting, number))

        submit(processes * _CHUNKS_PER_PROCESS)
        while ahead:
            chunk, future = ahead.popleft()
            try:
                yield future.result()
            except BrokenProcessPool:
                raise JobError(
                    f"a process that tokenized {chunk.path} from byte {chunk.start} was killed: use fewer processes"
                ) from None
            submit(1)


_process_tokenizer: Any = None


def _set_tokenizer(tokenizer: TokenizerLike) -> None:
    global _process_tokenizer  # noqa: PLW0603 the pool has no other way to give its processes an object
    _process_tokenizer = load_tokenizer(tokenizer)


def _tokenize_chunk(chunk: TextChunk, field: str) -> list[int]:
    return chunk.tokens(_process_tokenizer, field)


def _write_array(raw: Path, target: Path, kind: np.dtype[Any], count: int) -> None:
    """Write raw integers as a .npy file. It appears under its name when it is complete."""
    header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (count,)}
    complete = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with complete.open("wb") as file, raw.open("rb") as tokens:
            np.lib.format.write_array_header_1_0(file, header)
            shutil.copyfileobj(tokens, file)
        complete.replace(target)
    finally:
        complete.unlink(missing_ok=True)
