"""Summary: the result of a run, with the keys of summary.json as typed fields. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from culm.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


class RecoveryFields(TypedDict):
    """One recovery, as listed in `Summary.recoveries`."""

    step: int
    lost: list[int]
    """Nodes that were lost."""
    detect_ms: float
    decide_ms: float
    move_ms: float
    redo_ms: float
    redone_actions: int
    source: str
    """Where the lost state came from: peers, shadow, checkpoint or drop."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run. The fields up to `config` are the keys of summary.json."""

    steps: int
    """Steps of the job that are done, including those before a resume."""
    samples: int
    """Samples trained on in this run, each counted once."""
    samples_expected: int
    samples_lost: int
    samples_duplicated: int
    wall_s: float
    """Seconds from the first step to the last."""
    goodput: float
    """Samples per second over `wall_s`."""
    strategy: str
    pipelines: int
    stages: int
    schedule: str
    exact: bool
    final_loss: float | None
    """Loss of the last step; None: no step was run."""
    weights_sha256: str
    """Digest of all parameters."""
    state_sha256: str
    """Digest of all parameters, buffers and optimizer states."""
    preemptions: int
    """Nodes that were lost during the run."""
    recoveries: list[RecoveryFields]
    cost_usd: float
    """Dollars of all nodes from when they were rented until the end, with those before a resume; 0: no node had a
    price."""
    checkpoints: list[int]
    """Steps of the checkpoints that were written."""
    cost_on_demand_usd: float | None = None
    """What the same useful steps cost on nodes that are rented on demand and never lost; None: not known."""
    start_s: float = 0.0
    """Seconds from the launch to the first step."""
    samples_redone: int = 0
    """Samples of steps that were run again after a restart from a checkpoint."""
    skipped_steps: int = 0
    """Steps without an update because the loss was not finite."""
    corruptions: int = 0
    """Damaged frames and replicas that were found and repaired."""
    at_risk_s: float = 0.0
    """Seconds in which some layer had only one holder."""
    evaluations: dict[int, float] = field(default_factory=dict)
    """Loss on the evaluation set, by the step after which it was computed."""
    memory: dict[str, int] = field(default_factory=dict)
    """Largest values of a worker: peak_rss_bytes, kept_bytes, peak_device_bytes (tensors on its GPU), peak_slab_bytes
    (page-locked host memory for its GPU), live_activations."""
    bubble_share: float | None = None
    """Share of the forwards of shadow replicas that ran in pipeline bubbles; None: there were none."""
    schedule_prediction: dict[str, float] = field(default_factory=dict)
    """Under the schedule `planned`: step_s, the predicted seconds of a step; of_bubble_free, the speed as a share of
    that without bubbles; gain_over_1f1b, by which share a step is shorter than with 1f1b; and, if all stages make the
    optimizer step together (clip_norm, skipped steps), synchronous_step_cost, by which share that makes it longer."""
    capacity_share: float | None = None
    """Under a market trace: mean share of the nodes that were present."""
    ideal_goodput: float | None = None
    """Under a market trace: the goodput of a run that loses no time to preemptions."""
    of_ideal: float | None = None
    """Under a market trace: goodput divided by ideal_goodput."""
    verified: int = 0
    """Steps that `culm verify` has retrained to the same bits; 0: not verified."""
    config: dict[str, Any] = field(default_factory=dict)
    """The RunConfig of the run, without passwords."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of summary.json that this version does not know."""
    out: str | None = None
    """Folder or URL of the run; None: it had none."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], out: str | None = None) -> Summary:
        """The summary with the keys of summary.json."""
        known = {name: value for name, value in fields.items() if name in SUMMARY_KEYS}
        extra = {name: value for name, value in fields.items() if name not in SUMMARY_KEYS}
        known["evaluations"] = {int(step): loss for step, loss in fields.get("evaluations", {}).items()}
        return cls(**known, extra=extra, out=out)

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, from the last checkpoint. Raises UsageError if the run had no folder."""
        from culm.checkpoint import CheckpointCatalog, Storage

        if self.out is None:
            raise UsageError("the run had no folder: train with out='runs/a' to keep its weights")
        catalog = CheckpointCatalog(Storage(f"{self.out.rstrip('/')}/checkpoints"))
        reader = catalog.open(catalog.newest(verify="sizes").manifest, verify=True)
        return {name: reader.tensor(name) for name in reader.names() if not name.startswith("optimizer.")}


SUMMARY_KEYS = frozenset(found.name for found in dataclasses.fields(Summary)) - {"extra", "out"}
"""The keys of summary.json."""
