"""RunConfig: how a run is executed. Used by `culm.train`, `culm run`, `culm agent`, the store and the report. No torch.

The string under a field of RunConfig is its documentation, and the help text of the option of `culm run` that sets it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, get_type_hints

import msgspec

from culm import strategies
from culm.cluster.node_faults import KillNode
from culm.cluster.timeouts import derive_timeouts
from culm.errors import UsageError
from culm.job import Job
from culm.market.rental_cost import rental_terms
from culm.plan.reshape.reconfigure_policy import RECONFIGURE_POLICIES
from culm.schedule import RUN_SCHEDULES
from culm.strategies.registry import class_reference
from culm.transport.frames.encryption_policy import ENCRYPTION_POLICIES, EncryptionPolicy

RestartMode: TypeAlias = Literal["warm", "cold"]
"""How nodes restart from a checkpoint: processes stay and read the state again, or new processes are started."""
RESTART_MODES: tuple[RestartMode, ...] = ("warm", "cold")
ReduceLibrary: TypeAlias = Literal["auto", "nccl", "gloo"]
REDUCE_LIBRARIES: tuple[ReduceLibrary, ...] = ("auto", "nccl", "gloo")
MIN_SLOW_FACTOR = 1.1
"""Smaller differences between nodes cannot be distinguished from noise."""
PathOrUrl: TypeAlias = str | os.PathLike[str]
"""A folder or a file; for a run folder also a URL."""
MAX_PORT = 65535

_URL_PASSWORD = re.compile(r"(?<=://)([^/@:]*):[^/@]*@")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a run is executed; the Job says what is trained.

    Raises UsageError for a value that is wrong for every job. Files, addresses and etcd are checked when the run
    starts.
    """

    pipelines: int | None = None
    """Number of pipelines (D)."""
    stages: int | None = None
    """Stages of a pipeline (P), one worker each."""
    nodes: int | None = None
    """Number of nodes; culm chooses pipelines and stages for it."""
    workers_per_node: int | None = None
    """Workers of a node, one per device; all of them are lost and leave together. Default: 1, or where
    other machines join the run one for each GPU of the first that does."""
    schedule: str = "1f1b"
    """Pipeline schedule: gpipe, 1f1b, zb, interleaved, planned (made for this job from measured layer costs) or auto
    (1f1b, or planned where it is faster)."""
    max_activations: int | None = None
    """Micro-batches whose activations a worker may keep at a time under the planned schedule; more of them leave fewer
    bubbles. Default: as many as fit into the memory that 1f1b needs, or into --memory."""
    improve_plan: float | None = None
    """Seconds that a solver (OR-Tools) works on a better plan for the planned schedule while the run goes on, on one
    thread of the leader's node; 0: it does not. Default: 20, or 0 without OR-Tools."""
    ranges: int = 2
    """Segments that a worker holds under the interleaved schedule, and may hold under planned: 1 keeps planned from
    using two."""
    cuts: tuple[int, ...] | None = None
    """First layers of segments 1, 2, ...; default: chosen so that the slowest stage is as fast as possible."""
    profile: str | None = None
    """Layer costs to balance the stages by, as written by culm profile --out; default: an estimate."""
    memory: int | None = None
    """Memory of a worker in bytes; on the command line also with a unit, as in 16GiB."""
    strategy: str = "auto"
    """How the run survives preemptions: auto, none, checkpoint, drop, shadow, shadow-lazy, reroute, migrate,
    templates, or module:Class for a strategy of your own."""
    reconfigure: str = "cost"
    """When the nodes that are present are arranged into another shape: cost (when it pays), bamboo or never."""
    preemption_rate: float = 0.1
    """Share of the nodes expected to be preempted per hour; auto and the checkpoint interval depend on it."""
    out: str | None = None
    """Folder or URL for the files of the run: a new one, or an empty one."""
    resume: str | None = None
    """Folder or URL of a run to continue from its newest checkpoint."""
    checkpoint_every: int = 0
    """Steps between two checkpoints. 0: one every few minutes, or as the strategy needs, and one at the end."""
    keep_last: int = 2
    """Number of checkpoints to keep."""
    restart: RestartMode = "warm"
    """How nodes restart from a checkpoint: warm (processes stay) or cold (new processes)."""
    replace_within: float | None = None
    """Seconds that a restart waits for replacements of lost nodes; default: suspect_after."""
    storage_timeout: float | None = None
    """End the run if storage fails for longer than this many seconds; default: never."""
    suspect_after: float = 5.0
    """Seconds without a sign of life after which a node is lost; all other timeouts are derived from it."""
    rejoin_within: float = 600.0
    """Seconds that a node whose session in the store has ended keeps its state, to rejoin the run with it; 0: it ends
    at once."""
    blocked_after: float = 60.0
    """Seconds that the event loop of a node may be blocked before the node gives up its lease and is lost."""
    slow_factor: float = 1.5
    """Move micro-batches away from a node that takes this many times as long as its peers, or replace it; 0: never."""
    start_timeout: float = 3600.0
    """End a run on several machines whose nodes have not all joined after this many seconds."""
    start_after: float | None = None
    """Begin so many seconds after the first node has joined with the nodes that are there, if they make a complete
    pipeline, and let the others join later; default: wait for all nodes (culm launch: 120)."""
    hook_timeout: float | None = None
    """Continue without waiting for Job.on_step, or a hook for an event, if it takes longer than this many seconds;
    default: 60 s for Job.on_step, and at the end of the run 30 s for hooks for events."""
    kills: tuple[str, ...] = ()
    """Kill a node with SIGKILL at an action, as in "node=3 step=5 at=2B1"; repeatable."""
    trace: str | None = None
    """Market trace file: nodes start and stop as recorded in it."""
    speedup: float = 1.0
    """How much faster than recorded the market trace is replayed."""
    notice: float = 0.0
    """Seconds of notice before the market trace removes a node; 0: none."""
    instance: str | None = None
    """Instance type of a node, as in culm prices: its price is used unless --price gives another one."""
    market: str | None = None
    """How the nodes are rented: spot or on-demand (default)."""
    node_price: float | None = None
    """Dollars per hour of a node with all its workers; default: that of --instance, else nothing."""
    budget: float | None = None
    """Dollars that the run may cost, with what was spent before a resume: it stops with a checkpoint before that."""
    deadline: float | None = None
    """Seconds from the start within which the run should end; on the command line also with a unit, as in 48h.
    culm launch rents on-demand nodes where spot nodes alone would miss it."""
    max_price: float | None = None
    """The highest price of a node in dollars per hour: culm launch rents no more expensive ones."""
    etcd: str | None = None
    """URL[,URL...] of the etcd of a run on several machines, which other machines join with culm agent."""
    join: str | None = None
    """Token of culm head, which replaces etcd, etcd_* and secret_file; @FILE reads it from a file, env from
    CULM_TOKEN."""
    job_name: str | None = None
    """Name of the job in etcd; default: the name of its file."""
    local_nodes: int | None = None
    """Nodes that this machine provides itself to a run in etcd; default: none."""
    address: str | None = None
    """IPv4 address or interface at which other machines reach this one; default: the one of the route to etcd."""
    ports: tuple[int, int] | None = None
    """First and last port that nodes of this machine may listen on."""
    etcd_user: str | None = None
    """User of etcd; the password is CULM_ETCD_PASSWORD."""
    etcd_ca: str | None = None
    """File with the certificates of the authority that signed etcd's certificate."""
    etcd_cert: str | None = None
    """File with the client certificate for etcd."""
    etcd_key: str | None = None
    """File with the key of the client certificate."""
    etcd_insecure: bool = False
    """Send the password of etcd over http:// to another machine, where others can read it."""
    secret_file: str | None = None
    """File with the secret of the job, the same on all its machines; default: CULM_SECRET."""
    encrypt: EncryptionPolicy = "auto"
    """Whether connections between nodes are encrypted: auto (all but those over loopback), on or off."""
    reduce: ReduceLibrary = "auto"
    """What sums gradients over pipelines: nccl (on the GPUs), gloo (in host memory), or auto (nccl where all workers
    can use it and their connections are not encrypted, else gloo)."""
    writers: tuple[str, ...] = ()
    """Extra writers that receive every step's metrics: names (tensorboard, wandb, prometheus) or MODULE:CLASS."""
    dash: bool = False
    """Serve a page with the state of the run to browsers on this machine."""

    def __post_init__(self) -> None:
        for name in _PATH_FIELDS:
            _set_path(self, name)
        for name in _TUPLE_FIELDS:
            _set_tuple(self, name)
        writers = (class_reference("writers", each) if isinstance(each, type) else each for each in self.writers)
        object.__setattr__(self, "writers", tuple(writers))
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _to_plain(getattr(self, field.name)))
        _check_known("schedule", self.schedule, RUN_SCHEDULES)
        object.__setattr__(self, "strategy", strategies.reference_to(self.strategy))  # Python may pass a class
        strategies.check_name(self.strategy)
        _check_known("reconfigure", self.reconfigure, RECONFIGURE_POLICIES)
        _check_known("restart", self.restart, RESTART_MODES)
        _check_known("encrypt", self.encrypt, ENCRYPTION_POLICIES)
        _check_known("reduce", self.reduce, REDUCE_LIBRARIES)
        for name in _AT_LEAST_ONE:
            _check_at_least(1, name, getattr(self, name))
        for name in ("checkpoint_every", "local_nodes"):
            _check_at_least(0, name, getattr(self, name))
        _check_types(self)
        _check_money(self)
        derive_timeouts(self.suspect_after, blocked_after=self.blocked_after)
        if not (self.slow_factor == 0 or self.slow_factor >= MIN_SLOW_FACTOR):
            raise UsageError(f"--slow-factor is {self.slow_factor}: use 0 (never), or at least {MIN_SLOW_FACTOR}")
        _check_numbers(self)
        _check_ports(self.ports)
        for kill in self.kills:
            KillNode.parse(kill)
        if self.checkpoint_every and self.folder is None:
            raise UsageError("--checkpoint-every needs a folder to write to: add --out, as in --out runs/a")
        _check_dependent_fields(self)

    @property
    def folder(self) -> str | None:
        """The folder that the run writes to: `out`, else the folder of the resumed run."""
        return self.resume if self.out is None else self.out

    @property
    def is_shared(self) -> bool:
        """Whether other machines join the run."""
        return self.etcd is not None or self.join is not None

    def without_secrets(self) -> RunConfig:
        """The same config without passwords, for the store, the report and files."""
        user = None if self.etcd_user is None else self.etcd_user.partition(":")[0]
        changes: dict[str, Any] = {"etcd_user": user, "join": None if self.join is None else "***"}
        for name in _PATH_FIELDS:
            if (place := getattr(self, name)) is not None:
                changes[name] = _URL_PASSWORD.sub(r"\1:***@", place)
        return dataclasses.replace(self, **changes)

    @property
    def node_workers(self) -> int:
        """Workers of a node, as far as it is known before machines join."""
        return self.workers_per_node or 1

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data for JSON, without passwords."""
        found: dict[str, Any] = msgspec.to_builtins(self.without_secrets())
        return found


class JoinOptions(TypedDict, total=False):
    """The fields of RunConfig that say how to reach a run on several machines, as keyword arguments of `culm.join`."""

    etcd: str | None
    join: str | None
    job_name: str | None
    address: str | None
    ports: tuple[int, int] | None
    etcd_user: str | None
    etcd_ca: PathOrUrl | None
    etcd_cert: PathOrUrl | None
    etcd_key: PathOrUrl | None
    etcd_insecure: bool
    secret_file: PathOrUrl | None
    instance: str | None
    market: str | None
    node_price: float | None


class LaunchOptions(TypedDict, total=False):
    """The fields of RunConfig that a launch does not decide itself, as keyword arguments of `culm.launch`."""

    pipelines: int | None
    stages: int | None
    nodes: int | None
    workers_per_node: int | None
    schedule: str
    max_activations: int | None
    improve_plan: float | None
    ranges: int
    cuts: Iterable[int] | None
    profile: PathOrUrl | None
    memory: int | None
    strategy: str | type[strategies.Strategy]
    reconfigure: str
    preemption_rate: float
    out: PathOrUrl | None
    resume: PathOrUrl | None
    checkpoint_every: int
    keep_last: int
    restart: RestartMode
    replace_within: float | None
    storage_timeout: float | None
    suspect_after: float
    rejoin_within: float
    blocked_after: float
    slow_factor: float
    start_timeout: float
    start_after: float | None
    hook_timeout: float | None
    budget: float | None
    deadline: float | None
    encrypt: EncryptionPolicy
    reduce: ReduceLibrary
    writers: Iterable[str | type]
    dash: bool


class RunOptions(JoinOptions, LaunchOptions, total=False):
    """The fields of RunConfig as keyword arguments of `culm.train`, so that editors complete them. A test compares them
    with RunConfig."""

    kills: Iterable[str]
    trace: PathOrUrl | None
    speedup: float
    notice: float
    max_price: float | None
    local_nodes: int | None


def merge_options(config: RunConfig | None, options: Mapping[str, Any], *, stacklevel: int = 2) -> RunConfig:
    """`config` with fields replaced by keyword arguments. Raises UsageError for a name that RunConfig does not have.
    `stacklevel`: where a warning points to, as in `warnings.warn`."""
    given = dict(options)
    if "losses" in given:
        if "preemption_rate" in given:
            raise UsageError("losses and preemption_rate are both given: use preemption_rate alone")
        warnings.warn("losses is deprecated: use preemption_rate", FutureWarning, stacklevel=stacklevel)
        given["preemption_rate"] = given.pop("losses")
    if not isinstance(config, RunConfig | None):
        raise UsageError(
            f"config is of type {type(config).__name__}: pass a culm.RunConfig, or its fields as keyword arguments"
        )
    known = [field.name for field in dataclasses.fields(RunConfig)]
    for name in given:
        if name not in known:
            raise UsageError(f"RunConfig has no field {name!r}: {_unknown_field_fix(name, known)}")
    return dataclasses.replace(config or RunConfig(), **given)


def _unknown_field_fix(name: str, known: Sequence[str]) -> str:
    if name in {field.name for field in dataclasses.fields(Job)}:
        return f"it is a field of the Job; culm.train replaces it with overrides={{{name!r}: ...}}"
    fields = {option: field for field, option in _OPTION_NAMES.items()}
    close = [fields[name]] if name in fields else difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else ", ".join(known)


_PATH_FIELDS = ("out", "resume", "profile", "trace", "etcd_ca", "etcd_cert", "etcd_key", "secret_file")
_AT_LEAST_ONE = ("pipelines", "stages", "nodes", "workers_per_node", "keep_last", "memory", "ranges", "max_activations")
_TUPLE_FIELDS = ("cuts", "kills", "ports", "writers")
_OPTION_NAMES = {"job_name": "job", "local_nodes": "local", "kills": "kill", "writers": "writer", "node_price": "price"}
_NEED_ETCD = ("job_name", "local_nodes", "address", "secret_file", "etcd_user", "etcd_ca", "etcd_cert", "etcd_key")
_REPLACED_BY_TOKEN = ("etcd", "secret_file", "etcd_user", "etcd_ca", "etcd_cert", "etcd_key")
_MONEY_FIXES = {
    "node_price": "use dollars per hour of a node, 0 or more",
    "budget": "use dollars above 0",
    "deadline": "use seconds above 0",
    "max_price": "use dollars per hour above 0",
}
_NEED_TRACE = {"speedup": 1.0, "notice": 0.0}


_EXPECTED: tuple[tuple[Any, str], ...] = (
    (int, "a whole number"),
    (float, "a number"),
    (bool, "True or False"),
    (str, "a string"),
    (tuple[str, ...], "a sequence of strings"),
    (tuple[int, ...], "a sequence of whole numbers"),
    (tuple[int, int], "the first and the last port"),
)
"""What to use for a field of a type, for error messages."""


def option_name(field: str) -> str:
    """The option of `culm run` that sets a field of RunConfig, as in --keep-last."""
    return f"--{_OPTION_NAMES.get(field, field).replace('_', '-')}"


def _set_path(config: RunConfig, name: str) -> None:
    """Replace a path object by its text. An empty text is refused: it comes from a variable that was not set."""
    value = getattr(config, name)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
        object.__setattr__(config, name, value)
    if value is not None and not (isinstance(value, str) and value.strip()):
        raise UsageError(f"{option_name(name)} is {value!r}: name a place, or omit it")


def _set_tuple(config: RunConfig, name: str) -> None:
    value = getattr(config, name)
    if isinstance(value, str) or not isinstance(value, Iterable | None):
        raise UsageError(f"{option_name(name)} is {value!r}: use a sequence of values")
    if value is not None:
        object.__setattr__(config, name, tuple(value))


def _to_plain(value: Any) -> Any:
    """A number of numpy or torch as a number of Python, also inside of a tuple. Other values stay as they are."""
    if isinstance(value, tuple):
        return tuple(map(_to_plain, value))
    is_number = hasattr(value, "item") and not isinstance(value, type) and getattr(value, "ndim", 0) == 0
    return value.item() if is_number else value


def _check_known(field: str, value: str, choices: Iterable[str]) -> None:
    names = tuple(choices)
    if value not in names:
        close = difflib.get_close_matches(str(value).lower(), names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use {' or '.join(names)}"
        raise UsageError(f"there is no {option_name(field)} {value!r}: {hint}")


def _check_at_least(least: int, field: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise UsageError(f"{option_name(field)} is {value!r}: use a whole number of at least {least}")


def _check_types(config: RunConfig) -> None:
    """Refuse a field whose value has another type than the field. Other checks may then use the values."""
    for name, kind in _field_types().items():
        value = getattr(config, name)
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            expected = next((text for known, text in _EXPECTED if kind in (known, known | None)), "a value of its type")
            raise UsageError(f"{option_name(name)} is {value!r}: use {expected}") from None


@functools.cache
def _field_types() -> Mapping[str, Any]:
    """The type of every field that needs no more than its type to be checked."""
    special = ("preemption_rate", "speedup", "notice", *_MONEY_FIXES)  # `_check_number` says what they mean
    return {name: kind for name, kind in get_type_hints(RunConfig).items() if name not in special}


def _check_numbers(config: RunConfig) -> None:
    _check_number(config, "preemption_rate", "use the share of nodes preempted per hour, as in 0.1")
    _check_number(config, "rejoin_within", "use a number of seconds, 0 or more")
    for name in ("replace_within", "improve_plan", "storage_timeout", "start_after"):
        if getattr(config, name) is not None:
            _check_number(config, name, "use a number of seconds, 0 or more")
    if config.hook_timeout is not None:
        _check_number(config, "hook_timeout", "use a number of seconds above 0", above_zero=True)
    _check_number(config, "start_timeout", "use a number of seconds above 0", above_zero=True)
    _check_number(config, "speedup", "use a number above 0", above_zero=True)
    _check_number(config, "notice", "use a number of at least 0")


def _check_money(config: RunConfig) -> None:
    for name, fix in _MONEY_FIXES.items():
        if getattr(config, name) is not None:
            _check_number(config, name, fix, above_zero=name != "node_price")
    if config.budget is not None and config.folder is None:
        raise UsageError("--budget ends the run with a checkpoint, which needs a folder: add --out, as in --out runs/a")
    rental_terms(instance=config.instance, market=config.market, usd_h=config.node_price)


def _check_number(config: RunConfig, field: str, fix: str, *, above_zero: bool = False) -> None:
    value = getattr(config, field)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UsageError(f"{option_name(field)} is {value!r}: {fix}")
    if not 0 <= value < math.inf or (above_zero and value == 0):
        raise UsageError(f"{option_name(field)} is {value:g}: {fix}")


def _check_ports(ports: tuple[int, int] | None) -> None:
    if ports is not None and not 1 <= ports[0] <= ports[1] <= MAX_PORT:
        given = "-".join(map(str, ports))
        raise UsageError(f"--ports {given} is not a range: use 1 to {MAX_PORT}, the smaller number first")


def _check_dependent_fields(config: RunConfig) -> None:
    """Refuse fields that have no effect without another one, or contradict another one."""
    if config.reduce == "nccl" and config.encrypt == "on":
        raise UsageError("--reduce nccl and --encrypt on contradict each other: NCCL does not encrypt, use one of them")
    for name, default in _NEED_TRACE.items():
        if config.trace is None and getattr(config, name) != default:
            raise UsageError(f"{option_name(name)} is for a run on a trace: add --trace FILE, or omit it")
    for name in _NEED_ETCD:
        if not config.is_shared and getattr(config, name) is not None:
            raise UsageError(
                f"{option_name(name)} is for a run that other machines join: add --join TOKEN or --etcd URL"
            )
    if config.join is not None:
        for name in _REPLACED_BY_TOKEN:
            if getattr(config, name) is not None:
                raise UsageError(
                    f"{option_name(name)} and --join are both given: leave the former out, the token contains it"
                )
