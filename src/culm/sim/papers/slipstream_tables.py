"""Re-routing against redundancy and templates on GPT-3 sizes, next to the headline of SlipStream (SOSP'24, ReCycle)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from culm.market.trace_generator import MarketModel, generate_trace
from culm.plan.reshape.reconfigure_policy import PipelineLayout
from culm.sim.analytic_workload import analytic_workload
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import NodePrice, simulate
from culm.sim.papers.paper_table import PaperTable, PaperTableSet, TableRequest
from culm.sim.step_times import StepTimes
from culm.sim.workload import Workload

INSTANCE, NODES = "a2-highgpu-1g+1xA100", 32
SIZES = {"gpt-3-350m": (2, 2), "gpt-3-2.7b": (4, 4), "gpt-3-6.7b": (8, 8)}
"""By model: stages, and samples per micro-batch."""
HOURS_BETWEEN_LOSSES = (6.0, 2.0, 0.5)
REPAIR_H = 2.0
"""Hours until a lost node is replaced: our choice, because the paper's value is not public."""
STRATEGIES_COMPARED = ("reroute", "auto", "oobleck", "bamboo")
PUBLISHED_SPEEDUPS = {"oobleck": 1.46, "bamboo": 1.64}


def gpt3_workloads() -> list[Workload]:
    """32 A100, 16 x 2 to 4 x 8. Activations are recomputed, so memory does not limit them."""
    workloads = (
        analytic_workload(name, INSTANCE, nodes=NODES, stages=P, micro_batch=micro)
        for name, (P, micro) in SIZES.items()
    )
    return [replace(each, memory=None, planned_activations=(each.micro_batches,) * each.stages) for each in workloads]


def slipstream_tables(request: TableRequest) -> PaperTableSet:
    workloads = gpt3_workloads()
    tables = [_goodput_table(workloads, request), _repartition_table(workloads)]
    preface = [
        "32 nodes with an A100 each; speeds are FLOP counts at 45 % of the peak. Nodes are lost one by one, at random",
        f"times, and replaced after {REPAIR_H:g} hours on average. SlipStream's headline is up to 1.46 times the",
        "throughput of Oobleck and 1.64 times that of Bamboo; its settings are not public, so these are not its rows.",
    ]
    return PaperTableSet("Re-routing, redundancy and templates on GPT-3", tables, preface)


def _goodput_table(workloads: Sequence[Workload], request: TableRequest) -> PaperTable:
    rows, cells = [], []
    for workload in workloads:
        request.progress(workload.name)
        for every_h in HOURS_BETWEEN_LOSSES:
            goodput, published = (
                _goodput(workload, every_h, request.seeds or 5, as_published=published) for published in (False, True)
            )
            ratio = {name: goodput["reroute"] / goodput[name] for name in PUBLISHED_SPEEDUPS}
            with_schedule = {name: goodput["reroute"] / published[name] for name in PUBLISHED_SPEEDUPS}
            shape = f"{workload.pipelines} x {workload.stages}"
            rows.append(
                {
                    "model": workload.name,
                    "shape": shape,
                    "every_h": every_h,
                    "goodput": goodput,
                    "ratio": ratio,
                    "ratio_as_published": with_schedule,
                }
            )
            ratios = (
                f"{ratio[name]:.2f}, {with_schedule[name]:.2f} (up to {PUBLISHED_SPEEDUPS[name]})"
                for name in PUBLISHED_SPEEDUPS
            )
            speeds = (f"{goodput[name]:.2f}" for name in STRATEGIES_COMPARED)
            cells.append([f"{workload.name}, {shape}", f"{every_h:g} h", *speeds, *ratios])
    return PaperTable(
        "Samples per second, by how often a node is lost",
        ("model", "lost every", *STRATEGIES_COMPARED, "reroute / oobleck", "reroute / bamboo"),
        cells,
        rows,
        (
            "all four run the planned schedule (split backward, staggered optimizer): what differs is the response to "
            "losses, and the first ratio is that of resilience alone",
            "second ratio: against oobleck and bamboo on 1F1B, as published: it includes the gain of the schedule",
        ),
    )


def _goodput(workload: Workload, every_h: float, seeds: int, *, as_published: bool) -> dict[str, float]:
    rate = 1 / every_h / NODES
    market = MarketModel(
        nodes=NODES, hours=48, rate=rate, group=1, zones=1, available=1 / (1 + rate * REPAIR_H), tail=1
    )
    traces = [generate_trace(market, seed) for seed in range(seeds)]
    outcomes = simulate(
        workload,
        traces,
        STRATEGIES_COMPARED,
        cluster_costs=ClusterCosts(),
        price=NodePrice(1.0, 1.0),
        as_published=as_published,
    )
    return {name: outcome.goodput.value for name, outcome in outcomes.items()}


def _repartition_table(workloads: Sequence[Workload]) -> PaperTable:
    """Steady state with some nodes missing: the throughput of re-routing, and that of a new partition."""
    rows, cells = [], []
    for workload in workloads:
        steps = StepTimes(workload, ClusterCosts())
        for missing in range(9):
            rerouted_s = steps.layout_step_s(PipelineLayout((workload.stages,) * workload.pipelines, missing))
            repartitioned_s, depths = steps.unequal_depths(NODES - missing)
            rates = {"reroute": workload.samples / rerouted_s, "re-partition": workload.samples / repartitioned_s}
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
    return PaperTable(
        "Where re-partitioning beats re-routing: samples per second with nodes missing",
        ("model", "missing", "re-routed", "re-partitioned", "better"),
        cells,
        rows,
        (
            "re-partitioning moves layers and cannot stagger the optimizer; re-routing moves nothing",
            "fewer pipelines have smaller gradient sums: over this network they take half of the step of 16 x 2, so "
            "that gpt-3-350m is faster in few deep pipelines as soon as the planned shape is given up",
            "which of the two pays depends on how long nodes are missing: `reroute` and `auto` decide by that",
        ),
    )
