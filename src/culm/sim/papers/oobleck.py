"""Three systems replayed with the steady states that were measured for them (Oobleck, SOSP'23, artefact)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from culm.errors import UsageError
from culm.market.reading import read_trace
from culm.market.table import read_rows
from culm.market.trace import Trace
from culm.sim.costs import Charges
from culm.sim.engine import Engine, Node, Turn
from culm.sim.papers.table import Request, Sheet

TRACES = ("6h", "1h", "30m", "10m", "p3-trace", "g4dn-trace")


class Constants(NamedTuple):
    """Seconds, as the artefact's three simulators have them."""

    samples: int
    oobleck: float
    """Reconfiguration."""
    varuna: float
    """Restart."""
    checkpoint: float
    """Of Varuna, after every tenth step."""
    bamboo: float
    """Rebalancing."""


CONSTANTS = {
    "BERT-large": Constants(8192, 2, 80, 15.8, 76),
    "GPT-2": Constants(1024, 2, 83, 11.5, 80),
    "GPT-3-medium": Constants(819, 3, 78.7, 11.2, 100),
    "GPT-3-2.7B": Constants(512, 6, 515, 50, 230),
    "GPT-3-6.7B": Constants(1024, 10, 701, 120, 450),
}
SYSTEMS = ("oobleck", "varuna", "bamboo")


class Replay:
    """A system whose speed is looked up by the number of nodes."""

    def __init__(self, system: str, constants: Constants, speeds: Mapping[int, float]) -> None:
        self.system, self.constants, self.speeds = system, constants, speeds
        self.expected_s = self.now = self.left_s = self.phase = 0.0
        self.step = self.watches = 0
        self.nodes = 0
        self.checkpoint_write_s = 0.0
        self.checkpoint_stall_s = constants.checkpoint
        self.checkpoint_every_s = 0.0

    def rate(self) -> float:
        """More nodes than were measured are as fast as the most; with fewer nothing was."""
        return self.speeds.get(min(self.nodes, max(self.speeds)), 0.0)

    def lost(self, gone: Sequence[Node]) -> Turn | None:
        before = self.rate()
        self.nodes -= len(gone)
        return self._turn(before, lost=True)

    def joined(self, new: Sequence[Node]) -> Turn | None:
        before = self.rate()
        self.nodes += len(new)
        return self._turn(before, lost=False) if self.rate() != before else None

    def looked(self) -> Turn | None:
        return None

    def _turn(self, before: float, *, lost: bool) -> Turn:
        rate, c = self.rate(), self.constants
        if self.system == "varuna":
            self.checkpoint_every_s = 10 * c.samples / rate if rate else 0.0
            return Turn(rate, {"restart": c.varuna}, "checkpoint" if lost else "")
        redo = {"redo": self.phase * c.samples / before} if lost and before else {}
        pause = c.oobleck if self.system == "oobleck" else c.bamboo
        return Turn(rate, {**redo, "reconfigure": pause})


def oobleck(request: Request) -> Sheet:
    """Goodput of each system on each trace. Needs --traces, where the measured speeds lie too."""
    folder = _folder(request.traces)
    speeds = read_speeds(folder / "throughput_by_nodes.csv")
    rows, cells = [], []
    for model, constants in CONSTANTS.items():
        for name in TRACES:
            trace = read_trace(folder / f"{name}.csv")
            found = {s: _goodput(trace, s, constants, speeds.get((s, model), {})) for s in SYSTEMS}
            rows.append({"model": model, "trace": name, **found})
            cells.append([model, name, *(f"{found[s]:.2f}" if found[s] else "-" for s in SYSTEMS)])
    return Sheet(
        "Samples per second with the measured steady states of the Oobleck artefact",
        ("model", "trace", *SYSTEMS),
        cells,
        rows,
        (
            "speeds at 15 to 30 nodes and all pauses are the artefact's; nothing was measured with fewer nodes, so p3 "
            "and g4dn stand still there",
            "bamboo has no speeds for GPT-3: out of memory, says the artefact",
        ),
    )


def _goodput(trace: Trace, system: str, constants: Constants, speeds: Mapping[int, float]) -> float:
    if not speeds:
        return 0.0
    run = Engine(trace, Replay(system, constants, speeds), Charges(), 0.0).play()
    return run.samples / run.seconds


def read_speeds(path: Path) -> dict[tuple[str, str], dict[int, float]]:
    """system,model,nodes,samples_per_s. Raises UsageError with the line for a bad row."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"the speeds {str(path)!r} could not be read: {error.strerror}") from error
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in read_rows(text, path.name, ("system", "model", "nodes", "samples_per_s")):
        speeds = found.setdefault((row.text("system"), row.text("model")), {})
        speeds[row.whole("nodes")] = row.number("samples_per_s")
    return found


def _folder(traces: Path | None) -> Path:
    if traces is None:
        raise UsageError("--paper oobleck needs the artefact's traces and speeds: give --traces")
    return traces / "oobleck" if (traces / "oobleck").is_dir() else traces
