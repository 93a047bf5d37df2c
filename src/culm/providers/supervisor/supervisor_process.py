"""The supervisor process of a run: owns the fork server, the private etcd and the nodes.

    launcher ──socket── supervisor ──pipe── fork server ──fork── nodes
    culm attach ──────┘          └── etcd

It starts the fork server first and imports the rest of culm while the fork server imports torch.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

from culm.providers.fork_server_process import ForkServerProcess


def main(window: int, launcher: int, captures_output: int) -> None:
    """Supervise one run. `window`: descriptor of the socket to the launcher. `launcher`: its process id.

    With `captures_output`, the supervisor reads what user code prints and passes it on to the windows; else nodes print
    to the streams of this process, which are those of the launcher.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    reads, writes = os.pipe() if captures_output else (None, None)
    fork_server = ForkServerProcess(stdout=writes, stderr=writes)
    if writes is not None:
        os.close(writes)
    importlib.import_module("culm.providers.supervisor.run_supervisor").main(window, launcher, fork_server, reads)


if __name__ == "__main__":
    # Run as a module this file is __main__; a test may have imported it already.
    importlib.import_module("culm.providers.supervisor.supervisor_process").main(*map(int, sys.argv[1:]))
