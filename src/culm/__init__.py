"""culm: train large models on preemptible machines.

The package, from the bottom up. A package imports only from packages above it in this list. There are two exceptions:
config reads timeouts and kinds of faults from modules of cluster and transport that depend on nothing else there, and
providers reads launches, job archives and join tokens from machines. No two modules import each other.

    version      the version
    errors       all errors that culm raises
    text_format  numbers, sizes and durations as text
    metric       named values of a step: culm.Metric, culm.record
    monitor      which evaluation is the best: culm.Monitor, culm.EarlyStop
    initial_location  where Job.init is
    data/        data sets of files and streams; tokenizers
    job          the Job: layers, loss, optimizer, data, batch
    schedule/    actions, plans, generators, checks, timing, pictures            pure (no torch)
    plan/        model partition, shape, planning around losses                  pure
    strategies/  what a run keeps, and what it does after a loss                 pure
    market/      prices and traces of preemptible machines                       pure
    sim/         cost of a run under a market                                    pure
    price_lists  culm.find_prices and culm.update_prices: prices of instances
    config       the RunConfig: how a run is executed                            pure
    estimates/   culm.find_fleets, culm.compare_strategies and culm.estimate_deadline: before a run
    job_profile  culm.profile: what each layer of a job costs on this machine
    summary      the Summary: the result of a run                                pure
    models/      GPT, BERT, GNMT and convolutional networks as lists of layers
    device/      streams of a compute device, and host memory for copies
    transport/   tensors between workers: sockets, shared memory
    storage_access  hook before each access to storage, for injected faults
    checkpoint/  safetensors shards and a manifest, on a path or URL
    hf/          layers, loss and data of Hugging Face models; exports to their format
    runtime/     one worker: state, numerics, stage, executor
    observe/     run folder, events, metrics, the ledger; reports
    cluster/     store, epochs, agent, leader
    providers/   start nodes; execute a run
    machines/    machines that join a run: store, tokens, job archives, providers of machines
    training     culm.train, culm.start and culm.join
    running_jobs  culm.attach, culm.logs and culm.stop: running jobs of this machine
    launching    culm.launch, culm.list_jobs and culm.down: machines that culm starts and ends
    run_results  culm.export, culm.cost, culm.report and culm.replay: what a run has left
    background_services  culm.head, culm.head_token and culm.dash: stores and pages that this process serves
    gnn/         graph networks on servers and elastic workers
    testing/     public: the reference loop, the simulated cluster, faults
    verification/  culm.verify: prove a run by retraining it between its checkpoints
    machine_checks/  culm.doctor: whether this machine can run culm
    soak/        real processes under real faults for a long time
    cli/         one file per command, in packages by what it is for
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from culm.errors import CulmError
from culm.job import STOP, Job
from culm.metric import Metric, record
from culm.monitor import EarlyStop, Monitor
from culm.version import __version__

if TYPE_CHECKING:
    from culm import hf
    from culm.background_services import RunningHead, RunPage, dash, head, head_token
    from culm.checkpoint.export import ExportReport
    from culm.cluster.leader.output.input_log import LeaderReplay
    from culm.config import RunConfig
    from culm.estimates.deadline_estimate import estimate_deadline
    from culm.estimates.fleet_estimate import FleetPlan, find_fleets
    from culm.estimates.strategy_estimate import StrategyComparison, compare_strategies
    from culm.job_profile import profile
    from culm.launching import down, launch, list_jobs
    from culm.machine_checks.check_result import CheckResult
    from culm.machine_checks.machine_check import doctor
    from culm.machines.job_list import JobStatus
    from culm.market.cost_record import CostRecord
    from culm.observe.report.write_report import RunReport
    from culm.price_lists import PriceUpdate, find_prices, update_prices
    from culm.run_results import cost, export, replay, report
    from culm.running_jobs import attach, logs, stop
    from culm.summary import Summary
    from culm.training import join, start, train
    from culm.verification.verification_result import Verification
    from culm.verification.verify_run import verify

__all__ = [
    "STOP",
    "CheckResult",
    "CostRecord",
    "CulmError",
    "EarlyStop",
    "ExportReport",
    "FleetPlan",
    "Job",
    "JobStatus",
    "LeaderReplay",
    "Metric",
    "Monitor",
    "PriceUpdate",
    "RunConfig",
    "RunPage",
    "RunReport",
    "RunningHead",
    "StrategyComparison",
    "Summary",
    "Verification",
    "__version__",
    "attach",
    "compare_strategies",
    "cost",
    "dash",
    "doctor",
    "down",
    "estimate_deadline",
    "export",
    "find_fleets",
    "find_prices",
    "head",
    "head_token",
    "hf",
    "join",
    "launch",
    "list_jobs",
    "logs",
    "profile",
    "record",
    "replay",
    "report",
    "start",
    "stop",
    "train",
    "update_prices",
    "verify",
]

_LAZY = {
    "CheckResult": "culm.machine_checks.check_result",
    "CostRecord": "culm.market.cost_record",
    "ExportReport": "culm.checkpoint.export",
    "FleetPlan": "culm.estimates.fleet_estimate",
    "JobStatus": "culm.machines.job_list",
    "LeaderReplay": "culm.cluster.leader.output.input_log",
    "PriceUpdate": "culm.price_lists",
    "RunConfig": "culm.config",
    "RunPage": "culm.background_services",
    "RunReport": "culm.observe.report.write_report",
    "RunningHead": "culm.background_services",
    "StrategyComparison": "culm.estimates.strategy_estimate",
    "Summary": "culm.summary",
    "Verification": "culm.verification.verification_result",
    "attach": "culm.running_jobs",
    "compare_strategies": "culm.estimates.strategy_estimate",
    "cost": "culm.run_results",
    "dash": "culm.background_services",
    "doctor": "culm.machine_checks.machine_check",
    "down": "culm.launching",
    "estimate_deadline": "culm.estimates.deadline_estimate",
    "export": "culm.run_results",
    "find_fleets": "culm.estimates.fleet_estimate",
    "find_prices": "culm.price_lists",
    "head": "culm.background_services",
    "head_token": "culm.background_services",
    "join": "culm.training",
    "launch": "culm.launching",
    "list_jobs": "culm.launching",
    "logs": "culm.running_jobs",
    "profile": "culm.job_profile",
    "replay": "culm.run_results",
    "report": "culm.run_results",
    "start": "culm.training",
    "stop": "culm.running_jobs",
    "train": "culm.training",
    "update_prices": "culm.price_lists",
    "verify": "culm.verification.verify_run",
}
"""Imported on first use, so that commands that need none of them start fast."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "hf":
        import importlib

        return importlib.import_module("culm.hf")
    raise AttributeError(f"module 'culm' has no attribute {name!r}")


def __dir__() -> list[str]:
    """With the names that are imported on first use, for completion in notebooks."""
    return sorted({*globals(), *__all__})
