"""`culm.export` and `culm.cost`: the weights of a run, and what it has cost."""

from __future__ import annotations

import os
from typing import Literal

from culm.checkpoint.export import ExportReport, find_catalog
from culm.checkpoint.export import export as export_safetensors
from culm.errors import UsageError
from culm.market.cost_record import CostRecord
from culm.observe.report.cost_reader import read_cost


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
