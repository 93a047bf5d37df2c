"""Planning: what a model costs, where to cut it, and which shape of pipelines to train it with.

    profile     what each layer costs, measured or estimated; a JSON file
    partition   layers into stages: the fastest cut that the memory allows
    predict     a shape, cut and timed as a plan
    choose      of all shapes the best, and why

Everything here is a pure function of values: no torch, no clock, no sockets.
"""

from culm.plan.choose import BANDWIDTH, Choice, choose
from culm.plan.partition import Cuts, InFlight, one_f_one_b, partition, spans, stage_memory
from culm.plan.predict import Candidate, Shape, live
from culm.plan.profile import LayerCost, Profile

__all__ = [
    "BANDWIDTH",
    "Candidate",
    "Choice",
    "Cuts",
    "InFlight",
    "LayerCost",
    "Profile",
    "Shape",
    "choose",
    "live",
    "one_f_one_b",
    "partition",
    "spans",
    "stage_memory",
]
