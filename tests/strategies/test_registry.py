"""Names of strategies: built-in ones, registered ones, and "module:Class"."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from culm.config import RunConfig
from culm.errors import UsageError
from culm.plan.rent.strategy_goodput import GoodputInputs, PreemptionRisk, StrategyGoodput
from culm.plan.replan.plan_case import PlanCase
from culm.sim.compare_strategies import parse_strategy_names, simulated_strategies
from culm.strategies import RunShape, Strategy, get, known_names, reference_to, register
from culm.strategies.registry import by_preference, unregister
from culm.strategies.reroute import RerouteStrategy

MODULE = """
from culm.strategies import Strategy
from culm.strategies.reroute import RerouteStrategy

class Mine(RerouteStrategy):
    summary = "mine"

class NeedsArguments(Strategy):
    def __init__(self, holders):
        self.required_holders = holders

THREE = NeedsArguments(3)
number = 3
"""


class Fast(RerouteStrategy):
    """Says that it costs nothing."""

    def estimate(self, run: GoodputInputs) -> StrategyGoodput | None:
        return StrategyGoodput(self.name, run.failure_free_step_s, 1.0, 60.0)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the current folder, which is not on sys.path."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def fast() -> Iterator[str]:
    register(Fast)
    yield reference_to(Fast)
    unregister(reference_to(Fast))


def test_every_built_in_strategy_has_a_name_a_summary_and_one_object() -> None:
    for name in known_names():
        strategy = get(name)
        assert strategy.name == name
        assert strategy.summary
        assert get(name) is strategy
    assert len({strategy.preference for strategy in by_preference()}) == len(known_names())


def test_a_class_in_the_current_folder_is_found_by_module_and_class(module: str) -> None:
    mine = get(f"{module}:Mine")
    assert (mine.name, mine.summary) == (f"{module}:Mine", "mine")
    assert get(f"{module}:Mine") is mine
    assert mine.name not in known_names(), "auto considers registered strategies only"
    assert RunConfig(pipelines=2, strategy=f"{module}:Mine").strategy == mine.name
    assert parse_strategy_names(f"reroute,{mine.name}") == ["reroute", mine.name]


def test_an_object_of_a_module_is_a_strategy_with_parameters(module: str) -> None:
    assert get(f"{module}:THREE").required_holders == 3
    assert reference_to(get(f"{module}:THREE")) == f"{module}:THREE"


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("nowhere:Mine", "module 'nowhere' cannot be imported (ModuleNotFoundError: No module named 'nowhere')"),
        ("{}:Yours", "has no 'Yours': it has Mine, NeedsArguments"),
        ("{}:number", "is of type int: use a subclass of culm.strategies.Strategy"),
        ("folder/{}.py:Mine", "name the module instead of its file, as in {}:Mine, and run in its folder"),
        ("{}:NeedsArguments", "its constructor has to work without arguments"),
        ("reruote", "there is no --strategy 'reruote': did you mean reroute?"),
        ("hope", "there is no --strategy 'hope': use auto or none or"),
    ],
)
def test_what_is_no_strategy_is_refused_in_one_sentence(module: str, reference: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        get(reference.format(module))
    assert sentence.format(module) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_python_may_pass_a_class() -> None:
    assert reference_to(RerouteStrategy) == "reroute"
    assert reference_to("shadow") == "shadow"
    assert reference_to(Fast) == f"{__name__}:Fast"
    assert RunConfig(pipelines=2, strategy=Fast).strategy == f"{__name__}:Fast"  # type: ignore[arg-type]

    class Local(Strategy):
        pass

    with pytest.raises(UsageError, match="other processes cannot import: define it at the top level of a module"):
        reference_to(Local)
    with pytest.raises(UsageError, match="other processes cannot get: pass its class"):
        reference_to(Fast())


def test_auto_and_the_simulator_consider_a_registered_strategy(fast: str) -> None:
    run = GoodputInputs(
        case=PlanCase(pipelines=2, stages=3, micro_batches=6),
        failure_free_step_s=1.0,
        nodes=6,
        state_bytes=1e9,
        risk=PreemptionRisk(preemption_rate=1.0),
    )
    chosen = get("auto").choose(run, RunShape(2, 3))
    assert chosen.strategy is get(fast)
    assert chosen.why.startswith(f"strategy {fast}: peers hold every layer")
    assert "expected goodput: 100% of a failure-free run, at 100% preemptions per hour (reroute" in chosen.why
    assert fast in simulated_strategies()
    unregister(fast)
    assert get("auto").choose(run, RunShape(2, 3)).strategy is get("reroute")
