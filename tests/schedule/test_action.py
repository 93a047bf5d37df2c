"""Actions are written as in torch.distributed.pipelining and can be parsed back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import ScheduleError
from culm.schedule import Action, Kind

numbers = st.integers(0, 10**6)
actions = st.one_of(
    st.builds(Action, numbers, st.sampled_from([Kind.F, Kind.I, Kind.W, Kind.B]), numbers),
    st.builds(Action, numbers, st.sampled_from([Kind.R, Kind.S]), st.none()),
)


@given(actions)
def test_action_round_trips_through_text(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_the_notation_is_segment_kind_and_micro_batch() -> None:
    assert [str(Action(2, Kind.F, 0)), str(Action(1, Kind.I, 3)), str(Action(1, Kind.R))] == ["2F0", "1I3", "1R"]


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("0FORWARD1", "0F1"),
        ("3BACKWARD_INPUT2", "3I2"),
        ("3BACKWARD_WEIGHT2", "3W2"),
        ("3FULL_BACKWARD2", "3B2"),
        ("3REDUCE_GRAD", "3R"),
    ],
)
def test_long_spellings_of_torch_are_parsed(text: str, short: str) -> None:
    assert str(Action.parse(text)) == short


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not an action: write segment, kind and micro-batch as in 2F0"),
        ("2X0", "'2X0' is not an action"),
        ("F0", "'F0' is not an action"),
        ("-1F0", "'-1F0' is not an action"),
        ("2f0", "'2f0' is not an action"),
        ("2F0 ", "'2F0 ' is not an action"),
        ("٢F0", "is not an action"),
        ("9" * 5000 + "F0", "is not an action"),
        ("2F", "'2F' has no micro-batch: write 2F0"),
        ("1R3", "'1R3' has a micro-batch, but R is for a whole segment: write 1R"),
        ("3SEND_F1", "'3SEND_F1' is communication, which culm derives from the plan"),
        ("3UNSHARD", "'3UNSHARD' is communication"),
    ],
)
def test_invalid_action_text_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Action.parse(text)
    assert says in str(error.value)
