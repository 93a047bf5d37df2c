"""Options of `culm run` and `culm agent` are the fields of RunConfig: defined once, and complete."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from tests.cli.cli_process import JOBS

from culm.cli import main, root_click_command
from culm.cli.config_options import build_config, field_docs
from culm.cli.launching import launch_command
from culm.cli.running import agent_command, run_command
from culm.config import JoinOptions, RunConfig, option_name
from culm.errors import UsageError
from culm.schedule import SCHEDULES
from culm.strategies import known_names

FIELDS = {field.name: field for field in dataclasses.fields(RunConfig)}


def options_of(command: str) -> dict[str, Any]:
    """The options of a command by name, as in --keep-last."""
    parameters = root_click_command().commands[command].params
    return {name: parameter for parameter in parameters for name in parameter.opts if name.startswith("--")}


def test_every_field_is_documented_once() -> None:
    assert set(field_docs()) == set(FIELDS)
    assert all(text.endswith(".") for text in field_docs().values())
    assert all(name in field_docs()["strategy"] for name in known_names())
    assert all(name in field_docs()["schedule"] for name in SCHEDULES)


def test_every_field_is_an_option_of_culm_run_with_its_text_and_default() -> None:
    options = options_of("run")
    for name, field in FIELDS.items():
        option = options[option_name(name)]
        assert option.help == field_docs()[name]
        assert option.default == (None if isinstance(field.default, tuple) else field.default)


def test_culm_run_has_only_options_of_the_config_of_the_job_and_of_the_display() -> None:
    own = {"--exact", "--steps", "--seed", "--set", "--losses", "--quiet", "--json", "--debug", "--detach"}
    assert set(options_of("run")) == {option_name(name) for name in FIELDS} | own


def test_the_options_of_culm_agent_are_those_that_reach_a_run() -> None:
    reaching = {option_name(name) for name in get_type_hints(JoinOptions)}
    own = {
        "--zone",
        "--notice",
        "--grace",
        "--wait",
        "--debug",
        "--machine",
        "--abandon-after",
        "--idle-timeout",
        "--rented-at",
    }
    assert set(options_of("agent")) == reaching | own
    assert {name for name, option in options_of("agent").items() if option.required} == set()


def test_without_options_the_config_is_the_default() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(run_command.run).parameters.items()
        if name in FIELDS
    }
    assert build_config(defaults) == RunConfig()
    assert set(agent_command.JOIN_FIELDS) == set(get_type_hints(JoinOptions))


def test_texts_with_a_notation_of_their_own_are_parsed() -> None:
    found = build_config({"memory": "2GiB", "ports": "7000-7010", "cuts": "2,5", "kills": ["node=1 step=2"]})
    assert (found.memory, found.ports, found.cuts) == (2 << 30, (7000, 7010), (2, 5))
    assert found.kills == ("node=1 step=2",)
    with pytest.raises(UsageError, match="--cuts '2;5' is not a list"):
        build_config({"cuts": "2;5"})


def test_losses_is_a_hidden_deprecated_name_of_the_preemption_rate(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "plan"):
        assert options_of(command)["--losses"].hidden
    assert build_config({"preemption_rate": 0.1}, losses=0.3).preemption_rate == 0.3
    assert capsys.readouterr().err == "culm: --losses is deprecated: use --preemption-rate\n"
    with pytest.raises(SystemExit) as end:
        main(["run", JOBS, "--losses", "0.2", "--preemption-rate", "0.3"])
    assert end.value.code == 2
    assert "--preemption-rate 0.3 and --losses 0.2 are both given" in capsys.readouterr().err


@pytest.mark.parametrize("command", [run_command.run, launch_command.launch, agent_command.agent])
def test_no_option_has_a_type_that_older_versions_of_typer_refuse(command: Any) -> None:
    """Literals are read by typer 0.19 and newer only."""
    for parameter in inspect.signature(command).parameters.values():
        hint = get_args(parameter.annotation)[0] if get_args(parameter.annotation) else parameter.annotation
        assert get_origin(hint) is not Literal, parameter.name
