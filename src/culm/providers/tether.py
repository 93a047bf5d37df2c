"""Run a program that ends with the process that asked for it, however that comes about: tether.py PID PROGRAM ARGS...

Started by its path, in an interpreter of its own: code between fork and exec is unsafe where there are threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, program: list[str]) -> None:
    """The kernel's promise outlives exec."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # else it was gone before the promise was made
        os.execv(program[0], program)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
