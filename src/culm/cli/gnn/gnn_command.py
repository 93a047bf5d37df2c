"""`culm gnn`: graph neural networks on graph servers and elastic workers."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.cli.etcd_options import EtcdInsecure
from culm.cli.gnn.gnn_display import GnnProgressDisplay, gnn_summary_table
from culm.cli.gnn.gnn_plan_command import gnn_plan
from culm.cli.progress_display import make_console
from culm.cli.signal_handling import run_until_signal, sigterm_raises
from culm.errors import UsageError
from culm.observe.writers.run_folder import to_plain_json

if TYPE_CHECKING:
    from culm.gnn.train_gnn import GnnResult

Number = int | None
Words = str | None

app = typer.Typer(
    help="Train graph neural networks on whole graphs with CPU servers and elastic workers.", no_args_is_help=True
)


@app.command("run")
def run(
    graph: Annotated[str, typer.Option(metavar="FILE|gen:...", help="An npz file, or gen:rmat,scale=16,degree=16.")],
    model: Annotated[str, typer.Option(help="gcn or gat.")] = "gcn",
    layers: Annotated[int, typer.Option(help="Graph convolutions.")] = 2,
    hidden: Annotated[Number, typer.Option(help="Width of hidden layers; default 16, gat 64.")] = None,
    heads: Annotated[Number, typer.Option(help="Attention heads of a gat; default 8.")] = None,
    dropout: Annotated[float, typer.Option(help="On the input of every layer.")] = 0.5,
    input_dropout: Annotated[float | None, typer.Option(help="On the features; default: as --dropout.")] = None,
    attention_dropout: Annotated[float | None, typer.Option(help="On a gat's edges; default: as --dropout.")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 0.01,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of Adam.")] = 5e-4,
    servers: Annotated[int, typer.Option(help="Graph servers.")] = 1,
    parameter_servers: Annotated[int, typer.Option(help="Parameter servers; layers are spread over them.")] = 1,
    workers: Annotated[str, typer.Option(metavar="N|auto", help="Elastic workers; auto: by queue length.")] = "auto",
    intervals: Annotated[Number, typer.Option(help="Intervals per server; default: by workers and size.")] = None,
    mode: Annotated[str, typer.Option(help="sync, pipe or async.")] = "sync",
    staleness: Annotated[int, typer.Option(help="async: passes that an interval may run ahead.")] = 0,
    lookahead: Annotated[bool, typer.Option(help="async: predict stale weights with Adam's moments.")] = True,
    launcher: Annotated[str, typer.Option(help="Launcher of workers: local, ray or lambda.")] = "local",
    host: Annotated[str, typer.Option(help="Address of this machine under which workers reach it.")] = "127.0.0.1",
    epochs: Annotated[int, typer.Option(help="Maximum training epochs.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of initial weights and dropout.")] = 0,
    split_seed: Annotated[int, typer.Option(help="Seed of the split, for graphs without one.")] = 0,
    evaluate_every: Annotated[int, typer.Option(help="Training epochs between two evaluations.")] = 10,
    patience: Annotated[int, typer.Option(help="Stop after this many evaluations without progress; 0: never.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Training epochs between two checkpoints.")] = 10,
    normalize: Annotated[bool, typer.Option(help="Divide feature rows by their sum.")] = True,
    symmetrize: Annotated[bool, typer.Option("--symmetrize", help="Add missing reverse edges.")] = False,
    latency: Annotated[float, typer.Option(metavar="MS", help="Delay added to every worker task.")] = 0.0,
    kill: Annotated[
        list[str] | None, typer.Option(help="Kill a process: 'worker epoch=5', 'server=1 epoch=9'.")
    ] = None,
    instance: Annotated[str, typer.Option(help="Instance type whose price the servers are billed at.")] = "c5n.2xlarge",
    threads: Annotated[Number, typer.Option(help="Threads of a graph server.")] = None,
    etcd: Annotated[
        Words, typer.Option(metavar="URL[,URL...]", help="etcd of the run; default: a private one.")
    ] = None,
    etcd_user: Annotated[str, typer.Option(metavar="NAME", help="User; the password is in CULM_ETCD_PASSWORD.")] = "",
    etcd_ca: Annotated[str, typer.Option(metavar="FILE", help="CA certificates of etcd.")] = "",
    etcd_cert: Annotated[str, typer.Option(metavar="FILE", help="Client certificate.")] = "",
    etcd_key: Annotated[str, typer.Option(metavar="FILE", help="Key of the client certificate.")] = "",
    etcd_insecure: EtcdInsecure = False,
    suspect_after: Annotated[
        float, typer.Option(metavar="S", help="Seconds until a hanging server is replaced.")
    ] = 10.0,
    dash: Annotated[bool, typer.Option("--dash", help="Show the run to browsers on this machine.")] = False,
    out: Annotated[Words, typer.Option(metavar="DIR", help="Folder for the run's files; must be empty.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing but errors.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON; everything else goes to stderr.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train a graph neural network on a whole graph, with servers and workers as local processes."""
    with report_errors(debug=debug):
        from culm.gnn.server.gnn_run_store import resolve_etcd_access
        from culm.gnn.train_gnn import train

        console = make_console(stderr=json_)
        progress = GnnProgressDisplay(console, epochs, quiet=quiet)
        with sigterm_raises(_signal_message), progress:
            result: GnnResult = train(
                graph, model, layers=layers, hidden=hidden, heads=heads, dropout=dropout, input_dropout=input_dropout,
                attention_dropout=attention_dropout,
                lr=lr, weight_decay=weight_decay, servers=servers, parameter_servers=parameter_servers,
                workers=_parse_workers(workers), intervals=intervals, mode=mode, staleness=staleness, launcher=launcher,
                lookahead=lookahead,
                epochs=epochs, seed=seed, split_seed=split_seed, evaluate_every=evaluate_every, patience=patience,
                checkpoint_every=checkpoint_every, normalize=normalize, symmetrize=symmetrize, latency_s=latency / 1e3,
                kills=tuple(kill or ()), instance=instance, threads=threads, host=host, out=out,
                etcd=resolve_etcd_access(
                    etcd, user=etcd_user, ca=etcd_ca, cert=etcd_cert, key=etcd_key, insecure=etcd_insecure
                ),
                suspect_after=suspect_after, dash=dash, callbacks=progress.callbacks(),
                runner=lambda coroutine: run_until_signal(coroutine, _signal_message),
            )  # fmt: skip
        if not quiet:
            console.print(gnn_summary_table(result.summary, out))
        if json_:
            print(json.dumps(to_plain_json(result.summary)))


app.command("plan")(gnn_plan)


def _signal_message(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else "terminated"


def _parse_workers(text: str) -> int | str:
    if text == "auto" or text.lstrip("-").isdecimal():
        return text if text == "auto" else int(text)
    raise UsageError(f"--workers {text!r}: give a number of at least 1, or auto")
