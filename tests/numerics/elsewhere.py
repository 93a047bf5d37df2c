"""Draws for those who do not know where they come from."""

from __future__ import annotations

import random

import numpy as np


def draw() -> float:
    return random.random() + float(np.random.uniform(0.5, 1.0))
