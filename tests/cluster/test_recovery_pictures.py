"""The pictures of docs/how-recovery-works.md are of what culm does today."""

from __future__ import annotations

import pytest
from benchmarks.pictures import FOLDER, pictures


def test_the_pictures_in_the_docs_are_those_that_a_run_makes() -> None:
    if not FOLDER.is_dir():
        pytest.skip("there is no docs folder beside the tests")
    page = (FOLDER.parent / "how-recovery-works.md").read_text()
    for name, picture in pictures().items():
        assert f"images/{name}" in page
        assert (FOLDER / name).read_text() == picture, f"{name} is old: run python -m benchmarks.pictures"
