"""Numbers in the documentation that a cheap command prints are those that it prints now.

A block after `<!-- generated: COMMAND -->` lasts until `<!-- end -->`. Each of its lines must be a line of the output
of the command, in the same order; spaces and code fences do not count. Regenerate a block by running its command.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from typing import NamedTuple

import pytest
from tests.docs.markdown import ROOT, documents

from culm.cli import main
from culm.sim.bamboo_simulator import BambooCase
from culm.sim.cluster_costs import ClusterCosts

_BLOCK = re.compile(r"<!-- generated: (?P<command>culm [^>]+?) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)


class GeneratedBlock(NamedTuple):
    page: str
    command: str
    body: str


def _generated_blocks() -> list[GeneratedBlock]:
    return [
        GeneratedBlock(page.name, found["command"], found["body"])
        for page in documents()
        for found in _BLOCK.finditer(page.read_text())
    ]


def _lines(text: str) -> list[str]:
    words = (" ".join(line.split()) for line in text.splitlines())
    return [re.sub(r"-{2,}|─+", "-", line) for line in words if line and not line.startswith("```")]


def _missing_lines(body: str, output: str) -> list[str]:
    """The lines of a block that the output does not have after the line before."""
    printed = iter(_lines(output))
    return [line for line in _lines(body) if line not in printed]


def _run(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(tuple(shlex.split(command)[1:]))
    shown = capsys.readouterr()
    assert not ended.value.code, shown.err
    return shown.out


@pytest.mark.parametrize("block", _generated_blocks(), ids=lambda block: f"{block.page}: {block.command}"[:80])
def test_a_generated_block_is_what_its_command_prints(
    block: GeneratedBlock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _lines(block.body), "the block is empty"
    assert _missing_lines(block.body, _run(block.command, capsys)) == []


def test_there_are_generated_blocks_and_every_marker_is_closed() -> None:
    marks = sum(page.read_text().count("<!-- generated:") for page in documents())
    assert marks == len(_generated_blocks()) >= 4


def test_a_changed_number_is_found() -> None:
    output = "| a | 12.5 |\n| b | 3 |"
    assert _missing_lines("| a  | 12.5 |\n| b | 3 |", output) == []
    assert _missing_lines("| a | 12.6 |", output) == ["| a | 12.6 |"]
    assert _missing_lines("| b | 3 |\n| a | 12.5 |", output) == ["| a | 12.5 |"], "the order counts"


def test_the_assumed_costs_are_the_defaults_of_the_simulator() -> None:
    page = (ROOT / "docs" / "simulator.md").read_text()
    written = dict(re.findall(r"^\| `(\w+)` \| ([\d.e+]+) \|", page, re.MULTILINE))
    assert {name: float(value) for name, value in written.items()} == {f.name: f.default for f in fields(ClusterCosts)}


KNOWN_ANSWERS = {
    "re-routing only": ("--no-split", "--no-stagger"),
    "+ split backward": ("--no-stagger",),
    "+ staggered optimizer": (),
    "staggered, activations capped as in 1F1B": ("--memory", "1f1b"),
}
CASE = ("plan", "--pipelines", "3", "--stages", "4", "--micro-batches", "18", "--fail", "2.2", "--json")


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_the_known_answers_of_the_planner_are_in_the_numbers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(_run(shlex.join(("culm", *CASE, *KNOWN_ANSWERS[name])), capsys))
    row = f"| {name} | {found['slots']} | {found['bound']} |"
    assert row in (ROOT / "docs" / "numbers.md").read_text()


def test_the_fitted_constant_of_the_bamboo_table_is_named_beside_it() -> None:
    page = (ROOT / "docs" / "simulator.md").read_text()
    assert f"{BambooCase(probability=0.0).pipeline_ms:,.0f} ms" in page
