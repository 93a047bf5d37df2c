"""The market: what machines cost, and how they come and go.

    table       rows of a CSV file that know their line
    catalogue   dated prices

Everything here is a pure function of values: no torch, no clock, no sockets.
"""

from culm.market.catalogue import Catalogue, Machine, catalogue

__all__ = ["Catalogue", "Machine", "catalogue"]
