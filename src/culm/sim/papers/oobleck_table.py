"""Three systems replayed with the steady-state speeds measured for them (Oobleck, SOSP'23, artefact)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from culm.errors import UsageError
from culm.market.csv_rows import read_rows
from culm.market.market_trace import MarketTrace
from culm.market.price_series import PriceSeries
from culm.market.trace_reader import read_trace
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.engine import Engine, SimulatedNode, StrategyResponse
from culm.sim.papers.paper_table import PaperTable, TableRequest

TRACES = ("6h", "1h", "30m", "10m", "p3-trace", "g4dn-trace")


class ArtefactConstants(NamedTuple):
    """Seconds, as in the artefact's three simulators."""

    samples: int
    oobleck: float
    """Reconfiguration."""
    varuna: float
    """Restart."""
    checkpoint: float
    """A checkpoint of Varuna, after every tenth step."""
    bamboo: float
    """Rebalancing."""


ARTEFACT_CONSTANTS = {
    "BERT-large": ArtefactConstants(8192, 2, 80, 15.8, 76),
    "GPT-2": ArtefactConstants(1024, 2, 83, 11.5, 80),
    "GPT-3-medium": ArtefactConstants(819, 3, 78.7, 11.2, 100),
    "GPT-3-2.7B": ArtefactConstants(512, 6, 515, 50, 230),
    "GPT-3-6.7B": ArtefactConstants(1024, 10, 701, 120, 450),
}
SYSTEMS = ("oobleck", "varuna", "bamboo")


class ArtefactSystem:
    """A system whose speed is looked up by the number of nodes."""

    def __init__(self, system: str, constants: ArtefactConstants, speeds: Mapping[int, float]) -> None:
        self.system, self.constants, self.speeds = system, constants, speeds
        self.expected_event_gap_s = self.now = self.remaining_s = self.phase = 0.0
        self.step = self.recheck_after_steps = 0
        self.nodes = 0
        self.checkpoint_write_s = 0.0
        self.checkpoint_stall_s = constants.checkpoint
        self.checkpoint_every_s = 0.0

    def samples_per_s(self) -> float:
        """With more nodes than were measured, the speed of the most; with fewer, 0."""
        return self.speeds.get(min(self.nodes, max(self.speeds)), 0.0)

    def on_nodes_lost(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        before = self.samples_per_s()
        self.nodes -= len(nodes)
        return self._respond(before, lost=True)

    def on_nodes_joined(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        before = self.samples_per_s()
        self.nodes += len(nodes)
        return self._respond(before, lost=False) if self.samples_per_s() != before else None

    def on_recheck(self) -> StrategyResponse | None:
        return None

    def _respond(self, before: float, *, lost: bool) -> StrategyResponse:
        rate, c = self.samples_per_s(), self.constants
        if self.system == "varuna":
            self.checkpoint_every_s = 10 * c.samples / rate if rate else 0.0
            return StrategyResponse(rate, {"restart": c.varuna}, "checkpoint" if lost else "")
        redo = {"redo": self.phase * c.samples / before} if lost and before else {}
        pause = c.oobleck if self.system == "oobleck" else c.bamboo
        return StrategyResponse(rate, {**redo, "reconfigure": pause})


def oobleck_table(request: TableRequest) -> PaperTable:
    """Goodput of each system on each trace. Needs --traces with the measured speeds in the same folder."""
    folder = _artefact_folder(request.traces)
    speeds = read_speeds(folder / "throughput_by_nodes.csv")
    rows, cells = [], []
    for model, constants in ARTEFACT_CONSTANTS.items():
        for name in TRACES:
            trace = read_trace(folder / f"{name}.csv")
            goodput = {s: _goodput(trace, s, constants, speeds.get((s, model), {})) for s in SYSTEMS}
            rows.append({"model": model, "trace": name, **goodput})
            cells.append([model, name, *(f"{goodput[s]:.2f}" if goodput[s] else "-" for s in SYSTEMS)])
    return PaperTable(
        "Samples per second with the measured steady states of the Oobleck artefact",
        ("model", "trace", *SYSTEMS),
        cells,
        rows,
        (
            "speeds at 15 to 30 nodes and all pauses are the artefact's; no speeds were measured with fewer nodes, so "
            "p3 and g4dn make no progress then",
            "bamboo has no speeds for GPT-3: out of memory according to the artefact",
        ),
    )


def _goodput(trace: MarketTrace, system: str, constants: ArtefactConstants, speeds: Mapping[int, float]) -> float:
    if not speeds:
        return 0.0
    run = Engine(trace, ArtefactSystem(system, constants, speeds), ClusterCosts(), PriceSeries.constant(0.0)).simulate()
    return run.samples / run.seconds


def read_speeds(path: Path) -> dict[tuple[str, str], dict[int, float]]:
    """Read system,model,nodes,samples_per_s. Raises UsageError with the line for an invalid row."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"the speeds {str(path)!r} could not be read: {error.strerror}") from error
    speeds_by_system: dict[tuple[str, str], dict[int, float]] = {}
    for row in read_rows(text, path.name, ("system", "model", "nodes", "samples_per_s")):
        speeds = speeds_by_system.setdefault((row.get_text("system"), row.get_text("model")), {})
        speeds[row.get_int("nodes")] = row.get_number("samples_per_s")
    return speeds_by_system


def _artefact_folder(traces: Path | None) -> Path:
    if traces is None:
        raise UsageError("--paper oobleck needs the artefact's traces and speeds: give --traces")
    return traces / "oobleck" if (traces / "oobleck").is_dir() else traces
