"""Planning: what a model costs, where to cut it, and which shape of pipelines to train it with.

    profile     what each layer costs, measured or estimated; a JSON file
    partition   layers into stages: the fastest cut that the memory allows
    predict     a shape, cut and timed as a plan
    choose      of all shapes the best, and why
    haste       gradients that others wait for, before the weights are done

    failures    a step to be planned although slots have failed
    bound       how short it could be at best
    listing     one pass of list scheduling
    turns       a dry run as flat lists
    period      the time of a step when stages step on their own clocks
    alike       pipelines that are alike are planned once
    greedy      the best of several passes, and its gap to the bound
    optimal     the shortest plan there is, by constraint programming
    normalize   where failures hurt least, and who moves to get them there
    ahead       plans made once, and ahead of the failures
    remedies    every way to go on without the failed slots, timed
    reconfigure whether to make something else of the nodes now
    relayout    another shape for the same model; seating: who sits where in it, and which layers move
    reshape     when a run asks that, with what it knows
    explain     in words

Everything here is a pure function of values: no torch, no clock, no sockets.
"""

from culm.plan.ahead import Plans
from culm.plan.bound import bound
from culm.plan.choose import BANDWIDTH, Choice, choose
from culm.plan.explain import explain
from culm.plan.failures import Case, Memory, Slot, absorbed
from culm.plan.greedy import Rerouted, greedy
from culm.plan.normalize import Move, Normal, Spread, normalize, placed, spread
from culm.plan.optimal import optimal
from culm.plan.partition import Cuts, InFlight, one_f_one_b, partition, spans, stage_memory
from culm.plan.period import period
from culm.plan.predict import Candidate, Shape, live
from culm.plan.profile import LayerCost, Profile
from culm.plan.remedies import Remedy, remedies

__all__ = [
    "BANDWIDTH",
    "Candidate",
    "Case",
    "Choice",
    "Cuts",
    "InFlight",
    "LayerCost",
    "Memory",
    "Move",
    "Normal",
    "Plans",
    "Profile",
    "Remedy",
    "Rerouted",
    "Shape",
    "Slot",
    "Spread",
    "absorbed",
    "bound",
    "choose",
    "explain",
    "greedy",
    "live",
    "normalize",
    "one_f_one_b",
    "optimal",
    "partition",
    "period",
    "placed",
    "remedies",
    "spans",
    "spread",
    "stage_memory",
]
