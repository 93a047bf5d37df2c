"""A program that has a rank below it until it is ended."""

import signal

from benchmarks.ranks import Ranks


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs the tests may ignore it, and all below it do
    with Ranks(1) as ranks:
        print(*ranks.pids, flush=True)
        input()


if __name__ == "__main__":
    main()
