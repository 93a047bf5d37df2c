"""Strategies: what a run keeps to survive the loss of nodes, and what it does after a loss.

`Strategy` is the contract. A user's own class is named as "module:Class", or added with `register`.
"""

from culm.strategies.registry import check_name, get, known_names, reference_to, register
from culm.strategies.strategy import RunShape, Strategy, StrategyChoice

__all__ = ["RunShape", "Strategy", "StrategyChoice", "check_name", "get", "known_names", "reference_to", "register"]
