"""The benchmarks are no part of the installed package: they are imported from the root of the checkout."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
