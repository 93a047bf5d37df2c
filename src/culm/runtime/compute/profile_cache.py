"""Measured profiles, kept per job and machine, so that a second run of a job starts without measuring again."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from culm.errors import PlanError
from culm.plan.model.model_profile import Profile
from culm.runtime.compute.device import fingerprint, select_device
from culm.runtime.compute.layer_profiler import ProgressCallback, profile_layers
from culm.version import __version__

if TYPE_CHECKING:
    from culm.job import Job

_log = logging.getLogger("culm")


def cached_profile(job: Job, inspected: Profile, progress: ProgressCallback = lambda *_: None) -> Profile:
    """The measured profile of a job on this machine: from the cache, or measured and stored there.

    `inspected`: the estimate from `check_model`. A cached profile is used only if machine, libraries, threads, version
    of culm, precision, micro-batch and the names and sizes of all layers are the same.
    """
    path = profile_path(job, inspected)
    if path.exists():
        try:
            return Profile.load(path)
        except PlanError as error:
            _log.warning("the cached profile is measured again: %s", error)
    profile = profile_layers(job, reuse_equal=True, progress=progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    except (OSError, PlanError) as error:
        _log.warning("the profile is not cached: %s", error)
    return profile


def profile_path(job: Job, inspected: Profile) -> Path:
    """The file of the job's profile, below $XDG_CACHE_HOME or ~/.cache."""
    sizes = [
        (layer.name, layer.parameter_bytes, layer.activation_bytes, layer.output_bytes) for layer in inspected.layers
    ]
    facts = (
        __version__,
        platform.node(),
        fingerprint(job),
        str(select_device(job)),
        job.precision,
        job.micro_batch,
        job.threads,
        sizes,
    )
    key = hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "culm" / "profiles" / f"{key}.json"
