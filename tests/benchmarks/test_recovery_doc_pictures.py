"""The pictures of docs/how-recovery-works.md show the current behaviour."""

from __future__ import annotations

import pytest
from benchmarks.resilience.recovery_pictures import IMAGE_FOLDER, draw_recovery


def test_the_pictures_in_the_docs_equal_those_of_a_run() -> None:
    if not IMAGE_FOLDER.is_dir():
        pytest.skip("there is no docs folder beside the tests")
    page = (IMAGE_FOLDER.parent / "how-recovery-works.md").read_text()
    for name, picture in draw_recovery().items():
        assert f"images/{name}" in page
        assert (IMAGE_FOLDER / name).read_text() == picture, (
            f"{name} is old: run python -m benchmarks.resilience.recovery_pictures"
        )
