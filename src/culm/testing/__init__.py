"""Public tools to test jobs with: the reference loop, and a whole cluster in one process that can be hurt."""

from __future__ import annotations

from culm.cluster.blows import Kill
from culm.testing.cluster import Cluster, Script, Simulated, simulate
from culm.testing.faults import Faults
from culm.testing.history import History
from culm.testing.loop import Deadlock, VirtualClock, run_virtual
from culm.testing.reference import Trained, reference
from culm.testing.survive import Survived, survives

__all__ = [
    "Cluster",
    "Deadlock",
    "Faults",
    "History",
    "Kill",
    "Script",
    "Simulated",
    "Survived",
    "Trained",
    "VirtualClock",
    "reference",
    "run_virtual",
    "simulate",
    "survives",
]
