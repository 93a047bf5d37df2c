from __future__ import annotations

import builtins
from typing import Any

import pytest

from culm.__main__ import main

_import = builtins.__import__


@pytest.mark.parametrize("how", [KeyboardInterrupt(), ImportError("cannot load module more than once per process")])
def test_an_interrupt_before_the_command_is_there_is_told_in_a_word(
    how: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "culm.cli":
            how.__context__ = KeyboardInterrupt()
            raise how
        return _import(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as end:
        main()
    monkeypatch.undo()
    assert end.value.code == 130
    assert capsys.readouterr().err == "culm: interrupted\n"


def test_what_can_not_be_imported_for_another_reason_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "culm.cli":
            raise ImportError("no module named typer")
        return _import(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ImportError, match="typer"):
        main()
