"""The version is written down once."""

from __future__ import annotations

import tomllib
from pathlib import Path

import culm
from culm import version

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_the_package_metadata_read_the_version_from_its_module() -> None:
    project = tomllib.loads(PROJECT.read_text())
    assert "version" in project["project"]["dynamic"]
    assert PROJECT.parent / project["tool"]["hatch"]["version"]["path"] == Path(version.__file__).resolve()
    assert culm.__version__ == version.__version__
