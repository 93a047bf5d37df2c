"""Read what a run has cost from its folder: complete, running or cut off."""

from __future__ import annotations

from culm.market.cost_record import CostRecord
from culm.market.rental_cost import Rental
from culm.observe.report.load_run import RunFolderReader


def read_cost(location: str) -> CostRecord | None:
    """The account of a run; None: it has none, because no node had a price.

    Raises UsageError if there is no such folder, or if it is not that of a run.
    """
    return RunFolderReader(location, allow_empty=True).read().cost


def earlier_rentals(location: str) -> tuple[Rental, ...]:
    """The rentals of a run that is resumed, with those before it; empty if no node had a price."""
    record = read_cost(location)
    return () if record is None else record.before_resume()
