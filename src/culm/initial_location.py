"""Where Job.init is: a file, a folder, a model in the cache of Hugging Face, or a URL. Imports no torch."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from culm.errors import JobError


def locate_initial(init: str) -> str:
    """The file or folder of Job.init; a URL as it is. Raises JobError if there is none on this machine."""
    if "://" in init:
        return init
    path = Path(init).expanduser()
    if path.exists():
        return str(_snapshot(path) or path)
    cached = cached_model(init)
    if cached is not None:
        return str(cached)
    close = _similar_paths(path)
    hint = f": did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise JobError(f"Job.init is {init!r}: there is no such file or folder on this machine{hint}")


def cached_model(name: str) -> Path | None:
    """The folder of a model such as "org/name" in the local cache of Hugging Face; None: it is not there."""
    if not 0 <= name.count("/") <= 1 or name.startswith(("/", ".", "~")):
        return None
    return _snapshot(_hub_cache() / f"models--{name.replace('/', '--')}")


def _snapshot(folder: Path) -> Path | None:
    """The snapshot that `main` names in a folder of Hugging Face's cache; None: it is another folder."""
    snapshots, named = folder / "snapshots", folder / "refs" / "main"
    if not snapshots.is_dir():
        return None
    if named.is_file() and (snapshots / named.read_text().strip()).is_dir():
        return snapshots / named.read_text().strip()
    found = sorted(snapshots.iterdir(), key=lambda each: each.stat().st_mtime)
    return found[-1] if found else None


def _hub_cache() -> Path:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()


def _similar_paths(path: Path) -> list[str]:
    """Paths that a user may have meant: similar names in the innermost folder that exists."""
    wrong = next((each for each in (path, *path.parents) if each.parent.is_dir()), path)
    try:
        names = [each.name for each in wrong.parent.iterdir()]
    except OSError:
        return []
    return [str(wrong.with_name(name)) for name in difflib.get_close_matches(wrong.name, names, n=2)]
