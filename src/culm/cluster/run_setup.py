"""Values of a run that the store holds: setup, reference to the job, nodes, result. No torch."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from culm import errors, strategies
from culm.config import RestartMode
from culm.errors import CulmError, RunError
from culm.market.rental_cost import Rental, RentalTerms
from culm.plan.model.model_profile import LayerCost
from culm.plan.rent.fleet_decision import FleetDecision, FleetLimits, FleetProgress
from culm.plan.rent.link_costs import NodeLinks
from culm.plan.rent.memory_model import WorkerMemory
from culm.runtime.epoch import LayerInput
from culm.transport.frames.encryption_policy import EncryptionPolicy

StepGate: TypeAlias = Literal["open", "hook", "caller", "outside"]
"""What a step waits for: nothing (open), the job's on_step hook beside the leader (hook), the hook in the launcher,
which writes the keys `gate/values` and `gate/permit` (caller), or `gate/permit` alone (outside)."""


class RunSetup(msgspec.Struct, frozen=True):
    """What is decided before the first node starts: all that the leader needs to make epochs of a job."""

    nodes: int
    """Number of nodes, with `workers_per_node` workers each."""
    pipelines: int
    stages: int
    schedule: str
    strategy: str
    segments: tuple[tuple[int, int], ...]
    plan: str
    evaluation: str | None
    evaluation_parts: int
    weighted: bool
    steps: int
    workers_per_node: int = 1
    start: int = 0
    gate: StepGate = "open"
    checkpoint_every: int = 0
    checkpoint_interval_s: float = 0.0
    """Seconds between two checkpoints whose steps the leader chooses; 0: checkpoints do not depend on time."""
    keep_last: int = 2
    out: str | None = None
    resume: int | None = None
    resume_from: str | None = None
    job_facts: dict[str, str | int | float | bool | list[list[str]] | None] = {}
    suspect_after: float = 5.0
    """Seconds without a sign of life after which a node is lost; every other timeout is derived from it."""
    rejoin_within: float = 600.0
    """Seconds that a node whose session in the store has ended keeps its state, to rejoin with it; 0: it ends."""
    blocked_after: float = 60.0
    """Seconds that the event loop of a node may be blocked before the node gives up its lease."""
    slow_factor: float = 1.5
    """A node that takes this many times as long as its peers is slow; 0: none is."""
    start_after: float | None = None
    """Seconds after the first node has joined from which on a complete pipeline is enough; None: all nodes are
    awaited."""
    restart: RestartMode = "warm"
    replace_within: float = 5.0
    """Seconds that a restart from a checkpoint waits for replacements of lost nodes."""
    storage_timeout: float | None = None
    """Seconds of failing storage after which the run ends; None: never."""
    eager_shadows: bool = False
    """Whether shadow replicas run forwards ahead of a loss."""
    has_event_hooks: bool = False
    """Whether the job has a hook for evaluations, checkpoints or lost nodes."""
    splits_backward: bool = True
    """Whether layers can run their backward in two parts. Compiled layers cannot."""
    synchronous_step: bool = False
    """Whether the optimizer step of all stages is taken together (gradient clipping, skipped steps)."""
    schedule_prediction: dict[str, float] = {}
    """What the planner predicts for the schedule; empty: the schedule does not depend on a profile."""
    max_activations: int | None = None
    """The most activations that a planned schedule keeps on a worker; None: by the memory."""
    improve_plan: float = 0.0
    """Work of the solver that improves a planned schedule while the run goes on, in seconds; 0: it is not improved."""
    costs: tuple[tuple[float, float, float], ...] = ()
    """Seconds of F, I and W by segment, measured or estimated; recovery plans with them."""
    profile_is_measured: bool = False
    activations: int | None = None
    """The number of activations that fit into a worker's memory; None: no limit."""
    layer_inputs: tuple[tuple[LayerInput, ...], ...] = ()
    """By layer: what it gets. Empty: layers are not compiled."""
    layers: tuple[LayerCost, ...] = ()
    """Costs of each layer; a reshape balances stages by them."""
    links: NodeLinks | None = None
    """The network between the workers, if the config names an instance; None: not known."""
    memory: int | None = None
    """Memory of a worker in bytes; None: not known."""
    worker_memories: tuple[WorkerMemory, ...] = ()
    """What a worker of each stage is predicted to need, on its device and in host memory."""
    reconfigure: str = "cost"
    """The policy by which the nodes are arranged into another shape during the run."""
    kills: tuple[str, ...] = ()
    """Kills that the config asks for, each with its action."""
    encrypt: EncryptionPolicy = "auto"
    """Whether connections between nodes are encrypted."""
    reduce: Literal["gloo", "nccl"] = "gloo"
    """What sums gradients over pipelines: NCCL, where all workers of a group can use it, or Gloo."""
    hook_timeout: float | None = None
    """Seconds after which a hook that does not return is given up; None: never."""
    writers: tuple[str, ...] = ()
    """Extra writers of step metrics: names or MODULE:CLASS."""
    limits: FleetLimits = FleetLimits()
    """The budget, the deadline and the highest price of a node."""
    earlier_evaluations: dict[int, dict[str, float]] = {}
    """The evaluations before a resume that early_stop and keep_best still depend on, by step."""
    earlier_rentals: tuple[Rental, ...] = ()
    """What the nodes of the runs cost that this one was resumed from."""
    reason: str = ""
    """Why this shape and strategy were chosen, in one sentence."""
    name: str = ""
    """FILE[:function] of the job, for display; empty: the job is a Python object."""
    job_file: str = ""
    """FILE[:function] with the absolute path of the file on the machine that started the run."""
    overrides: dict[str, str] = {}
    """Fields of the job that `--set` replaced, as given."""
    config: dict[str, Any] = {}
    """The fields of the RunConfig of the run, without passwords, for reports: readers do not validate them again."""

    @property
    def workers(self) -> int:
        """Number of workers that the run starts with."""
        return self.nodes * self.workers_per_node

    @property
    def strategy_object(self) -> strategies.Strategy:
        """The strategy of that name. A class named as "module:Class" is imported on first use."""
        return strategies.get(self.strategy)

    @property
    def survives_losses(self) -> bool:
        """Whether the run continues when a node is lost."""
        return self.strategy_object.survives_losses

    @property
    def why_losses_are_final(self) -> str:
        """Why the run cannot continue without a node that is lost, when it cannot."""
        if self.survives_losses:
            return f"no other node holds its layers (strategy {self.strategy})"
        return f"strategy {self.strategy} survives no loss (on several nodes, auto chooses one that does)"

    @property
    def waits_for_hook(self) -> bool:
        """Whether the line of a step is written when a hook has returned for it, with the values of the hook."""
        return self.gate in ("hook", "caller")

    @property
    def runs_hooks(self) -> bool:
        """Whether the leader needs a process for the job's hooks or for writers."""
        return self.gate == "hook" or self.has_event_hooks or bool(self.writers)

    @property
    def restarts_workers(self) -> bool:
        """Whether a worker process may be ended and replaced by a new one."""
        return self.restart == "cold" and self.strategy_object.restarts_from_checkpoint

    @property
    def keeps_action_outputs(self) -> bool:
        """Whether workers keep the outputs of actions until the step commits. Not needed if every loss is recovered
        from a checkpoint."""
        return self.strategy_object.keeps_outputs


class JobReference(msgspec.Struct, frozen=True):
    """The job as another machine imports it to join the run, under the key `job`."""

    reference: str
    """FILE[:function] as given to culm run; each machine resolves it relative to the folder culm agent starts in."""
    overrides: dict[str, str]
    identity: dict[str, str]
    """What the machines must agree on: see culm.cluster.job_identity."""
    archive: str = ""
    """Digest of the archive of its files, under the key `archive`."""
    archived_reference: str = ""
    """FILE[:function] relative to the top folder of the archive."""


class NodeRecord(msgspec.Struct, frozen=True):
    """A node as its agent describes it, under `nodes/<number>`."""

    node: int
    agent: str
    workers: tuple[str, ...]
    """Addresses of its workers; empty until all of them are up."""
    fingerprint: str
    leaves_in_s: float | None = None
    """Seconds until the machine is taken away, from a preemption notice; None: no notice."""
    incarnation: int = 0
    """How often its worker processes were replaced."""
    zone: str = ""
    """Zone of the machine: machines of one zone are often lost together. Empty: not known."""
    rental: RentalTerms | None = None
    """What the node costs; None: it has no price."""

    @property
    def host(self) -> str:
        return self.agent.rpartition(":")[0]


class HookValues(msgspec.Struct, frozen=True):
    """The values that the launcher's hook returned for a step, under the key `gate/values`."""

    step: int
    values: dict[str, float]


class RunResult(msgspec.Struct, frozen=True):
    """How a run ended, under the key `result`."""

    summary: dict[str, object] | None = None
    error: str | None = None
    message: str = ""
    traceback_text: str = ""

    def to_error(self) -> CulmError:
        """The error that ended the run, to be raised in this process."""
        kind: type[CulmError] = getattr(errors, self.error or "", RunError)
        error = kind(self.message)
        error.trace = self.traceback_text
        return error


encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(RunSetup).decode
decode_job_reference = msgspec.msgpack.Decoder(JobReference).decode
decode_node_record = msgspec.msgpack.Decoder(NodeRecord).decode
decode_hook_values = msgspec.msgpack.Decoder(HookValues).decode
decode_fleet_progress = msgspec.msgpack.Decoder(FleetProgress).decode
decode_rental_terms = msgspec.msgpack.Decoder(RentalTerms).decode
decode_fleet_decision = msgspec.msgpack.Decoder(FleetDecision).decode
decode_result = msgspec.msgpack.Decoder(RunResult).decode


def setup_line(setup: RunSetup) -> str:
    """The setup in one line."""
    shape = f"{setup.pipelines} x {setup.stages} (pipelines x stages), {node_words(setup)}"
    folder = f", folder {setup.out}" if setup.out is not None else ""
    return (
        f"{setup.name or 'a Python object'}: {shape}, {setup.schedule}, {setup.strategy}, {setup.steps} steps{folder}"
    )


def node_words(setup: RunSetup) -> str:
    """The number of nodes, and of workers on each if there are several."""
    nodes = f"{setup.nodes} nodes"
    return nodes if setup.workers_per_node == 1 else f"{nodes} with {setup.workers_per_node} workers each"
