"""Public tools for testing jobs: the reference loop, and a simulated cluster in one process with fault injection."""

from __future__ import annotations

from culm.cluster.node_faults import KillNode
from culm.device.simulated_streams import SimulatedDevice
from culm.testing.fault_schedule import Faults
from culm.testing.reference_loop import ReferenceResult, reference
from culm.testing.run_history import RunHistory
from culm.testing.simulated_cluster import Cluster, Script, SimulatedRun, simulate
from culm.testing.survival_check import SurvivedRun, survives
from culm.testing.virtual_time import Deadlock, VirtualClock, run_virtual

__all__ = [
    "Cluster",
    "Deadlock",
    "Faults",
    "KillNode",
    "ReferenceResult",
    "RunHistory",
    "Script",
    "SimulatedDevice",
    "SimulatedRun",
    "SurvivedRun",
    "VirtualClock",
    "reference",
    "run_virtual",
    "simulate",
    "survives",
]
