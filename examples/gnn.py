"""Train a graph neural network on a whole graph with bounded asynchrony, while processes are killed.

    python examples/gnn.py                      a generated graph of 4,096 vertices, half a minute
    python examples/gnn.py path/to/cora.npz     a graph of your own

The same from the command line:

    culm gnn run --graph gen:rmat,scale=12 --hidden 32 --servers 2 --mode async --staleness 1 --out runs/gnn
"""

import sys

import culm.gnn


def main() -> None:
    graph = culm.gnn.load(sys.argv[1] if len(sys.argv) > 1 else "gen:rmat,scale=12")

    result = culm.gnn.train(
        graph,
        "gcn",  # or "gat", or a torch_geometric.nn.GCN or GAT, whose shape and weights are used
        hidden=32,
        dropout=0.1,
        epochs=60,
        servers=2,  # graph servers: each owns a part of the graph (METIS)
        workers=2,  # elastic workers: stateless, replaced when lost; "auto" adapts their number to the task queues
        mode="async",  # "sync" and "pipe" train exactly what one process would
        staleness=1,
        kills=["worker epoch=10", "server=1 epoch=20", "parameter=0 epoch=30"],  # simulated preemptions
    )

    print(f"test accuracy {result.test_accuracy:.3f} after {result.summary['epochs']} epochs")
    print(f"{result.summary['time_per_epoch_s'] * 1e3:.1f} ms an epoch, ${result.summary['cost_usd']:.5f}")
    for recovery in result.summary["recoveries"]:
        pause = sum(recovery[part] for part in ("detect_ms", "decide_ms", "move_ms", "redo_ms"))
        print(f"lost {', '.join(recovery['lost'])}, back at epoch {recovery['step']}, caught up after {pause:.0f} ms")
    print(f"weights for torch_geometric.nn.GCN: {', '.join(result.weights)}")


if __name__ == "__main__":
    main()
