"""How many GPUs the machines of a launch have, as far as the request for them says it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from culm.errors import UsageError
from culm.market import load_catalogue

_GRES = re.compile(r"gpu(?::[\w.-]*[A-Za-z_.-][\w.-]*)?(?::(\d+))?(?:\(.*\))?")
"""Generic resources of Slurm, as in gpu, gpu:4 or gpu:a100:4."""


def gpus_of_machines(options: Mapping[str, str], instances: Sequence[str]) -> int | None:
    """GPUs of each machine; None: not known. Raises UsageError if the named instance types differ.

    `options`: those of the provider. `instances`: types of the catalogue, or accelerators with a number as in A100:8.
    """
    if options.get("gpus", "").isdecimal():
        return int(options["gpus"])
    if (gres := _GRES.fullmatch(options.get("gres", ""))) is not None:
        return int(gres[1] or 1)
    counts = {name: count for name in instances if (count := _gpus_of_instance(name)) is not None}
    if len(set(counts.values())) > 1:
        words = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise UsageError(
            f"--instance names machines with different numbers of GPUs ({words}), and all nodes of a run have as many "
            "workers: name types with the same number, or say how many are used with --workers-per-node"
        )
    return next(iter(counts.values()), None)


def _gpus_of_instance(name: str) -> int | None:
    _, colon, number = name.partition(":")
    if colon:
        return int(number) if number.isdecimal() else None
    try:
        return load_catalogue().find(name).gpu_count if name else None
    except UsageError:
        return None
