"""A program that keeps a rank process running until it is ended."""

import signal

from benchmarks.pipeline.rank_processes import RankProcesses


def main() -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # the test runner may ignore SIGINT, which children inherit
    with RankProcesses(1) as ranks:
        print(*ranks.pids, flush=True)
        input()


if __name__ == "__main__":
    main()
