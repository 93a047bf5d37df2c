"""`culm export`: write a checkpoint as one model.safetensors, or as a folder for Hugging Face or torch's DCP."""

from __future__ import annotations

from typing import Annotated

import typer

from culm.cli.error_reporting import print_error, report_errors
from culm.errors import UsageError


def export(
    source: Annotated[str, typer.Argument(metavar="DIR", help="A run folder, or the checkpoints folder in one.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Such as model.safetensors, or a folder.")],
    hf: Annotated[bool, typer.Option("--hf", help="Write a folder that Hugging Face's from_pretrained loads.")] = False,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest valid one.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint that Job.keep_best keeps.")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="The averaged weights of Job.ema.")] = False,
    dcp: Annotated[bool, typer.Option("--dcp", help="Write a folder of torch.distributed.checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Write parameters and buffers of a checkpoint to one file, named as in torch.nn.Sequential(*layers).

    With --hf, of a run of culm.hf.parts: config, tokenizer and weights under the model's own names; of a peft model the
    adapter.
    """
    with report_errors(debug=debug):
        if best and step is not None:
            raise UsageError("--best and --step both choose a checkpoint: leave one of them away")
        if hf and (dcp or ema):
            raise UsageError(f"--hf and {'--dcp' if dcp else '--ema'} are both given: leave one of them away")
        from culm import run_results

        report = run_results.export(
            source,
            target,
            format="dcp" if dcp else "hf" if hf else "safetensors",
            step="best" if best else step,
            averaged=ema,
            overwrite=overwrite,
        )
        for skipped, reason in report.rejected:
            print_error(f"skipped the checkpoint of step {skipped}: {reason}")
        print(f"{report.path}: {report.tensors} tensors, {report.bytes / 1e6:.2f} MB, of step {report.step}")
