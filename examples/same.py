"""Did two runs learn the same bits, weights and optimizer state? `python examples/same.py runs/a runs/b`."""

import json
import sys
from pathlib import Path

first, second = (json.loads((Path(folder) / "summary.json").read_text()) for folder in sys.argv[1:3])
same = first["state_sha256"] == second["state_sha256"]
print(f"final weights identical to the undisturbed run: {'yes' if same else 'no'}")
sys.exit(0 if same else 1)
