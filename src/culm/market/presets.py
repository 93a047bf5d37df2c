"""Markets by name: what `culm trace fit --zones 3` made of two published traces of AWS spot pools (2020 and 2021)."""

from __future__ import annotations

from culm.market.generate import Market

P3 = Market(nodes=32, hours=11.37, rate=0.638, group=2.2, zones=3, available=0.742, grant=1.92, tail=1.0)
"""A pool of p3 kept at 32: 24 alive on average, 61 % of them lost in an hour, half of them within the first hour."""
G4DN = Market(nodes=24, hours=10.77, rate=0.564, group=1.57, zones=3, available=0.529, grant=1.56, tail=0.915)
"""A pool of g4dn kept at 24: 13 alive on average, 55 % of them lost in an hour."""

PRESETS = {"p3": P3, "g4dn": G4DN}
