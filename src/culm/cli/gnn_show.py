"""What is seen of a run of `culm gnn run`: a line now and then, and the table at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from culm.cli.tables import facts

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console
    from rich.status import Status
    from rich.table import Table

    from culm.gnn.graph import Graph
    from culm.gnn.ledger import Epoch, Evaluation
    from culm.gnn.running import Watcher
    from culm.gnn.setup import Setup

_EVERY_S = 2.0


class Progress:
    """On a terminal one line that changes, in a log a line every few seconds, or nothing."""

    def __init__(self, console: Console, epochs: int, *, quiet: bool) -> None:
        self._console, self._epochs, self._quiet = console, epochs, quiet
        self._status: Status | None = None
        self._accuracy = ""
        self._printed_at = float("-inf")

    def __enter__(self) -> None:
        if not self._quiet and self._console.is_terminal:
            self._status = self._console.status("reading the graph")
            self._status.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def watcher(self) -> Watcher:
        from culm.gnn.running import Watcher

        return Watcher(told=self._told, prepared=self._prepared, epoch=self._epoch, evaluated=self._evaluated)

    def _told(self, text: str) -> None:
        self._show(text, always=True)

    def _prepared(self, setup: Setup, graph: Graph) -> None:
        if not self._quiet:
            self._console.print(setup_table(setup, graph))

    def _evaluated(self, evaluation: Evaluation) -> None:
        self._accuracy = f"  validation {evaluation.val:.4f}  test {evaluation.test:.4f}"

    def _epoch(self, done: Epoch, at: float) -> None:
        text = f"epoch {done.epoch + 1}/{self._epochs}  loss {done.loss:.4f}{self._accuracy}  {at:.1f} s"
        self._show(text, always=done.epoch + 1 == self._epochs)

    def _show(self, text: str, *, always: bool) -> None:
        if self._status is not None:
            self._status.update(text)
        elif not self._quiet and (always or time.monotonic() - self._printed_at > _EVERY_S):
            self._printed_at = time.monotonic()
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._console.file.flush()


def setup_table(setup: Setup, graph: Graph) -> Table:
    """What was asked for, as it was understood."""
    model, shape = setup.model, " -> ".join(map(str, setup.model.widths))
    heads = f", {model.heads} heads" if model.kind == "gat" else ""
    mode = f"{setup.mode}, staleness {setup.staleness}" if setup.mode == "async" else setup.mode
    return facts(
        {
            "graph": f"{graph.name}: {graph.vertices:,} vertices, {graph.edges:,} edges, {graph.classes} classes",
            "model": f"{model.kind} {shape}{heads}, dropout {model.dropout:g}",
            "servers": f"{setup.servers} graph, {setup.parameter_servers} parameter, {setup.threads} threads each",
            "mode": mode,
            "learn from": f"{graph.train_vertices:,} vertices",
        }
    )


def ledger_table(summary: Mapping[str, Any], out: str | None) -> Table:
    """What the run came to."""
    epoch_s = summary["time_per_epoch_s"]
    whole = not summary["samples_lost"] and not summary["samples_duplicated"]
    cost = summary["cost"]
    rows = {
        "epochs": f"{summary['epochs']}"
        + (f", stopped: {summary['stopped_early']}" if summary["stopped_early"] else ""),
        "accuracy": f"test {summary['test_accuracy']:.4f}, validation {summary['val_accuracy']:.4f} "
        f"(after epoch {summary['best_epoch'] + 1})",
        "final loss": f"{summary['final_loss']:.6g}",
        "time": f"{summary['wall_s']:.2f} s" + (f", {epoch_s * 1e3:.1f} ms an epoch" if epoch_s else ""),
        "learned from": f"{summary['samples']} times a vertex (expected {summary['samples_expected']}), "
        + ("each counted once" if whole else "NOT each counted once"),
        "workers": f"{summary['workers']} ({summary['launcher']}), {summary['workers_lost']} lost, "
        f"{summary['relaunches']} tasks launched again",
        "servers lost": f"{sum(len(recovery['lost']) for recovery in summary['recoveries'])}",
        "cost": f"${summary['cost_usd']:.6f} (servers {cost['servers_usd']:.6f}, workers {cost['workers_usd']:.6f}, "
        f"requests {cost['requests_usd']:.6f}), prices of {summary['prices']['as_of']}",
        "value": f"{summary['value']:.4g} per second and dollar",
        "files": out or "none: keep them with --out",
    }
    return facts(rows)
