"""Published tables next to simulated ones. By name:

bamboo-table3   Bamboo's simulation of BERT-Large, with its authors' model
bamboo-table2   Bamboo's Table 2: on demand against Bamboo on spot, six models, three preemption rates
slipstream      re-routing against redundancy and templates on GPT-3 sizes
oobleck         three systems replayed with the measured speeds of Oobleck's artefact
best-way        the cheapest way to train two models on two spot pools
"""

from __future__ import annotations

from collections.abc import Callable

from culm.sim.papers import bamboo_tables, best_way, oobleck_table, slipstream_tables
from culm.sim.papers.paper_table import PaperTable, PaperTableSet, TableRequest

__all__ = ["PAPERS", "PaperTable", "PaperTableSet", "TableRequest"]

PAPERS: dict[str, Callable[[TableRequest], PaperTable | PaperTableSet]] = {
    "bamboo-table3": bamboo_tables.table3,
    "bamboo-table2": bamboo_tables.table2,
    "slipstream": slipstream_tables.slipstream_tables,
    "oobleck": oobleck_table.oobleck_table,
    "best-way": best_way.best_way,
}
