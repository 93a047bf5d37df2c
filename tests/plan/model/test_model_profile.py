"""A profile round-trips through its file, and an invalid file gives a one-sentence error."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError
from culm.plan.model.model_profile import LayerCost, Profile

if TYPE_CHECKING:
    from pathlib import Path

seconds = st.floats(0, 1e3)
some_bytes = st.integers(0, 2**50)
costs = st.builds(
    LayerCost,
    name=st.text(max_size=8),
    forward_s=seconds,
    input_s=seconds,
    weight_s=seconds,
    parameter_bytes=some_bytes,
    state_bytes=some_bytes,
    activation_bytes=some_bytes,
    output_bytes=some_bytes,
    buffer_bytes=some_bytes,
    step_s=seconds,
)
profiles = st.builds(
    Profile,
    layers=st.lists(costs, min_size=1, max_size=4).map(tuple),
    device=st.text(max_size=8),
    micro_batch=st.integers(1, 64),
    threads=st.integers(1, 64),
    source=st.sampled_from(["measured", "estimated"]),
)


@pytest.fixture
def profile() -> Profile:
    layer = LayerCost(
        name="embed",
        forward_s=0.1,
        input_s=0.2,
        weight_s=0.3,
        parameter_bytes=100,
        state_bytes=300,
        activation_bytes=10,
        output_bytes=5,
        buffer_bytes=7,
    )
    return Profile(layers=(layer,), device="cpu", micro_batch=4, threads=1, source="measured")


@given(profile=profiles)
def test_a_profile_round_trips_through_its_file(tmp_path_factory: Any, profile: Profile) -> None:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile


def test_the_file_is_json_with_a_version(tmp_path: Path, profile: Profile) -> None:
    profile.save(tmp_path / "profile.json")
    result = json.loads((tmp_path / "profile.json").read_text())
    assert result["version"] == 1
    assert result["layers"][0]["name"] == "embed"


def test_work_and_resident_bytes_are_sums(profile: Profile) -> None:
    assert profile.layers[0].time_s == pytest.approx(0.6)
    assert profile.layers[0].resident_bytes == 407


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "its version is 2, but this culm reads version 1"),
        ({"version": None}, "its version is None"),
        ({"layers": []}, "Profile.layers is empty"),
        ({"micro_batch": 0}, "Profile.micro_batch is 0: use a whole number of at least 1"),
        ({"source": "guessed"}, "guessed"),
        ({"colour": "green"}, "colour"),
        ({"device": 3}, r"\$.device"),
    ],
)
def test_an_invalid_file_names_the_problem(
    tmp_path: Path, profile: Profile, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(msgspec.to_builtins(profile) | change))
    with pytest.raises(PlanError, match=message) as caught:
        Profile.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b'{"version": 1}', b"null"])
def test_a_file_that_is_not_a_profile_is_a_plan_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(raw)
    with pytest.raises(PlanError, match="is not a profile"):
        Profile.load(path)


def test_a_missing_file_and_a_missing_folder_are_plan_errors(tmp_path: Path, profile: Profile) -> None:
    with pytest.raises(PlanError, match=r"could not be read: No such file"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match=r"could not be written to .*No such file"):
        profile.save(tmp_path / "none" / "profile.json")


def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, profile: Profile) -> None:
    (tmp_path / "profile.json").mkdir()
    with pytest.raises(PlanError, match="could not be written"):
        profile.save(tmp_path / "profile.json")
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_negative_or_infinite_cost_is_refused(profile: Profile, value: float) -> None:
    with pytest.raises(PlanError, match=r"^layer 'embed': input_s is .*: use a finite number of at least 0$"):
        msgspec.structs.replace(profile.layers[0], input_s=value)


def test_planning_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, culm.plan; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
