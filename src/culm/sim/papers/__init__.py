"""Published tables, ours beside them. By name:

bamboo-table3   the simulation of BERT-Large, with its authors' model
bamboo-table2   on demand against Bamboo on spot, six models, three rates
"""

from __future__ import annotations

from collections.abc import Callable

from culm.sim.papers import bamboo, best_way, oobleck, slipstream
from culm.sim.papers.table import Book, Request, Sheet

__all__ = ["PAPERS", "Book", "Request", "Sheet"]

PAPERS: dict[str, Callable[[Request], Sheet | Book]] = {
    "bamboo-table3": bamboo.table3,
    "bamboo-table2": bamboo.table2,
    "slipstream": slipstream.slipstream,
    "oobleck": oobleck.oobleck,
    "best-way": best_way.best_way,
}
