"""Integrity check: what the leader does when holders of a layer differ at a checkpoint.

The run returns to the newest verified checkpoint. The faulty node is identified by a majority of three or more holders
or, where there are two, by the replay of the same steps in an exact run: the holder that the replay contradicts was
faulty. It is quarantined: it leaves the run, and its machine may not join again. A replay identifies no worker if wrong
weights had changed the gradients of all nodes before the comparison; the event says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.cluster.leader.checkpoints.replica_check import contradicted_by_replay
from culm.errors import RunError
from culm.text_format import count_noun

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from culm.cluster.leader.checkpoints.checkpoint_tracker import CheckpointCheck
    from culm.cluster.leader.epoch_change import EpochChange
    from culm.cluster.leader.leader_snapshot import LeaderSnapshot
    from culm.cluster.leader.leader_state import Flow
    from culm.cluster.leader.membership import Membership

_MAX_RETURNS = 3
"""Returns to the same verified checkpoint without an identified node, after which the run ends."""


class IntegrityCheck:
    """Handles the comparisons of holders on behalf of the leader."""

    def __init__(self, epoch_change: EpochChange, membership: Membership) -> None:
        self._epoch_change, self._membership, self._state = epoch_change, membership, epoch_change.state
        self._unresolved: dict[int, CheckpointCheck] = {}
        """By step: comparisons that found a difference and did not identify the faulty node."""
        self._returns = 0
        """Returns since the last verified checkpoint."""

    @property
    def unresolved(self) -> tuple[CheckpointCheck, ...]:
        """The comparisons that a replay has not explained."""
        return tuple(self._unresolved.values())

    @property
    def returns(self) -> int:
        """Returns since the last verified checkpoint."""
        return self._returns

    def restore(self, snapshot: LeaderSnapshot) -> None:
        """Take over what the previous leader knew."""
        self._unresolved = {**{each.step: each for each in snapshot.unresolved}, **self._unresolved}
        self._returns = max(self._returns, snapshot.returns)

    def handle_comparison(self, found: CheckpointCheck) -> Flow[None]:
        """Act on the comparison of a checkpoint. Raises RunError if the run cannot continue."""
        if found.comparison.differing_layers:
            yield from self._handle_difference(found)
            return
        before = self._unresolved.pop(found.step, None)
        if found.comparison.is_verified:
            self._returns = 0
        if before is not None and self._state.job.exact:
            wrong = contradicted_by_replay(before.checksums, found.checksums, before.comparison.differing_layers)
            yield from self._quarantine(
                self._nodes_of(wrong), f"the replay of the steps before step {found.step} contradicts its weights"
            )
            if not wrong:
                self._report_unresolved(before)

    def _report_unresolved(self, before: CheckpointCheck) -> None:
        """Say that the faulty node is not known. A machine that is faulty again will be found by another difference."""
        nodes = ", ".join(map(str, self._holders(before)))
        why = (
            f"one of nodes {nodes} is faulty, and it is not clear which: its wrong weights had changed the gradients "
            "of all nodes before they were compared; use three pipelines, or compare more often (--checkpoint-every)"
        )
        self._state.log_event("corruption_unresolved", step=before.step, holders=self._holders(before), why=why)

    def _handle_difference(self, found: CheckpointCheck) -> Flow[None]:
        state, comparison = self._state, found.comparison
        layers = ", ".join(map(str, comparison.differing_layers))
        holders, faulty = self._holders(found), self._nodes_of(comparison.faulty_workers)
        what = f"holders of {'layer' if len(comparison.differing_layers) == 1 else 'layers'} {layers} differ"
        state.corruptions += 1
        if not state.setup.survives_losses:
            raise RunError(
                f"{what} after step {found.step} (nodes {', '.join(map(str, holders))}): one of these machines is "
                f"faulty; strategy {state.setup.strategy} cannot return to a checkpoint, so resume from a verified one"
            )
        self._returns += 1
        if self._returns > _MAX_RETURNS:
            raise RunError(
                f"{what} again after {count_noun(_MAX_RETURNS, 'return')} to a verified checkpoint (nodes "
                f"{', '.join(map(str, holders))}), and it is not clear which machine is faulty: replace them"
            )
        how = "a majority of its holders identifies the faulty node" if faulty else self._how_to_find()
        state.log_event(
            "corruption",
            node=faulty[0] if len(faulty) == 1 else None,
            step=found.step,
            layers=list(comparison.differing_layers),
            holders=holders,
            why=f"{what}; the run returns to the newest verified checkpoint; {how}",
        )
        self._epoch_change.return_to_verified()
        for node in faulty:
            self._membership.refuse_wrong_machine(node)
        if not faulty:
            self._unresolved[found.step] = found.without_equal_layers()
        # The next leader must return, too. If this leader's node is the faulty one, its session ends right after this.
        yield from state.write_snapshot()
        yield from self._quarantine(faulty, f"most holders of layers {layers} contradict its weights")

    def _how_to_find(self) -> str:
        if self._state.job.exact:
            return "there is no majority: the replay of these steps may identify the faulty node"
        return "there is no majority, and without exact a replay may differ: the faulty node is not identified"

    def _quarantine(self, nodes: Sequence[int], why: str) -> Flow[None]:
        """Remove nodes from the run. Their machines may not join again."""
        for node in nodes:
            self._state.log_event("quarantined", node=node, why=why)
            self._state.evict_node(node)
            yield from self._membership.quarantine(node)

    def _nodes_of(self, workers: Iterable[int]) -> list[int]:
        return sorted({self._state.members.node_of(worker) for worker in workers})

    def _holders(self, found: CheckpointCheck) -> list[int]:
        """The nodes that hold the layers that differ."""
        layers = set(found.comparison.differing_layers)
        return self._nodes_of(worker for worker, own in found.checksums.items() if own.keys() & layers)
