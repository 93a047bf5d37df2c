"""Random draws for layers in another file, which does not import `random` or numpy."""

from __future__ import annotations

import random

import numpy as np


def random_factor() -> float:
    return random.random() + float(np.random.uniform(0.5, 1.0))
