"""Terminal output of `culm gnn run`: progress lines, the table at the start, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from culm.cli.run_tables import key_value_table

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console
    from rich.status import Status
    from rich.table import Table

    from culm.gnn.gnn_run import GnnCallbacks
    from culm.gnn.graph.csr_graph import Graph
    from culm.gnn.leader.gnn_ledger import EpochLoss, Evaluation
    from culm.gnn.server.store_records import GnnRunConfig

_EVERY_S = 2.0


class GnnProgressDisplay:
    """Shows progress: one changing line on a terminal, a line every few seconds in a log, or nothing."""

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

    def callbacks(self) -> GnnCallbacks:
        from culm.gnn.gnn_run import GnnCallbacks

        return GnnCallbacks(
            on_message=self._show_text,
            on_prepared=self._show_setup,
            on_epoch=self._show_epoch,
            on_evaluation=self._keep_accuracy,
        )

    def _show_text(self, text: str) -> None:
        self._print_throttled(text, always=True)

    def _show_setup(self, config: GnnRunConfig, graph: Graph) -> None:
        if not self._quiet:
            self._console.print(gnn_setup_table(config, graph))

    def _keep_accuracy(self, evaluation: Evaluation) -> None:
        self._accuracy = f"  validation {evaluation.val:.4f}  test {evaluation.test:.4f}"

    def _show_epoch(self, done: EpochLoss, elapsed_s: float) -> None:
        text = f"epoch {done.epoch + 1}/{self._epochs}  loss {done.loss:.4f}{self._accuracy}  {elapsed_s:.1f} s"
        self._print_throttled(text, always=done.epoch + 1 == self._epochs)

    def _print_throttled(self, text: str, *, always: bool) -> None:
        if self._status is not None:
            self._status.update(text)
        elif not self._quiet and (always or time.monotonic() - self._printed_at > _EVERY_S):
            self._printed_at = time.monotonic()
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._console.file.flush()


def gnn_setup_table(config: GnnRunConfig, graph: Graph) -> Table:
    """Return the table of the run's configuration."""
    model, shape = config.model, " -> ".join(map(str, config.model.widths))
    heads = f", {model.heads} heads" if model.kind == "gat" else ""
    mode = f"{config.mode}, staleness {config.staleness}" if config.mode == "async" else config.mode
    return key_value_table(
        {
            "graph": f"{graph.name}: {graph.vertices:,} vertices, {graph.edges:,} edges, {graph.classes} classes",
            "model": f"{model.kind} {shape}{heads}, dropout {model.dropout:g}",
            "servers": f"{config.servers} graph, {config.parameter_servers} parameter, {config.threads} threads each",
            "mode": mode,
            "training set": f"{graph.train_vertices:,} vertices",
        }
    )


def gnn_summary_table(summary: Mapping[str, Any], out: str | None) -> Table:
    """Return the table of the run's results."""
    epoch_s = summary["time_per_epoch_s"]
    counted_once = not summary["samples_lost"] and not summary["samples_duplicated"]
    cost = summary["cost"]
    rows = {
        "epochs": f"{summary['epochs']}"
        + (f", stopped: {summary['stopped_early']}" if summary["stopped_early"] else ""),
        "accuracy": f"test {summary['test_accuracy']:.4f}, validation {summary['val_accuracy']:.4f} "
        f"(after epoch {summary['best_epoch'] + 1})",
        "final loss": f"{summary['final_loss']:.6g}",
        "time": f"{summary['wall_s']:.2f} s" + (f", {epoch_s * 1e3:.1f} ms an epoch" if epoch_s else ""),
        "samples": f"{summary['samples']} training vertices (expected {summary['samples_expected']}), "
        + ("each counted once" if counted_once else "NOT each counted once"),
        "workers": f"{summary['workers']} ({summary['launcher']}), {summary['workers_lost']} lost, "
        f"{summary['relaunches']} tasks relaunched",
        "servers lost": f"{sum(len(recovery['lost']) for recovery in summary['recoveries'])}",
        "cost": f"${summary['cost_usd']:.6f} (servers {cost['servers_usd']:.6f}, workers {cost['workers_usd']:.6f}, "
        f"requests {cost['requests_usd']:.6f}), prices of {summary['prices']['as_of']}",
        "value": f"{summary['value']:.4g} per second and dollar",
        "files": out or "none (use --out to keep them)",
    }
    return key_value_table(rows)
