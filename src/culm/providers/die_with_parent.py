"""Run a program that is killed when the process that started it ends: die_with_parent.py PID PROGRAM ARGS...

Started by its path in an interpreter of its own, because code between fork and exec is unsafe in a threaded process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, program: list[str]) -> None:
    """Ask the kernel for SIGKILL at the end of the parent, then replace this process by the program."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # else the parent ended before the request
        os.execv(program[0], program)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
