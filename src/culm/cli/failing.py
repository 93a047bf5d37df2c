"""Errors as a user sees them: one sentence on stderr, an exit code, and the trace only when asked for."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import typer

from culm.errors import CulmError, said

_HOME = str(Path(__file__).parents[1])


@contextmanager
def failing(*, debug: bool = False) -> Iterator[None]:
    """The body of a verb. Whatever goes wrong in it ends the command with a sentence and the right exit code."""
    try:
        with _warnings_said():
            yield
    except CulmError as error:
        say(str(error), error.trace or _trace(error) if debug else "")
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(130) from None
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        hint = "" if debug else "; --debug shows where"
        say(f"unexpected {type(error).__name__}{said(error)}{hint}", _trace(error) if debug else "")
        raise typer.Exit(1) from None


@contextmanager
def _warnings_said() -> Iterator[None]:
    """What culm itself warns of is a sentence, too, without a line of its source."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if filename.startswith(_HOME):
                say(str(message))
            else:
                shown(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def say(sentence: str, trace: str = "") -> None:
    """One sentence on stderr, after the trace if there is one."""
    sys.stdout.flush()
    print(f"{trace}culm: {sentence}", file=sys.stderr, flush=True)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
