"""`culm export`: the weights of a checkpoint as one model.safetensors."""

from __future__ import annotations

from typing import Annotated

import typer

from culm.cli.failing import failing, say


def export(
    source: Annotated[str, typer.Argument(metavar="DIR", help="A run folder, or the checkpoints folder in one.")],
    target: Annotated[str, typer.Argument(metavar="FILE", help="Such as model.safetensors.")],
    step: Annotated[int | None, typer.Option(help="Of which step; default: the newest good checkpoint.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Write parameters and buffers of a checkpoint to one file, named as in torch.nn.Sequential(*layers)."""
    with failing(debug=debug):
        from culm import checkpoint

        report = checkpoint.export(source, target, step=step, overwrite=overwrite)
        for passed, reason in report.rejected:
            say(f"the checkpoint of step {passed} was passed over: {reason}")
        print(f"{report.path}: {report.tensors} tensors, {report.bytes / 1e6:.2f} MB, of step {report.step}")
