"""Tables of machines and their prices."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from culm.machines.machine_provider import MachineProvider, MachineRequest
from culm.text_format import count_noun


def offer_table(provider: MachineProvider, requests: Sequence[MachineRequest], count: int) -> Table:
    """The kinds of machines that a launch may use, with their prices for one and for all machines."""
    table = Table(box=box.SIMPLE, title=f"{count_noun(count, 'machine')} on {provider.name}", title_justify="left")
    for heading in ("machine", "market", "zone", "one", "all"):
        table.add_column(heading, justify="right" if heading in ("one", "all") else "left")
    for request in requests:
        price = provider.price(request)
        prices = [price_words(price), price_words(None if price is None else price * count)]
        market = request.market if provider.costs_money else ""
        table.add_row(request.instance or "as the provider has", market, request.zone or "any", *prices)
    return table


def price_words(usd_per_h: float | None) -> str:
    """A price for people."""
    if usd_per_h is None:
        return "price not known"
    return "free" if usd_per_h == 0 else f"${usd_per_h:.3f}/h"
