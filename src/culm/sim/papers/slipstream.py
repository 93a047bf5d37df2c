"""Re-routing against redundancy and templates on GPT-3 sizes, beside the headline of SlipStream (SOSP'24, ReCycle)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from culm.market.generate import Market, generate
from culm.plan.reconfigure import Layout
from culm.sim.costs import Charges
from culm.sim.modelled import modelled
from culm.sim.papers.table import Book, Request, Sheet
from culm.sim.steps import Steps
from culm.sim.study import Price, simulate
from culm.sim.workload import Workload

INSTANCE, NODES = "a2-highgpu-1g+1xA100", 32
SIZES = {"gpt-3-350m": (2, 2), "gpt-3-2.7b": (4, 4), "gpt-3-6.7b": (8, 8)}
"""By model: stages, and samples of a micro-batch."""
EVERY_H = (6.0, 2.0, 0.5)
REPAIR_H = 2.0
"""Until a lost node is replaced: our choice, as the paper's is not public."""
NAMES = ("reroute", "auto", "oobleck", "bamboo")
HEADLINE = {"oobleck": 1.46, "bamboo": 1.64}


def workloads() -> list[Workload]:
    """32 A100, 16 x 2 to 4 x 8. Activations are recomputed, so there is room for all that are alive."""
    made = (modelled(name, INSTANCE, nodes=NODES, stages=P, micro_batch=micro) for name, (P, micro) in SIZES.items())
    return [replace(each, memory=None) for each in made]


def slipstream(request: Request) -> Book:
    models = workloads()
    sheets = [_frequencies(models, request), _crossing(models)]
    preface = [
        "32 nodes with an A100 each; speeds are counted FLOP at 45 % of the peak. Nodes are lost one by one, at random",
        f"times, and replaced after {REPAIR_H:g} hours on average. SlipStream's headline is up to 1.46 times the",
        "throughput of Oobleck and 1.64 times that of Bamboo; its settings are not public, so these are not its rows.",
    ]
    return Book("Re-routing, redundancy and templates on GPT-3", sheets, preface)


def _frequencies(models: Sequence[Workload], request: Request) -> Sheet:
    rows, cells = [], []
    for workload in models:
        request.progress(workload.name)
        for every in EVERY_H:
            found = _goodput(workload, every, request.seeds or 5)
            ratio = {name: found["reroute"] / found[name] for name in HEADLINE}
            shape = f"{workload.pipelines} x {workload.stages}"
            rows.append({"model": workload.name, "shape": shape, "every_h": every, "goodput": found, "ratio": ratio})
            cells.append(
                [
                    f"{workload.name}, {shape}",
                    f"{every:g} h",
                    *(f"{found[name]:.2f}" for name in NAMES),
                    *(f"{ratio[name]:.2f} (up to {HEADLINE[name]})" for name in HEADLINE),
                ]
            )
    return Sheet(
        "Samples per second, by how often a node is lost",
        ("model", "lost every", *NAMES, "reroute / oobleck", "reroute / bamboo"),
        cells,
        rows,
        ("oobleck and bamboo run 1F1B, as published; reroute and auto split the backward and stagger the optimizer",),
    )


def _goodput(workload: Workload, every_h: float, seeds: int) -> dict[str, float]:
    rate = 1 / every_h / NODES
    market = Market(nodes=NODES, hours=48, rate=rate, group=1, zones=1, available=1 / (1 + rate * REPAIR_H), tail=1)
    traces = [generate(market, seed) for seed in range(seeds)]
    found = simulate(workload, traces, NAMES, charges=Charges(), price=Price(1.0, 1.0))
    return {name: outcome.goodput.value for name, outcome in found.items()}


def _crossing(models: Sequence[Workload]) -> Sheet:
    """Both at rest, with so many nodes missing: what re-routing leaves, and what a new cut would."""
    rows, cells = [], []
    for workload in models:
        steps = Steps(workload, Charges())
        for missing in range(9):
            routed = steps.layout(Layout((workload.stages,) * workload.pipelines, missing))
            cut, depths = steps.uneven(NODES - missing)
            rates = {"reroute": workload.samples / routed, "re-partition": workload.samples / cut}
            better = max(rates, key=lambda name: rates[name])
            rows.append({"model": workload.name, "missing": missing, **rates, "better": better})
            cells.append(
                [
                    workload.name,
                    str(missing),
                    f"{rates['reroute']:.2f}",
                    f"{rates['re-partition']:.2f} ({len(depths)} pipelines)",
                    f"{better}, by {max(rates.values()) / min(rates.values()) - 1:.1%}",
                ]
            )
    return Sheet(
        "Where re-partitioning beats re-routing: samples per second with nodes missing",
        ("model", "missing", "re-routed", "re-partitioned", "better"),
        cells,
        rows,
        (
            "re-partitioning moves layers and can not stagger the optimizer; re-routing moves nothing",
            "which of the two pays in a run depends on how long nodes are missing: `reroute` and `auto` decide by that",
        ),
    )
