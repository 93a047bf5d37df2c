"""Counts of one layer of a model that is planned without running it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCounts:
    """Counts of one layer for one sample. Numbers of values, not bytes."""

    name: str
    parameters: int
    flop: float
    """FLOP of the forward in products with parameters; each half of the backward has as many."""
    saved_values: float
    """Values kept for the backward."""
    output_values: float
    """Values sent to the next layer."""
    parameterless_flop: float = 0.0
    """FLOP of the forward in products without parameters (attention); the backward has twice as many, all in I."""
    idle_parameters: int = 0
    """Parameters of the experts that a token is not routed to."""
