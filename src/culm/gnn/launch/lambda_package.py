"""The zip of a Lambda function: culm and everything that its worker imports. Equal files give equal zips."""

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
from culm.gnn.launch.lambda_handler import HANDLER_NAME
from culm.gnn.launch.worker_entry import WORKER_ENTRY

UNZIPPED_LIMIT = 250 * 2**20
"""Maximum bytes of a function's unpacked code on Lambda. A container image may have 10 GB."""
EXCLUDED_FOLDERS = {"__pycache__", "tests"}
"""Folders inside a package that a worker does not need."""

_LIST_IMPORTS_SCRIPT = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
roots = sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))
found = {root: sys.modules.get(root) for root in roots}
print(json.dumps([m.__file__ for m in found.values() if getattr(m, "__file__", None)]))
"""


@dataclass(frozen=True)
class LambdaPackage:
    """A zip with its unpacked size; `sha256` equals the function's CodeSha256."""

    content: bytes
    unzipped_bytes: int

    @property
    def sha256(self) -> str:
        return base64.b64encode(hashlib.sha256(self.content).digest()).decode()


def build_package(entry: str = WORKER_ENTRY) -> LambdaPackage:
    """Zip the installed files of all modules that the worker imports. Raises UsageError if they exceed Lambda's
    limit.

    Compiled modules are copied as they are, so this machine must run Linux. The function is created for this machine's
    Python version and processor.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"the platform is {sys.platform}: package Lambda functions on Linux, or give a container image"
        )
    files = dict(sorted(_package_files(_imported_modules(entry.partition(":")[0]))))
    _check_size(files)
    return LambdaPackage(_zip_files(files), sum(path.stat().st_size for path in files.values()))


def _imported_modules(module: str) -> list[Path]:
    """Return the files of the top-level modules that the handler and the worker import, found by importing them."""
    listing = subprocess.run(
        [sys.executable, "-c", _LIST_IMPORTS_SCRIPT, HANDLER_NAME.rpartition(".")[0], module],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if listing.returncode:
        raise UsageError(f"entry is {module}, which cannot be imported: {listing.stderr.strip().splitlines()[-1]}")
    return [Path(name).resolve() for name in json.loads(listing.stdout)]


def _package_files(modules: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the name in the zip and the file. The shared libraries of a wheel are in a folder `<package>.libs` next
    to it."""
    for module in modules:
        if module.name != "__init__.py":
            yield module.name, module
            continue
        root = module.parent
        for folder in (root, root.with_name(f"{root.name}.libs")):
            for path in folder.rglob("*"):
                if path.is_file() and not EXCLUDED_FOLDERS.intersection(path.relative_to(folder).parts):
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


def _zip_files(files: dict[str, Path]) -> bytes:
    """Zip the files without times and owners, so that equal files give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o755 << 16
            archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
