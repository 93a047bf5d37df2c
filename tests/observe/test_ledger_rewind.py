"""A ledger that goes back to a checkpoint: steps count once, whatever each of them had counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from culm.observe.ledger import Ledger
from culm.runtime.messages import StepReport, count_runs

M = 4


def enter(ledger: Ledger, step: int, lost: int) -> None:
    counted = tuple([0] * lost + [1] * (M - lost))
    ledger.add_report(StepReport(0, 1, step, 0.0, count_runs(counted, counted), loss_sum=1.0, weight_sum=1.0))


@given(st.lists(st.integers(0, M - 1), min_size=1, max_size=12), st.data())
def test_a_rewind_takes_back_exactly_what_the_steps_since_then_had_counted(
    lost: list[int], data: st.DataObject
) -> None:
    ledger, shorter = (Ledger(workers=1, micro_batch=2) for _ in range(2))
    back = data.draw(st.integers(0, len(lost)))
    for step, drops in enumerate(lost):
        enter(ledger, step, drops)
        if step < back:
            enter(shorter, step, drops)
    ledger.rewind(back)
    for field in ("next_step", "steps", "samples", "samples_lost", "skipped_steps", "step_ranges"):
        assert getattr(ledger, field) == getattr(shorter, field)
    assert ledger.samples_redone == 2 * sum(M - drops for drops in lost[back:])
    for step in range(back, len(lost)):
        enter(ledger, step, 0)
    assert ledger.samples == 2 * sum(M - drops for drops in lost[:back]) + 2 * M * (len(lost) - back)


def test_like_steps_take_no_more_room_than_one() -> None:
    ledger = Ledger(workers=1, micro_batch=1)
    for step in range(100):
        enter(ledger, step, int(step >= 50))
    assert len(ledger.step_ranges) == 2


def test_a_checkpoint_may_be_ahead_of_what_all_have_reported() -> None:
    """Whoever saved it has made the step: it counts by the reports that there are, or like the one before."""
    heard, unheard = (Ledger(workers=2, micro_batch=1) for _ in range(2))
    for ledger in (heard, unheard):
        for node in (0, 1):
            ledger.add_report(StepReport(node, 1, 0, 0.0, count_runs((1,) * M, (1,) * M), loss_sum=1.0, weight_sum=1.0))
    heard.add_report(StepReport(0, 1, 1, 0.0, count_runs((1,) * M, (1,) * M), loss_sum=3.0, weight_sum=1.0))
    for ledger in (heard, unheard):
        ledger.rewind(2)
        assert (ledger.next_step, ledger.samples, ledger.samples_redone) == (2, 2 * M, 0)
    assert heard.last_step is not None
    assert heard.last_step.loss == 3.0
