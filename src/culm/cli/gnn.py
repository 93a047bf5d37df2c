"""`culm gnn`: graph networks on graph servers and elastic workers."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from culm.cli.display import console_on
from culm.cli.failing import failing
from culm.cli.gnn_plan import gnn_plan
from culm.cli.gnn_show import Progress, ledger_table
from culm.cli.interrupt import interruptible, terminable
from culm.errors import UsageError
from culm.observe.folder import plain

if TYPE_CHECKING:
    from culm.gnn.api import Result

Number = int | None
Words = str | None

app = typer.Typer(help="Train graph networks on whole graphs: CPU servers and elastic workers.", no_args_is_help=True)


@app.command("run")
def run(
    graph: Annotated[str, typer.Option(metavar="FILE|gen:...", help="An npz, or as in gen:rmat,scale=16,degree=16.")],
    model: Annotated[str, typer.Option(help="gcn or gat.")] = "gcn",
    layers: Annotated[int, typer.Option(help="Graph convolutions.")] = 2,
    hidden: Annotated[Number, typer.Option(help="Width of hidden layers; default 16, gat 64.")] = None,
    heads: Annotated[Number, typer.Option(help="Attention heads of a gat; default 8.")] = None,
    dropout: Annotated[float, typer.Option(help="On the input of every layer.")] = 0.5,
    input_dropout: Annotated[float | None, typer.Option(help="On the features; default: as --dropout.")] = None,
    attention_dropout: Annotated[float | None, typer.Option(help="On a gat's edges; default: as --dropout.")] = None,
    lr: Annotated[float, typer.Option(help="Of Adam.")] = 0.01,
    weight_decay: Annotated[float, typer.Option(help="Of Adam.")] = 5e-4,
    servers: Annotated[int, typer.Option(help="Graph servers.")] = 1,
    parameter_servers: Annotated[int, typer.Option(help="Parameter servers; layers are spread over them.")] = 1,
    workers: Annotated[str, typer.Option(metavar="N|auto", help="Elastic workers; auto follows the queues.")] = "auto",
    intervals: Annotated[Number, typer.Option(help="Intervals of a server; default: by workers and size.")] = None,
    mode: Annotated[str, typer.Option(help="sync, pipe or async.")] = "sync",
    staleness: Annotated[int, typer.Option(help="async: passes that an interval may be ahead of the slowest.")] = 0,
    lookahead: Annotated[bool, typer.Option(help="async: stale weights are moved ahead by Adam's next steps.")] = True,
    launcher: Annotated[str, typer.Option(help="Where workers come from: local, ray or lambda.")] = "local",
    host: Annotated[str, typer.Option(help="Address of this machine under which workers reach it.")] = "127.0.0.1",
    epochs: Annotated[int, typer.Option(help="At most.")] = 200,
    seed: Annotated[int, typer.Option(help="Of initial weights and dropout.")] = 0,
    split_seed: Annotated[int, typer.Option(help="Of the split, for graphs without one.")] = 0,
    evaluate_every: Annotated[int, typer.Option(help="Epochs between two evaluations.")] = 10,
    patience: Annotated[int, typer.Option(help="Evaluations without progress before it stops; 0: never.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Epochs between two saved versions of the weights.")] = 10,
    normalize: Annotated[bool, typer.Option(help="Divide feature rows by their sum.")] = True,
    symmetrize: Annotated[bool, typer.Option("--symmetrize", help="Add missing reverse edges.")] = False,
    latency: Annotated[float, typer.Option(metavar="MS", help="Added to every task of a worker.")] = 0.0,
    kill: Annotated[list[str] | None, typer.Option(help="As in 'worker epoch=5' or 'server=1 epoch=9'.")] = None,
    instance: Annotated[str, typer.Option(help="Whose price the servers are billed at.")] = "c5n.2xlarge",
    threads: Annotated[Number, typer.Option(help="Threads of a graph server.")] = None,
    etcd: Annotated[
        Words, typer.Option(metavar="URL[,URL...]", help="Where servers meet; default: a private one.")
    ] = None,
    etcd_user: Annotated[str, typer.Option(metavar="NAME", help="Its password is in CULM_ETCD_PASSWORD.")] = "",
    etcd_ca: Annotated[str, typer.Option(metavar="FILE", help="Certificates of those who sign for etcd.")] = "",
    etcd_cert: Annotated[str, typer.Option(metavar="FILE", help="Client certificate.")] = "",
    etcd_key: Annotated[str, typer.Option(metavar="FILE", help="Its key.")] = "",
    suspect_after: Annotated[float, typer.Option(metavar="S", help="Until a server that hangs is replaced.")] = 10.0,
    dash: Annotated[bool, typer.Option("--dash", help="Show the run to browsers on this machine.")] = False,
    out: Annotated[Words, typer.Option(metavar="DIR", help="Folder for the run's files; must be empty.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing but errors.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, all else on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Train a graph network on a whole graph, with servers and workers as local processes."""
    with failing(debug=debug):
        from culm.gnn.api import train
        from culm.gnn.meeting import access_of

        console = console_on(stderr=json_)
        progress = Progress(console, epochs, quiet=quiet)
        with terminable(_ended), progress:
            result: Result = train(
                graph, model, layers=layers, hidden=hidden, heads=heads, dropout=dropout, input_dropout=input_dropout,
                attention_dropout=attention_dropout,
                lr=lr, weight_decay=weight_decay, servers=servers, parameter_servers=parameter_servers,
                workers=_workers(workers), intervals=intervals, mode=mode, staleness=staleness, launcher=launcher,
                lookahead=lookahead,
                epochs=epochs, seed=seed, split_seed=split_seed, evaluate_every=evaluate_every, patience=patience,
                checkpoint_every=checkpoint_every, normalize=normalize, symmetrize=symmetrize, latency_s=latency / 1e3,
                kills=tuple(kill or ()), instance=instance, threads=threads, host=host, out=out,
                etcd=access_of(etcd, user=etcd_user, ca=etcd_ca, cert=etcd_cert, key=etcd_key),
                suspect_after=suspect_after, dash=dash, watcher=progress.watcher(),
                runner=lambda work: interruptible(work, _ended),
            )  # fmt: skip
        if not quiet:
            console.print(ledger_table(result.summary, out))
        if json_:
            print(json.dumps(plain(result.summary)))


app.command("plan")(gnn_plan)


def _ended(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else "terminated"


def _workers(text: str) -> int | str:
    if text == "auto" or text.lstrip("-").isdecimal():
        return text if text == "auto" else int(text)
    raise UsageError(f"--workers {text!r}: give a number of at least 1, or auto")
