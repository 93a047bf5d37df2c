"""What a Lambda function runs: culm and all that its worker imports, as one zip; equal files give equal zips."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from culm.errors import UsageError
from culm.gnn.launch.entry import WORKER
from culm.gnn.launch.handler import HANDLER_NAME

UNZIPPED_LIMIT = 250 * 2**20
"""Bytes of a function's code on Lambda, unpacked. A container image (10 GB) is the way around it."""
LEFT_OUT = {"__pycache__", "tests"}
"""Folders inside a package that a worker has no use for."""

_IMPORTED = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
roots = sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))
found = {root: sys.modules.get(root) for root in roots}
print(json.dumps([m.__file__ for m in found.values() if getattr(m, "__file__", None)]))
"""


@dataclass(frozen=True)
class Package:
    """A zip, and what Lambda says about it: `sha256` is the function's CodeSha256."""

    content: bytes
    unzipped: int

    @property
    def sha256(self) -> str:
        return base64.b64encode(hashlib.sha256(self.content).digest()).decode()


def package(entry: str = WORKER) -> Package:
    """Zip what the worker's module imports, as installed here. Raises UsageError where that is more than Lambda takes.

    Compiled parts are taken as they are: this machine must run Linux, as Lambda does, and the function is made for its
    Python version and processor.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"the platform is {sys.platform}: package Lambda functions on Linux, or give a container image"
        )
    files = dict(sorted(_files(_imported(entry.partition(":")[0]))))
    _check_size(files)
    return Package(_zipped(files), sum(path.stat().st_size for path in files.values()))


def _imported(module: str) -> list[Path]:
    """Files of the top-level modules that come along with the handler and the worker, found by importing them."""
    made = subprocess.run(
        [sys.executable, "-c", _IMPORTED, HANDLER_NAME.rpartition(".")[0], module],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if made.returncode:
        raise UsageError(f"entry is {module}, which can not be imported: {made.stderr.strip().splitlines()[-1]}")
    return [Path(name).resolve() for name in json.loads(made.stdout)]


def _files(modules: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Name in the zip and file. A wheel's shared libraries lie beside its package, in a folder `<package>.libs`."""
    for module in modules:
        if module.name != "__init__.py":
            yield module.name, module
            continue
        root = module.parent
        for folder in (root, root.with_name(f"{root.name}.libs")):
            for path in folder.rglob("*"):
                if path.is_file() and not LEFT_OUT.intersection(path.relative_to(folder).parts):
                    yield str(path.relative_to(root.parent)), path


def _check_size(files: dict[str, Path]) -> None:
    parts: dict[str, int] = {}
    for name, path in files.items():
        root = name.partition("/")[0]
        parts[root] = parts.get(root, 0) + path.stat().st_size
    if (total := sum(parts.values())) > UNZIPPED_LIMIT:
        largest = max(parts, key=parts.__getitem__)
        raise UsageError(
            f"the worker's package has {total / 2**20:.0f} MiB, of which {largest} {parts[largest] / 2**20:.0f}, and "
            f"Lambda takes {UNZIPPED_LIMIT / 2**20:.0f}: put it into a container image and give it as image=URI"
        )


def _zipped(files: dict[str, Path]) -> bytes:
    """Times and owners are left out, so that equal files give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o755 << 16
            archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
