"""Start a fork server. Imports the standard library only, so that a supervisor can start it before its own imports."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import Pipe

from culm.providers.child_environment import environment_without_secrets


class ForkServerProcess:
    """A fork server that was started: its process, our end of the pipe to it, and the memory it shares with nodes.

    It and the nodes print to the descriptors `stdout` and `stderr`; default: those of this process.
    """

    def __init__(self, *, stdout: int | None = None, stderr: int | None = None) -> None:
        self.pipe, child_end = Pipe()
        self.table_descriptor = os.memfd_create("culm-processes")
        """Memory of the ProcessTable."""
        passed = [child_end.fileno(), self.table_descriptor]
        self.process = subprocess.Popen(
            # Unbuffered: output of a node that is killed must not be lost.
            [sys.executable, "-u", "-m", "culm.providers.fork_server", *map(str, passed)],
            pass_fds=passed,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment_without_secrets(),
        )
        child_end.close()
