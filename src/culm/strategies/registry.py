"""Strategies by name: the built-in ones, registered ones, and classes named as "module:Class"."""

from __future__ import annotations

import difflib
import importlib
import sys
from pathlib import Path
from typing import TypeVar

from culm.errors import USER_EXCEPTIONS, UsageError, message_suffix
from culm.strategies.auto import AutoStrategy
from culm.strategies.checkpoint import CheckpointStrategy
from culm.strategies.drop import DropStrategy
from culm.strategies.migrate import MigrateStrategy
from culm.strategies.none import NoneStrategy
from culm.strategies.reroute import RerouteStrategy
from culm.strategies.shadow import LazyShadowStrategy, ShadowStrategy
from culm.strategies.strategy import Strategy
from culm.strategies.templates import TemplatesStrategy

StrategyClass = TypeVar("StrategyClass", bound=type[Strategy])

_BUILT_IN: tuple[type[Strategy], ...] = (
    AutoStrategy,
    NoneStrategy,
    CheckpointStrategy,
    DropStrategy,
    ShadowStrategy,
    LazyShadowStrategy,
    RerouteStrategy,
    MigrateStrategy,
    TemplatesStrategy,
)
"""In the order of help texts. Random scenarios are drawn in this order, so a change of it changes what a seed means."""

_registered: dict[str, Strategy] = {each.name: each() for each in _BUILT_IN}
_imported: dict[str, Strategy] = {}
"""Strategies that were named as "module:Class" and are not registered: `auto` does not consider them."""


def known_names() -> tuple[str, ...]:
    """The names of all registered strategies, the built-in ones first."""
    return tuple(_registered)


def by_preference() -> list[Strategy]:
    """All registered strategies, sorted by `Strategy.preference`."""
    return sorted(_registered.values(), key=lambda strategy: strategy.preference)


def get(name: str) -> Strategy:
    """The strategy of a registered name or of "module:Class"; the same object for the same name.

    A module is found on sys.path or in the current folder. Raises UsageError, in one sentence, for an unknown name, a
    module that cannot be imported, a class that it does not have, and a class that is no Strategy.
    """
    found = _registered.get(name) or _imported.get(name)
    if found is not None:
        return found
    if ":" not in str(name):
        close = difflib.get_close_matches(str(name).lower(), known_names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"use {' or '.join(known_names())}, or module:Class"
        raise UsageError(f"there is no --strategy {name!r}: {hint}")
    _imported[name] = _import_strategy(name)
    return _imported[name]


def check_name(name: str) -> None:
    """Raise UsageError for an unknown name. "module:Class" passes: it is imported when the strategy is used, because
    the folder of the job file may not be on sys.path yet."""
    if ":" not in str(name):
        get(name)


def register(strategy: StrategyClass) -> StrategyClass:
    """Add a Strategy class to the known ones, so that `auto`, `culm plan` and `culm simulate` consider it. Can be used
    as a decorator. Its name becomes "module:Class"; every process that uses it has to be able to import the module."""
    name = reference_to(strategy)
    _registered[name] = _named(_create(strategy, name), name)
    return strategy


def unregister(name: str) -> None:
    """Remove a registered strategy again. Does nothing if there is none of that name."""
    _registered.pop(name, None)


def reference_to(strategy: str | type[Strategy] | Strategy) -> str:
    """The name under which every process finds a strategy: a name as it is, the name of a registered or imported
    object, or "module:Class" for a class. Raises UsageError for a class that other processes cannot import."""
    if isinstance(strategy, str):
        return strategy
    if isinstance(strategy, Strategy):
        if strategy.name and get(strategy.name) is strategy:
            return strategy.name
        raise UsageError(
            f"strategy is an object of {type(strategy).__name__}, which other processes cannot get: pass its class, "
            'or "module:NAME" of an object at the top level of a module'
        )
    if not _is_strategy_class(strategy):
        raise UsageError(f"strategy is {strategy!r}: use one of {', '.join(known_names())}, or a class of your own")
    return strategy.name if strategy in _BUILT_IN else class_reference("strategy", strategy)


def class_reference(field: str, given: type) -> str:
    """The text "module:Class" by which other processes import a class. Raises UsageError, with the name of the field
    that has the class, if they cannot import it."""
    module, name = given.__module__, given.__qualname__
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or "." in name or file is None:
        raise UsageError(
            f"{field} is the class {name} of {module}, which other processes cannot import: "
            "define it at the top level of a module"
        )
    stem = Path(file).stem  # job files are imported under a name of their own
    return f"{module}:{name}" if stem in (module.rpartition(".")[2], "__init__") else f"{stem}:{name}"


def add_search_folders(*folders: Path) -> None:
    """Let "module:Class" find modules in these folders, as if they were on PYTHONPATH."""
    sys.path[:0] = [str(folder) for folder in dict.fromkeys(folders) if str(folder) not in sys.path]


def _import_strategy(reference: str) -> Strategy:
    module_name, _, attribute = reference.partition(":")
    if module_name not in sys.modules:
        add_search_folders(Path.cwd())
    try:
        module = importlib.import_module(module_name)
    except USER_EXCEPTIONS as error:
        fix = "run in its folder, or add that to PYTHONPATH"
        if module_name.endswith(".py"):
            fix = f"name the module instead of its file, as in {Path(module_name).stem}:{attribute}, and {fix}"
        raise UsageError(
            f"--strategy {reference!r}: module {module_name!r} cannot be imported ({type(error).__name__}"
            f"{message_suffix(error)}): {fix}"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        defined = {name: value for name, value in vars(module).items() if _is_strategy_class(value)}
        own = [name for name, value in defined.items() if value.__module__ == module.__name__]
        hint = f"it has {', '.join(own)}" if own else "it defines no strategy"
        raise UsageError(f"--strategy {reference!r}: module {module_name!r} has no {attribute!r}: {hint}")
    if _is_strategy_class(found):
        return _named(_create(found, reference), reference)
    if isinstance(found, Strategy):
        return _named(found, reference)
    raise UsageError(
        f"--strategy {reference!r} is of type {type(found).__name__}: use a subclass of culm.strategies.Strategy"
    )


def _create(strategy: type[Strategy], name: str) -> Strategy:
    try:
        return strategy()
    except USER_EXCEPTIONS as error:
        raise UsageError(
            f"--strategy {name!r} cannot be created ({type(error).__name__}{message_suffix(error)}): "
            "its constructor has to work without arguments"
        ) from error


def _is_strategy_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Strategy) and value is not Strategy


def _named(strategy: Strategy, name: str) -> Strategy:
    strategy.name = name
    return strategy
