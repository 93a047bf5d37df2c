"""A node is forked out of a process that has everything imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

AFTER_THE_FORK = """
import sys
from culm.providers import nursery
nursery._preload()
before = set(sys.modules)
import torch
from culm import Job
from culm.testing import reference
job = Job(
    layers=[torch.nn.Linear(2, 2)], loss=torch.nn.functional.mse_loss, optimizer=torch.optim.AdamW,
    data=[(torch.zeros(2), torch.zeros(2))], global_batch=1, micro_batch=1, steps=1,
)
reference(job)
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("culm.")))
"""


@pytest.mark.real
def test_a_node_imports_next_to_nothing_of_its_own() -> None:
    made = subprocess.run([sys.executable, "-c", AFTER_THE_FORK], capture_output=True, text=True, check=True)
    imported = made.stdout.split()
    assert len(imported) < 20, imported
