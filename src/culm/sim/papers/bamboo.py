"""Bamboo (NSDI'23): its simulation table, from its authors' model; and its main table, from ours."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from culm.market.generate import Market, generate
from culm.sim.bamboo import BambooCase, BambooSim
from culm.sim.costs import Charges
from culm.sim.known import known
from culm.sim.papers.table import Request, Sheet, share
from culm.sim.study import Price, simulate

TABLE3 = {
    0.01: (87.99, 41.11, 2.10),
    0.05: (76.35, 39.73, 1.90),
    0.10: (72.12, 37.94, 1.88),
    0.25: (60.12, 32.58, 1.82),
    0.50: (40.37, 24.53, 1.59),
}
"""By the probability of a node to be lost in an hour: samples per second, dollars per hour, value."""
_CELLS = ("throughput", "cost", "value")


def table3(request: Request) -> Sheet:
    """The published simulation of BERT-Large, run again with the authors' model."""
    rows, cells, worst = [], [], 0.0
    for p, published in TABLE3.items():
        request.progress(f"p = {p}")
        runs = [BambooSim(BambooCase(probability=p), seed).run() for seed in range(request.seeds or 80)]
        found = {name: fmean(getattr(run, name) for run in runs) for name in _CELLS}
        paper = dict(zip(_CELLS, published, strict=True))
        worst = max(worst, *(abs(found[name] / paper[name] - 1) for name in _CELLS))
        rows.append({"p": p, **found, "paper": paper})
        pairs = (f"{found[name]:.2f} ({paper[name]:.2f}, {share(found[name], paper[name])})" for name in _CELLS)
        cells.append([f"{p:.2f}", *pairs, f"{fmean(run.fatal for run in runs):.1f}"])
    return Sheet(
        "Bamboo's simulation of BERT-Large on 48 spot nodes: ours (paper, difference)",
        ("p", "samples/s", "$/h", "value", "fatal losses"),
        cells,
        rows,
        (f"mean over {request.seeds or 80} seeds; the cell that is furthest off is so by {worst:.1%}",),
        {"worst": worst},
    )


class Measured(NamedTuple):
    """A row of Table 2: on demand, and Bamboo at 10, 16 and 33 % lost per hour."""

    on_demand_value: float
    throughput: tuple[float, float, float]
    value: tuple[float, float, float]


TABLE2 = {
    "resnet-152": Measured(0.33, (21.67, 19.41, 12.13), (0.51, 0.48, 0.33)),
    "vgg-19": Measured(3.41, (153.31, 124.88, 98.21), (7.59, 6.48, 5.35)),
    "alexnet": Measured(6.86, (340.32, 321.65, 280.42), (16.86, 16.68, 15.27)),
    "gnmt-16": Measured(0.49, (18.92, 16.31, 8.80), (0.94, 0.85, 0.48)),
    "bert-large": Measured(1.10, (98.87, 83.70, 60.59), (2.34, 2.07, 1.65)),
    "gpt-2": Measured(0.30, (29.92, 22.68, 13.78), (0.71, 0.56, 0.38)),
}
RATES = {0.10: 46 / 48, 0.16: 44 / 48, 0.33: 40 / 48}
"""Share of the nodes lost per hour, and of the nodes wanted that were there."""
P3 = Price(spot=0.918, on_demand=3.06)


def table2(request: Request) -> Sheet:
    """Value of Bamboo on spot against on demand, per model and rate, in our simulator."""
    rows, cells = [], []
    for model, paper in TABLE2.items():
        request.progress(model)
        steady = _value(model, "on-demand", Market(rate=0.0, available=1.0), 1)
        for index, (rate, alive) in enumerate(RATES.items()):
            ours = _value(model, "bamboo", Market(rate=rate, available=alive, group=2.1, zones=3), request.seeds or 5)
            row = {
                "model": model,
                "rate": rate,
                "throughput": ours[0],
                "value": ours[1],
                "on_demand_value": steady[1],
                "paper": {"throughput": paper.throughput[index], "value": paper.value[index]},
                "agree": (ours[1] > steady[1]) == (paper.value[index] > paper.on_demand_value),
            }
            rows.append(row)
            cells.append(_cells(row, paper, index))
    agree = sum(bool(row["agree"]) for row in rows)
    return Sheet(
        "Bamboo's Table 2 in our simulator: ours (paper)",
        ("model", "lost per hour", "samples/s", "value on spot", "value on demand", "spot pays"),
        cells,
        rows,
        (
            f"whether spot pays is answered as in the paper in {agree} of {len(rows)} cells",
            "stage times follow from the published speed on demand; overheads of redundancy are those of BERT",
            "losses in groups of 2.1 over 3 zones; lost work, reload and detection are counted, unlike in the paper",
        ),
        {"agree": agree},
    )


def _value(model: str, strategy: str, market: Market, seeds: int) -> tuple[float, float]:
    """Samples per second, and value."""
    workload = known(model, spot=strategy != "on-demand", split=False)
    sized = Market(**{**vars(market), "nodes": workload.nodes})
    traces = [generate(sized, seed) for seed in range(seeds)]
    found = simulate(workload, traces, [strategy], charges=Charges(), price=P3)[strategy]
    return found.goodput.value, found.value.value


def _cells(row: dict[str, object], paper: Measured, index: int) -> list[str]:
    pays = "yes" if paper.value[index] > paper.on_demand_value else "no"
    ours = pays if row["agree"] else {"yes": "no", "no": "yes"}[pays]
    return [
        str(row["model"]),
        f"{row['rate']:.0%}",
        f"{row['throughput']:.1f} ({paper.throughput[index]:.1f})",
        f"{row['value']:.2f} ({paper.value[index]:.2f})",
        f"{row['on_demand_value']:.2f} ({paper.on_demand_value:.2f})",
        f"{ours} ({pays})",
    ]
