"""The spot market: what instances cost, and when nodes are granted and lost.

    csv_rows           rows of a CSV file with their line numbers
    catalogue          dated prices
    rental_cost        what rented nodes cost: the ledger of dollars
    cost_record        the cost of a run as data
    price_series       spot prices that move during a run
    price_listing      lists, filters and compares them
    skypilot_prices    reads price catalogues that SkyPilot publishes
    market_trace       the common form of all market traces
    trace_reader       reads market traces from files of every published format
    trace_writer       writes them
    trace_statistics   summarizes them in a few numbers
    trace_generator    generates them from a seed, and the market presets
    market_fit         fits a generator to a given market trace
    trace_window       a part of a trace, from any time on
    chart              values over time, as SVG or text

Everything here is a pure function of values: no torch, no clock, no sockets.
"""

from culm.market.catalogue import PriceCatalogue, PricedInstance, load_catalogue
from culm.market.market_fit import fit_market
from culm.market.market_trace import MarketTrace, NodeEvent
from culm.market.trace_generator import MarketModel, generate_trace
from culm.market.trace_reader import read_trace
from culm.market.trace_statistics import TraceStatistics, compute_statistics
from culm.market.trace_writer import format_trace

__all__ = [
    "MarketModel",
    "MarketTrace",
    "NodeEvent",
    "PriceCatalogue",
    "PricedInstance",
    "TraceStatistics",
    "compute_statistics",
    "fit_market",
    "format_trace",
    "generate_trace",
    "load_catalogue",
    "read_trace",
]
