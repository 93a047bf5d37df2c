"""A process that coordinates returns the memory that it has freed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import sys
from culm.providers.allocator import return_freed_memory
from culm.soak.process_samples import own_memory
from pathlib import Path

if sys.argv[1] == "return":
    return_freed_memory()
bytearray(16 << 20)  # by default, blocks up to this size come from the heap from now on
before = own_memory(Path("/proc/self/smaps_rollup").read_text())
held = [bytearray(1 << 20) for _ in range(15)]
assert own_memory(Path("/proc/self/smaps_rollup").read_text()) - before > 12 << 20
del held
print(own_memory(Path("/proc/self/smaps_rollup").read_text()) - before >> 20)
"""


def kept_mb(how: str) -> int:
    """MB that a process keeps after it has freed 15 MB."""
    run = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc of Linux")
def test_memory_that_was_needed_once_is_returned() -> None:
    assert kept_mb("by default") > 8
    assert kept_mb("return") < 2
