"""A schedule of faults is a value that prints as code, and invalid faults are refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.cluster.node_faults import ClusterFault
from culm.errors import UsageError
from culm.schedule import generate_plan
from culm.strategies import get
from culm.testing import Faults, KillNode
from culm.testing.random_faults import random_faults

EVERYTHING = (
    Faults()
    .kill(node=2, at="1B3", step=5)
    .kill((1, 2), after_s=0.25, silence=True)
    .kill(0, at="inventory", nth=2)
    .kill(1, step=3, nth=7)
    .pause(0, at="0S+", step=2, seconds=0.5)
    .partition((1, 3), at="commit", seconds=5)
    .drop_message(0, 1, nth=3, kind="message")
    .delay_message(1, 0, seconds=2)
    .reorder(seed=7)
    .slow_link(target=2, latency=0.1, seconds_per_byte=1e-6)
    .slow_disk(1, seconds=3)
)


def test_a_schedule_prints_as_the_code_that_makes_it() -> None:
    text = str(EVERYTHING)
    assert text.startswith("Faults().kill(node=2, at='1B3', step=5).kill(node=(1, 2), after_s=0.25, silence=True)")
    assert eval(text) == EVERYTHING


def test_adding_a_fault_leaves_the_schedule_as_it_was() -> None:
    one = Faults().kill(0, step=1)
    one.kill(1, step=1)
    assert str(one) == "Faults().kill(node=0, step=1)"
    assert one + Faults().reorder() == one.reorder()


@pytest.mark.parametrize(
    ("moment", "action", "strikes"),
    [
        ({"at": "1B3"}, "1B3", True),
        ({"at": "1B3"}, "1W3", True),  # under split backward B means the W
        ({"at": "1B3"}, "1I3", False),
        ({"at": "1B3"}, "1B31", False),
        ({"at": "1W3"}, "1B3", False),
        ({"at": "1S"}, "1S+", False),
        ({"at": "1S+"}, "1S+", True),
        ({"at": "inventory"}, "inventory", True),
        ({"at": "evaluate 1F0"}, "1F0", False),
        ({"at": "evaluate 1F0"}, "evaluate 1F0", True),
        ({"step": 4}, "0F0", True),
        ({"step": 5}, "0F0", False),
        ({"after_s": 1.0}, "0F0", False),
    ],
)
def test_a_moment_is_an_action_of_a_step_of_a_node(moment: dict[str, object], action: str, strikes: bool) -> None:
    kill = KillNode(node=(2, 3), **moment)  # type: ignore[arg-type]
    assert kill.matches(3, 4, action) is strikes
    assert not kill.matches(1, 4, action)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Faults().kill(2), "kill of node 2 has no moment: give at=, step= or after_s="),
        (lambda: Faults().kill(2, at="1B3", after_s=1), "kill of node 2 has two moments"),
        (lambda: Faults().kill(2, at="1X3"), "kill: at is '1X3': '1X3' is not an action"),
        (lambda: Faults().kill(2, at="1F"), "kill: at is '1F': '1F' has no micro-batch: write 1F0"),
        (lambda: Faults().kill(2, at="1R+"), "only the optimizer step has a moment after it"),
        (lambda: Faults().pause(2, at="evaluate 1B0", seconds=1), "an evaluation has forward passes only"),
        (lambda: Faults().kill(-1, step=0), "kill: node is -1: use a number from 0 on"),
        (lambda: Faults().kill((), step=0), r"kill: node is \(\): use a number from 0 on"),
        (lambda: Faults().kill(2, step=0, nth=0), "kill: nth is 0: the first time is 1"),
        (lambda: Faults().pause(2, step=0, seconds=-1), "pause: -1 is not a duration"),
        (lambda: Faults().partition(2, step=0, seconds=float("nan")), "partition: nan is not a duration"),
        (lambda: Faults().slow_disk(2, seconds=float("inf")), "slow_disk: inf is not a duration"),
    ],
)
def test_invalid_faults_are_refused_in_one_sentence(make: object, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make()  # type: ignore[operator]


# --kill


@pytest.mark.parametrize(
    ("text", "kill"),
    [
        ("node=3 step=5 at=2B1", KillNode(node=3, step=5, at="2B1")),
        ("  at=2B1   node=3 ", KillNode(node=3, at="2B1")),
        ("node=0 step=0", KillNode(node=0, step=0)),
        ("node=1,2 step=7 at=1S nth=2", KillNode(node=(1, 2), step=7, at="1S", nth=2)),
        ("node=0 at=commit step=3", KillNode(node=0, step=3, at="commit")),
    ],
)
def test_a_kill_can_be_written_on_a_command_line(text: str, kill: KillNode) -> None:
    assert KillNode.parse(text) == kill
    assert KillNode.parse(kill.spec_text) == kill


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "names no node"),
        ("step=5 at=2B1", 'names no node: write it as in "node=3 step=5 at=2B1"'),
        ("node=3", "does not say when: add step=5, at=2B1, or both"),
        ("3 5 2B1", "has '3'"),
        ("node=3 when=5", "has 'when=5'"),
        ("node=3 node=4 step=1", "says node twice"),
        ("node=three step=1", "has node=three: use a whole number from 0 on"),
        ("node=1,,2 step=1", "has node=1,,2"),
        ("node=-1 step=1", "has node=-1"),
        ("node=1 step=1.5", "has step=1.5"),
        ("node=3 step=5 at=B1", "at is 'B1': 'B1' is not an action"),
        ("node=3 step=5 at=2SEND_F1", "is communication"),
        ("node=3 step=5 nth=0", "nth is 0"),
    ],
)
def test_a_kill_that_cannot_be_parsed_is_refused_with_its_text_and_the_fix(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        KillNode.parse(text)
    assert str(caught.value).startswith(f"--kill {text!r}")
    assert sentence in str(caught.value)


@given(
    st.text(max_size=30) | st.lists(st.sampled_from(["node=1", "step=2", "at=2F0", "nth=2", "x", "="])).map(" ".join)
)
def test_any_text_gives_a_kill_or_a_usage_error(text: str) -> None:
    try:
        kill = KillNode.parse(text)
    except UsageError:
        return
    assert KillNode.parse(kill.spec_text) == kill


PLAN = generate_plan("1f1b", pipelines=2, stages=3, micro_batches=4)


def test_a_kill_without_an_action_gets_one_that_the_node_runs_from_the_seed() -> None:
    kill = KillNode.parse("node=4 step=1")
    chosen = [kill.resolve_action(PLAN, steps=3, seed=seed).at for seed in range(40)]
    assert chosen == [kill.resolve_action(PLAN, steps=3, seed=seed).at for seed in range(40)]
    assert set(chosen) <= set(map(str, PLAN.workers[4]))
    assert len(set(chosen)) > 3


def test_a_node_that_does_not_run_the_drawn_action_is_killed_when_the_step_is_over() -> None:
    """The shape of the run has changed since the action was drawn."""
    kill = KillNode.parse(KillNode.parse("node=4 step=1").resolve_action(PLAN, steps=9).spec_text)
    moments = [(4, 1, "0F0"), (4, 2, "0F0"), (3, 3, "0F0"), (4, 3, "inventory"), (4, 3, "evaluate 0F0"), (4, 3, "0F0")]
    assert [kill.is_overdue(*moment) for moment in moments] == [False] * 5 + [True]
    asked_for = KillNode.parse("node=4 step=1 at=1F2").resolve_action(PLAN, steps=9)
    assert not asked_for.is_overdue(4, 3, "0F0")


def test_an_action_that_the_node_runs_is_left_as_it_is() -> None:
    split = generate_plan("zb", pipelines=1, stages=2, micro_batches=4)
    for text in ("node=1 at=1W3", "node=1 at=1B3", "node=1 at=1S+", "node=1 at=adopt", "node=0 at=commit step=2"):
        assert KillNode.parse(text).resolve_action(split, steps=3) == KillNode.parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("node=6 step=0 at=0F0", "there is no node 6: the last one is 5"),
        ("node=1 step=3 at=1F0", "there is no step 3: the last one is 2"),
        ("node=1 step=0 at=2F0", "node 1 never runs 2F0: name one of its actions, 1F0 1F1 1B0 1B1 1R 1S"),
        ("node=1 step=0 at=1F3", "node 1 never runs 1F3"),
        ("node=1 step=0 at=1W0", "node 1 never runs 1W0"),
    ],
)
def test_a_kill_that_could_never_happen_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        KillNode.parse(text).resolve_action(PLAN, steps=3)
    assert str(caught.value).startswith(f"--kill {text!r}: ")
    assert sentence in str(caught.value)


# Random schedules


@pytest.mark.parametrize(
    ("strategy", "shape", "lost", "can"),
    [
        ("none", (2, 3), [], True),
        ("none", (2, 3), [0], False),
        ("reroute", (2, 3), [0, 4, 2], True),
        ("reroute", (2, 3), [1, 4], False),
        ("reroute", (1, 3), [1], False),
        ("shadow", (1, 3), [1], True),
        ("shadow", (1, 3), [1, 2], False),
        ("shadow", (2, 3), [1, 4], True),
        ("shadow", (2, 3), [0, 1, 3, 4], False),
    ],
)
def test_a_loss_is_survivable_while_every_stage_has_a_holder(
    strategy: str, shape: tuple[int, int], lost: list[int], can: bool
) -> None:
    plan = generate_plan("1f1b", pipelines=shape[0], stages=shape[1], micro_batches=6)
    assert get(strategy).survives(plan, lost) is can


@given(
    st.integers(0, 10**6),
    st.sampled_from(["none", "reroute", "shadow", "shadow-lazy"]),
    st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 3), (3, 2)]),
    st.sampled_from(["1f1b", "zb"]),
)
def test_random_faults_depend_on_the_seed_only_and_are_survivable(
    seed: int, strategy: str, shape: tuple[int, int], schedule: str
) -> None:
    plan = generate_plan(schedule, pipelines=shape[0], stages=shape[1], micro_batches=6)
    first, second = (
        random_faults(random.Random(seed), plan, strategy=get(strategy), steps=4, lease_s=2.0) for _ in range(2)
    )
    assert first == second
    assert 1 <= len(first.all) <= 9
    lost = {node for fault in first.all for node in _lost_by(fault)}
    assert get(strategy).survives(plan, {node for node in lost if node < len(plan.workers)})


def _lost_by(fault: ClusterFault) -> tuple[int, ...]:
    """The nodes lost by a fault: by a kill, a notice, or a silence longer than the lease."""
    nodes: tuple[int, ...] = getattr(fault, "nodes", ())
    silenced = fault.call_name in ("pause", "partition") and getattr(fault, "seconds", 0.0) > 2.0
    return nodes if silenced or fault.call_name in ("kill", "warn") else ()


@given(st.integers(0, 10**6), st.sampled_from([(1, 2), (1, 3), (2, 3)]))
def test_with_a_checkpoint_all_nodes_but_one_may_be_lost(seed: int, shape: tuple[int, int]) -> None:
    plan = generate_plan("1f1b", pipelines=shape[0], stages=shape[1], micro_batches=6)
    faults = random_faults(random.Random(seed), plan, strategy=get("shadow"), steps=4, lease_s=2.0, saved_from=3)
    lost = {node for fault in faults.all for node in _lost_by(fault) if node < len(plan.workers)}
    assert len(lost) < len(plan.workers)
    if not get("shadow").survives(plan, lost):
        last = faults.all[-1]
        assert isinstance(last, KillNode)
        assert last.step == 3


def test_random_faults_are_of_all_kinds() -> None:
    drawn = [
        random_faults(random.Random(seed), PLAN, strategy=get("shadow"), steps=4, lease_s=2.0) for seed in range(300)
    ]
    words = {fault.call_name for faults in drawn for fault in faults.all}
    harmless = {"delay_message", "slow_link", "slow_disk", "reorder", "drop_message", "outage"}
    assert words == {"kill", "warn", "pause", "partition", "join", *harmless}
    kills = [fault for faults in drawn for fault in faults.all if isinstance(fault, KillNode)]
    assert any(len(kill.nodes) > 1 for kill in kills)
    assert {"inventory", "adopt", "commit"} <= {kill.at for kill in kills}
    assert any(kill.silence for kill in kills)
