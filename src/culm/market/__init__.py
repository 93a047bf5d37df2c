"""The market: what machines cost, and how they come and go.

    table       rows of a CSV file that know their line
    catalogue   dated prices
    trace       how machines came and went, in one form
    reading     ... from files of every published form
    writing     ... into files
    statistics  ... in a few numbers
    generate    ... out of a seed
    fit         a generator that is like a given trace
    chart       numbers over time, as a picture

Everything here is a pure function of values: no torch, no clock, no sockets.
"""

from culm.market.catalogue import Catalogue, Machine, catalogue
from culm.market.generate import Market, generate
from culm.market.reading import read_trace
from culm.market.statistics import Statistics, statistics
from culm.market.trace import Event, Trace

__all__ = [
    "Catalogue",
    "Event",
    "Machine",
    "Market",
    "Statistics",
    "Trace",
    "catalogue",
    "generate",
    "read_trace",
    "statistics",
]
