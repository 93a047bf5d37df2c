"""Parts of large epochs: each worker trains with its part as with the whole epoch."""

from __future__ import annotations

import pytest
from tests.testing.small_job import job

from culm.cluster.agent import agent
from culm.cluster.leader import leader_state
from culm.cluster.leader.epoch_parts import FAN_OUT, epoch_digest, forwarding_shares, split_epoch
from culm.cluster.leader.next_epoch import first_epoch
from culm.cluster.prepare_run import prepare_run
from culm.config import RunConfig
from culm.runtime import messages
from culm.runtime.epoch import Epoch, Member
from culm.schedule import Plan
from culm.schedule.send_recv import derive_transfers
from culm.testing import Faults, simulate


def small_epoch(strategy: str = "reroute") -> Epoch:
    setup = prepare_run(job(), RunConfig(pipelines=4, stages=2, strategy=strategy), measure=False)
    return first_epoch(setup, "leader", tuple(Member(n, f"worker-{n}") for n in range(8)), None, 1.0)


def test_pipelines_that_share_nothing_get_parts_of_their_own() -> None:
    groups = list(split_epoch(small_epoch()))
    assert [group.workers for group in groups] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_a_part_has_the_sends_and_receives_of_its_workers() -> None:
    epoch = small_epoch()
    whole = derive_transfers(Plan.from_text(epoch.plan))
    for group in split_epoch(epoch):
        part = derive_transfers(Plan.from_text(group.part.plan))
        for worker in group.workers:
            assert part[worker] == whole[worker]


def test_a_digest_identifies_the_encoded_epoch() -> None:
    body = messages.encode(small_epoch())
    assert epoch_digest(body) == epoch_digest(bytes(body)) != epoch_digest(body + b" ")


@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
def test_training_with_parts_gives_the_same_weights(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults().kill(3, at="1F1", step=1)
    whole = simulate(job(), faults=faults, pipelines=4, stages=2, strategy=strategy)
    monkeypatch.setattr(leader_state, "LARGE_EPOCH_BYTES", 0)
    parts = simulate(job(), faults=faults, pipelines=4, stages=2, strategy=strategy)
    assert parts.weights_sha256 == whole.weights_sha256
    assert parts.summary["preemptions"] == 1


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 80, 1000])
def test_a_part_that_is_forwarded_reaches_every_agent_once(count: int) -> None:
    agents, reached, most = [f"agent-{n}" for n in range(count)], list[str](), 0
    waiting = forwarding_shares(agents)
    while waiting:
        agent, others = waiting.pop()
        reached.append(agent)
        shares = forwarding_shares(others)
        most = max(most, len(shares))
        waiting += shares
    assert sorted(reached) == sorted(agents)
    assert most <= FAN_OUT


def test_the_leader_sends_each_part_once_and_agents_send_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    forwarded = list[tuple[str, ...]]()
    forward = agent.Agent._forward_part

    def counted(self: agent.Agent, part: messages.EpochPart) -> None:
        forwarded.append(part.forward_to)
        forward(self, part)

    monkeypatch.setattr(agent.Agent, "_forward_part", counted)
    monkeypatch.setattr(leader_state, "LARGE_EPOCH_BYTES", 0)
    simulate(job(), pipelines=4, stages=2, strategy="reroute")
    assert sorted(map(len, forwarded)) == [0, 0, 0, 0, 1, 1, 1, 1], "four parts, each for two nodes"


def test_agents_that_do_not_get_a_part_from_another_read_the_whole_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults().kill(3, at="1F1", step=1)
    whole = simulate(job(), faults=faults, pipelines=4, stages=2, strategy="reroute")
    monkeypatch.setattr(leader_state, "LARGE_EPOCH_BYTES", 0)
    monkeypatch.setattr(agent.Agent, "_forward_part", lambda *_: None)
    lonely = simulate(job(), faults=faults, pipelines=4, stages=2, strategy="reroute")
    assert lonely.weights_sha256 == whole.weights_sha256


def test_an_agent_without_its_part_reads_the_whole_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = simulate(job(), pipelines=4, stages=2, strategy="reroute")
    monkeypatch.setattr(leader_state, "LARGE_EPOCH_BYTES", 0)
    monkeypatch.setattr(agent.Agent, "_has_parts", lambda *_: False)
    faults = Faults().kill(3, at="1F1", step=1)
    assert simulate(job(), faults=faults, pipelines=4, stages=2, strategy="reroute").weights_sha256 == (
        whole.weights_sha256
    )
