"""Balance work that several workers could do, so that the busiest gets as little as possible. Uses no start times."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from culm.schedule.plan_timing import action_costs

if TYPE_CHECKING:
    from culm.plan.recover.lineage import WorkItem
    from culm.plan.recover.place_work import RunnerPool


class _Hop(NamedTuple):
    """A work item that could move from worker `source` to another."""

    source: int
    item: WorkItem


def possible_runners(item: WorkItem, pool: RunnerPool) -> tuple[int, ...]:
    """The workers that could run an item: the holder of its tape; otherwise the runners of its stage and, if only its
    output is needed, any holder of the stage."""
    if item.tape_holder is not None:
        return (item.tape_holder,)
    stage = item.key.segment % pool.stages
    return (*pool.runners[stage], *(pool.other_holders.get(stage, ()) if item.output_only else ()))


def balance_items(
    items: Sequence[WorkItem], pool: RunnerPool, min_idle: Mapping[int, float] = MappingProxyType({})
) -> dict[WorkItem, int]:
    """Assign a worker to every item that is not bound to a tape. `min_idle` is the time a worker idles in any case.

    Each item goes to the worker with the least load so far. Then the busiest worker passes an item on, its receiver
    another one if necessary, and so on, as long as no worker of the chain ends up with as much as the busiest had. For
    items of equal size the result is optimal.
    """
    balancer = _WorkBalancer(items, pool, min_idle)
    for _ in items:
        if not balancer.relieve_busiest():
            break
    return balancer.assignment


class _WorkBalancer:
    def __init__(self, items: Sequence[WorkItem], pool: RunnerPool, min_idle: Mapping[int, float]) -> None:
        price = action_costs(pool.costs, pool.segments)
        self.durations = {item: sum(price[kind][item.key.segment] for kind in item.kinds) for item in items}
        self.possible_runners = {item: possible_runners(item, pool) for item in items}
        self.loads: defaultdict[int, float] = defaultdict(float, min_idle)
        self.assignment: dict[WorkItem, int] = {}
        self.items_by_worker: defaultdict[int, list[WorkItem]] = defaultdict(list)
        for item in items:
            if item.tape_holder is not None:
                self.loads[item.tape_holder] += self.durations[item]
        for item in sorted((item for item in items if item.tape_holder is None), key=_sort_key):
            self._assign(item, min(self.possible_runners[item], key=lambda worker: (self.loads[worker], worker)))

    def _assign(self, item: WorkItem, worker: int) -> None:
        self.assignment[item] = worker
        self.loads[worker] += self.durations[item]
        self.items_by_worker[worker].append(item)

    def _unassign(self, item: WorkItem) -> None:
        worker = self.assignment[item]
        self.loads[worker] -= self.durations[item]
        self.items_by_worker[worker].remove(item)

    def relieve_busiest(self) -> bool:
        """Take work from the busiest worker along the shortest chain of hops that helps; False if there is none."""
        if not self.loads:
            return False
        busiest = max(self.loads, key=lambda worker: (self.loads[worker], -worker))
        hop_by_worker: dict[int, _Hop | None] = {busiest: None}
        front = deque([busiest])
        while front:
            worker = front.popleft()
            for item in self.items_by_worker[worker]:
                for other in self.possible_runners[item]:
                    if other in hop_by_worker:
                        continue
                    hop_by_worker[other] = _Hop(worker, item)
                    front.append(other)
                    chain = self._chain_to(hop_by_worker, other)
                    if self._lowers_maximum(chain, busiest):
                        self._apply_chain(chain)
                        return True
        return False

    def _chain_to(self, hop_by_worker: Mapping[int, _Hop | None], target: int) -> list[tuple[WorkItem, int]]:
        """(item, receiver) pairs, from the last hop to the first."""
        chain = []
        while (hop := hop_by_worker[target]) is not None:
            chain.append((hop.item, target))
            target = hop.source
        return chain

    def _lowers_maximum(self, chain: Sequence[tuple[WorkItem, int]], busiest: int) -> bool:
        gains: defaultdict[int, float] = defaultdict(float)
        for item, target in chain:
            gains[target] += self.durations[item]
            gains[self.assignment[item]] -= self.durations[item]
        return all(self.loads[worker] + gain < self.loads[busiest] - 1e-12 for worker, gain in gains.items())

    def _apply_chain(self, chain: Sequence[tuple[WorkItem, int]]) -> None:
        for item, target in chain:
            self._unassign(item)
            self._assign(item, target)


def _sort_key(item: WorkItem) -> tuple[int, int, int, bool]:
    step, segment, micro = item.key
    return step, micro, segment, item.output_only
