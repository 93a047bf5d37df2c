"""How long `culm bench resilience` looks, and at what."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks import resilience_overhead
from benchmarks.resilience_losses import Scene
from benchmarks.resilience_overhead import Effort
from culm.cluster.setup import STRATEGIES as ABLE

ORDER = ("none", "checkpoint", "migrate", "drop", "templates", "shadow-lazy", "shadow", "reroute", "auto")
STRATEGIES = tuple(name for name in ORDER if name in ABLE)
NOTICE_STEPS = 2.0
"""What `migrate` hears before a loss: without notice it is `checkpoint` by another name. The others hear nothing."""
RESTART_STEPS, WRITE_STEPS, BAMBOO_LOSS_EVERY = 17.0, 11.0, 45.0
"""Of the baseline that Bamboo's authors measured: a step took 8.3 s on 64 nodes, a restart with loading 138 s, a write
89 s."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long the bench looks, and at what."""

    scene: Scene
    strategies: tuple[str, ...] = STRATEGIES
    every: tuple[int, ...]
    """Steps between two checkpoints that the baseline is tuned over ..."""
    waits: tuple[bool, ...]
    """... and whether a restart waits for a node."""
    pause_kills: int
    pause_unit_s: float | None
    detect_kills: int = 0
    grid: tuple[tuple[float, float], ...] = ()
    """(seconds of an action, steps between two losses) of each cell."""
    bamboo: Scene | None
    effort: Effort = resilience_overhead.FULL
    real: Plan | None = None


_SCENE = Scene(pipelines=4, stages=4, each=4, unit_s=2 / 21, steps=40)
"""Steps of two seconds, 21 actions long; nine of them are bubbles, in which peers run a lost node's micro-batches."""
_REAL = Scene(pipelines=4, stages=3, each=4, unit_s=None, steps=30)
FULL = Plan(
    scene=_SCENE,
    every=(1, 2, 4),
    waits=(True, False),
    pause_kills=40,
    pause_unit_s=0.05,
    detect_kills=40,
    grid=tuple((unit_s, every) for unit_s in (0.01, 0.025, 0.05) for every in (5.0, 10.0, 20.0)),
    bamboo=replace(_SCENE, unit_s=0.02, steps=90, loss_every=BAMBOO_LOSS_EVERY),
    real=Plan(
        scene=_REAL,
        strategies=("checkpoint", "templates", "shadow", "reroute"),
        every=(1, 2),
        waits=(True,),
        pause_kills=12,
        pause_unit_s=None,
        bamboo=replace(_REAL, steps=90, loss_every=BAMBOO_LOSS_EVERY),
    ),
)
QUICK = Plan(
    scene=Scene(pipelines=4, stages=3, each=3, unit_s=0.025, steps=14),
    every=(4,),
    waits=(False,),
    pause_kills=2,
    pause_unit_s=0.03,
    detect_kills=4,
    bamboo=None,
    effort=resilience_overhead.QUICK,
)
