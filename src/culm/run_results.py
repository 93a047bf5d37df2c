"""`culm.export`, `culm.cost`, `culm.report` and `culm.replay`: the weights of a run, its cost and what it did."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from culm.checkpoint.export import ExportReport, find_catalog
from culm.checkpoint.export import export as export_safetensors
from culm.errors import UsageError
from culm.market.cost_record import CostRecord
from culm.observe.report.cost_reader import read_cost
from culm.observe.report.write_report import RunReport, report_runs

if TYPE_CHECKING:
    from culm.cluster.leader.output.input_log import LeaderReplay


def export(
    run: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: Literal["safetensors", "hf", "dcp"] = "safetensors",
    step: int | Literal["best"] | None = None,
    averaged: bool = False,
    overwrite: bool = False,
) -> ExportReport:
    """Write the weights of a checkpoint, as `culm export` does.

    `run`: a run folder, or the checkpoints folder in one. `target` is, by `format`: safetensors, a file with parameters
    and buffers named as by torch.nn.Sequential(*layers); hf, a folder that from_pretrained loads, of a run of
    `culm.hf.parts`; dcp, a folder of torch.distributed.checkpoint. `step` of the checkpoint; "best": the one that
    Job.keep_best keeps; default: the newest intact one. `averaged`: the averages of Job.ema instead of the weights.
    `overwrite` replaces an existing target, except with dcp.

    Returns what was written, from which step, and which damaged checkpoints were skipped. Raises UsageError if the
    target exists or the request is wrong, and CheckpointError if no checkpoint can be read.
    """
    if format not in ("safetensors", "hf", "dcp"):
        raise UsageError(f"format is {format!r}: use safetensors, hf or dcp")
    if step == "best":
        step = find_catalog(run).best()
    elif step is not None and type(step) is not int:
        raise UsageError(f'step is {step!r}: use the step of a checkpoint, or "best"')
    if format == "dcp":
        from culm.checkpoint.dcp_reader import export_dcp

        return export_dcp(run, target, step=step, averaged=averaged)
    if format == "hf":
        if averaged:
            raise UsageError("format is 'hf' and averaged is True: leave one of them away")
        from culm.hf import export_hf

        return export_hf(run, target, step=step, overwrite=overwrite)
    return export_safetensors(run, target, step=step, overwrite=overwrite, averaged=averaged)


def cost(run: str | os.PathLike[str]) -> CostRecord | None:
    """What the nodes of a run have cost, as `culm cost` shows: `usd`, `usd_h` now, `waiting_usd`, `recovery_usd`,
    `redone_usd`, `nodes`, `kinds`, ...; None: no node had a price.

    `run`: folder or URL of a run that has ended or goes on. Raises UsageError if there is none.
    """
    return read_cost(os.fspath(run))


def report(*runs: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, writes: bool = True) -> RunReport:
    """Report on a run, or on several side by side, as `culm report` does: one HTML file with everything in it.

    `runs`: folders or URLs; a run may still be running. `out`: the file; default: report.html in the folder of the run,
    for several runs in the working directory. `writes=False` writes no file. Returns the facts and the path of the
    file. Raises UsageError if a folder has no run, and RunError if the file cannot be written.
    """
    return report_runs([os.fspath(run) for run in runs], out=None if out is None else os.fspath(out), writes=writes)


def replay(run: str | os.PathLike[str]) -> list[LeaderReplay]:
    """Repeat the decisions of a run's leaders from the events that they recorded, as `culm replay` does.

    `run`: the local folder of a run. Returns a result for each leader: `equal`, or the first `difference` from the
    recorded instructions. Raises UsageError if the folder has no logs of leaders, or logs of another version.
    """
    from culm.cluster.leader.output.input_log import replay_run

    return replay_run(os.fspath(run))
