"""`culm data`: prepare data. `culm data tokenize` writes a token file from text and JSONL files."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.cli.progress_display import make_console, make_display

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Prepare data: token files.")


@app.callback()
def data() -> None:
    """Keeps `tokenize` a subcommand while it is the only one."""


@app.command()
def tokenize(
    files: Annotated[list[str], typer.Argument(metavar="FILES", help="Text or JSONL files, or patterns in quotes.")],
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, a folder with one, or bytes.")],
    out: Annotated[str, typer.Option(help="The token file to write, as in corpus.npy.")],
    field: Annotated[str, typer.Option(help="The field with the text in each line of a JSONL file.")] = "text",
    processes: Annotated[int | None, typer.Option(help="Processes; default: one per core.", min=1)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Tokenize files into one token file for culm.data.Tokens. The result does not depend on the processes."""
    with report_errors(debug=debug):
        from culm.data.token_file import tokenize_files

        display = make_display(make_console(stderr=True), quiet=quiet)
        try:
            result = tokenize_files(
                files,
                tokenizer,
                out,
                field=field,
                processes=processes or len(os.sched_getaffinity(0)),
                progress=lambda done, total: display.show_progress("bytes tokenized", done, total),
            )
        finally:
            display.close()
        ids = "" if result.vocab is None else f", {result.vocab:,} token ids"
        print(f"{result.path}: {result.tokens:,} tokens of {result.files} files{ids}")
