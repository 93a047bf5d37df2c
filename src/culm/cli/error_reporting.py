"""Error reporting: one sentence on stderr, an exit code, and the traceback only with --debug."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import typer

from culm.errors import CulmError, describe_exception

_PACKAGE_FOLDER = str(Path(__file__).parents[1])


@contextmanager
def report_errors(*, debug: bool = False) -> Iterator[None]:
    """Wrap the body of a subcommand. An error ends the command with one sentence and its exit code."""
    try:
        with _warnings_as_sentences():
            yield
    except CulmError as error:
        print_error(str(error), error.trace or _format_traceback(error) if debug else "")
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        print_error("interrupted")
        raise typer.Exit(130) from None
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        hint = "" if debug else "; --debug shows the traceback"
        print_error(f"unexpected {describe_exception(error)}{hint}", _format_traceback(error) if debug else "")
        raise typer.Exit(1) from None


@contextmanager
def _warnings_as_sentences() -> Iterator[None]:
    """Print culm's own warnings as one sentence, without a source line."""
    with warnings.catch_warnings():
        original = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if filename.startswith(_PACKAGE_FOLDER):
                print_error(str(message))
            else:
                original(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def print_error(sentence: str, traceback_text: str = "") -> None:
    """Print one sentence on stderr, after the traceback if there is one."""
    sys.stdout.flush()
    print(f"{traceback_text}culm: {sentence}", file=sys.stderr, flush=True)


def _format_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
