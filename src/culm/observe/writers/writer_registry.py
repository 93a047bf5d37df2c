"""Writers by name: `tensorboard`, `wandb`, `prometheus`, or MODULE:CLASS of the user. Packages are imported lazily."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, cast

from culm.errors import USER_EXCEPTIONS, UsageError, message_suffix
from culm.job import import_job_file
from culm.observe.writers.writer import Writer

_METHODS = ("open", "write_step", "write_event", "close")


class _NamedWriter(NamedTuple):
    reference: str
    package: str | None
    """What it needs beside culm: the name to import and to install it by."""
    needs_folder: bool


_NAMED_WRITERS = {
    "prometheus": _NamedWriter("culm.observe.writers.prometheus:PrometheusWriter", None, True),
    "tensorboard": _NamedWriter("culm.observe.writers.tensorboard_writer:TensorBoardWriter", "tensorboard", True),
    "wandb": _NamedWriter("culm.observe.writers.wandb_writer:WandbWriter", "wandb", False),
}


def known_writers() -> tuple[str, ...]:
    """The names that need no MODULE:CLASS."""
    return tuple(_NAMED_WRITERS)


def check_writers(names: Sequence[str], out: str | None) -> None:
    """Raise UsageError unless every writer can be created for a run with this folder."""
    for name in names:
        named = _NAMED_WRITERS.get(name)
        if named is None:
            _load_class(name)
        elif named.needs_folder and out is None:
            raise UsageError(f"--writer {name} writes into the run folder: add --out, as in --out runs/a")
        elif named.package is not None and importlib.util.find_spec(named.package) is None:
            raise UsageError(f"--writer {name} needs the package {named.package}: pip install {named.package}")


def create_writer(name: str) -> Writer:
    """A new writer. Raises UsageError for a name that is not known, and what the constructor raises."""
    named = _NAMED_WRITERS.get(name)
    return cast(Writer, _load_class(name if named is None else named.reference)())


def _load_class(reference: str) -> Any:
    """The class of MODULE:CLASS, or of FILE.py:CLASS."""
    module, colon, name = reference.rpartition(":")
    if not colon:
        raise UsageError(f"there is no --writer {reference!r}: use {', '.join(known_writers())} or MODULE:CLASS")
    try:
        loaded = import_job_file(module) if module.endswith(".py") else importlib.import_module(module)
    except USER_EXCEPTIONS as error:
        raise UsageError(
            f"--writer {reference!r} cannot be imported ({type(error).__name__}{message_suffix(error)}): give "
            "MODULE:CLASS with a module that is installed or next to the job file"
        ) from error
    found = getattr(loaded, name, None)
    if found is None:
        raise UsageError(f"--writer {reference!r}: {module} has no {name!r}: {_fix(loaded)}")
    missing = _missing_methods(found)
    if not isinstance(found, type) or missing:
        lacks = f"lacks {', '.join(missing)}" if isinstance(found, type) else "is not a class"
        raise UsageError(
            f"--writer {reference!r} {lacks}: name a class with the methods {', '.join(_METHODS)} "
            "(culm.observe.writers.writer.Writer)"
        )
    _check_constructor(reference, found)
    return found


def _fix(module: ModuleType) -> str:
    own = (each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__)
    writers = [each.__name__ for each in own if not _missing_methods(each)]
    return f"it has {', '.join(writers)}" if writers else "it defines no writer"


def _missing_methods(found: object) -> list[str]:
    return [method for method in _METHODS if not callable(getattr(found, method, None))]


def _check_constructor(reference: str, found: type) -> None:
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UsageError(
            f"--writer {reference!r} cannot be created ({error}): its constructor has to work without arguments"
        ) from error
    except ValueError:
        return  # a class of an extension module has no signature
