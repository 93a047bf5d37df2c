"""FleetController: decides which machines to request and which to release, with the reason. Pure: no I/O, no clock.

Its inputs are the machines that the provider lists, which of them have a node in the run, the granted requests, and the
time. It returns actions, which `machine_fleet` executes. Of several offers it chooses the cheapest one after the
expected cost of preemptions; an offer that fails or has no capacity is tried again later, with doubling delay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec

from culm.machines.machine_provider import Machine, MachineNotice, MachineRequest, Market
from culm.text_format import count_noun

_FIRST_DELAY_S, _MAX_DELAY_S = 2.0, 300.0
"""Delay after the first failure of an offer, and the longest one."""
_MAX_REFUSED_IN_ROW = 3
"""After this many machines with errors of their own, while none has ever joined, the launch is given up."""
_COST_OF_PREEMPTION_H = 0.1
"""Hours of a machine that one preemption costs: waiting for the replacement, its start, and work that is repeated."""
_LISTING_DELAY_S = 60.0
"""An engine may list a machine so long after it has granted it."""
_HOUR = 3600.0


class MachineOffer(NamedTuple):
    """A kind of machine that the launch may use."""

    request: MachineRequest
    """A request for one machine."""
    price_per_h: float | None
    """Dollars; None: not known."""


class RequestMachines(NamedTuple):
    """Ask the provider for machines."""

    request: MachineRequest
    reason: str


class ReleaseMachines(NamedTuple):
    """End machines."""

    ids: tuple[str, ...]
    reason: str


class DrainMachines(NamedTuple):
    """Give machines a notice: others are there for them."""

    ids: tuple[str, ...]
    reason: str


class Report(NamedTuple):
    """Tell the user something."""

    text: str


class GiveUp(NamedTuple):
    """End the launch: machines fail in a way that will repeat."""

    reason: str


FleetAction: TypeAlias = RequestMachines | ReleaseMachines | DrainMachines | Report | GiveUp


@dataclass(frozen=True, kw_only=True)
class FleetTarget:
    """The machines that the launch should have."""

    count: int
    offers: tuple[MachineOffer, ...]
    """Which kinds of machines may be used; of equally good ones the first."""
    preemption_rate: float = 0.1
    """Expected preemptions per machine and hour, until there is experience."""
    max_price: float = math.inf
    """Dollars per hour of one machine."""
    idle_s: float = 600.0
    """A machine whose node has had no slot for this long is released, and one machine fewer is wanted."""
    market: Market | None = None
    """The market of all machines that need not be on-demand ones; None: any."""
    on_demand: int = 0
    """This many of the machines must not be spot machines."""
    join_within_s: float = 900.0
    """A machine that runs for so long without a node in the run is replaced."""
    rejoin_within_s: float = 60.0
    """The same for a machine whose node was in the run before."""


@dataclass
class OfferExperience:
    """What was seen of an offer."""

    price_per_h: float | None
    failures_in_row: int = 0
    retry_at: float = 0.0
    preemptions: int = 0
    machine_s: float = 0.0
    """Time that its machines have run, together."""

    def preemption_rate(self, prior: float) -> float:
        """Preemptions per machine and hour: `prior` counts as the experience of one hour."""
        return (self.preemptions + prior) / (self.machine_s / _HOUR + 1.0)

    def add_failure(self, now: float) -> None:
        self.retry_at = now + min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0**self.failures_in_row)
        self.failures_in_row += 1


@dataclass
class KnownMachine:
    """A machine of the launch that has not ended."""

    machine: Machine
    offer: int
    granted_at: float
    was_listed: bool = False
    runs_since: float | None = None
    has_joined: bool = False
    absent_since: float | None = None
    """Since when it has joined but has no node in the run."""
    idle_since: float | None = None
    """Since when its node has had no slot."""
    doomed: str = ""
    """Why it will end soon: a notice of the engine, or a release. Empty: it is expected to stay."""
    advised: str = ""
    """Why it should be replaced, but is used until its replacement has joined."""


@dataclass
class FleetController:
    """Keeps `target.count` machines. Times are in seconds of any clock that does not go back."""

    target: FleetTarget
    known: dict[str, KnownMachine] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    _offer_of: dict[str, int] = field(default_factory=dict)
    """The offer by which a machine was requested."""
    _refused_in_row: int = 0
    _last_failure: str = ""
    _anything_joined: bool = False
    _told_shortage: bool = False
    _told_price: bool = False

    def __post_init__(self) -> None:
        self.experience = [OfferExperience(offer.price_per_h) for offer in self.target.offers]

    def handle_granted(self, request: MachineRequest, ids: Sequence[str], now: float) -> list[FleetAction]:
        """The provider has answered a request. Fewer machines than asked for: the engine has no more for now."""
        offer = self._index_of(request)
        for id_ in ids:
            self._offer_of[id_] = offer
            granted = Machine(id=id_, state="pending", market=request.market, instance=request.instance)
            self.known.setdefault(id_, KnownMachine(granted, offer, now))
        missing = request.count - len(ids)
        if missing <= 0:
            return []
        self.experience[offer].add_failure(now)
        wait_s = self.experience[offer].retry_at - now
        machines = f"{count_noun(missing, 'machine')}{_kind_words(request)}"
        text = f"{machines} could not be had: asking again in {wait_s:.0f} s"
        first, self._told_shortage = not self._told_shortage, True
        return [Report(text)] if first else []

    def handle_refused(self, request: MachineRequest, reason: str, now: float) -> list[FleetAction]:
        """The provider has refused a request or did not answer."""
        experience = self.experience[self._index_of(request)]
        experience.add_failure(now)
        return [Report(f"the request for machines has failed ({reason}): again in {experience.retry_at - now:.0f} s")]

    def handle_notice(self, notice: MachineNotice) -> list[FleetAction]:
        """The engine will take a machine away: its replacement is requested now."""
        known = self.known.get(notice.id)
        if known is None or known.doomed:
            return []
        known.doomed = notice.reason
        return [Report(f"machine {notice.id} will be taken away in {notice.deadline_s:.0f} s: {notice.reason}")]

    def handle_advice(self, advised: Mapping[str, str]) -> list[FleetAction]:
        """The cloud recommends to replace these machines, for these reasons: an early notice without a time."""
        actions: list[FleetAction] = []
        for id_, reason in advised.items():
            known = self.known.get(id_)
            if known is not None and not known.doomed and not known.advised:
                known.advised = reason
                actions.append(Report(f"machine {id_} is used until its replacement has joined: {reason}"))
        return actions

    def lowest_price(self, market: Market) -> float | None:
        """Dollars per hour of the cheapest machine of a market now; None: there is no offer with a known price."""
        offers = zip(self.target.offers, self.experience, strict=True)
        prices = [known.price_per_h for offer, known in offers if offer.request.market == market]
        return min((price for price in prices if price is not None), default=None)

    def set_price(self, request: MachineRequest, price_per_h: float | None) -> None:
        """The price of an offer has changed."""
        self.experience[self._index_of(request)].price_per_h = price_per_h

    def decide(self, machines: Sequence[Machine], in_run: Mapping[str, bool], now: float) -> list[FleetAction]:
        """What to do now. `machines`: all that the provider lists. `in_run`: see RunHandle.machines_in_run."""
        actions = self._observe(machines, in_run, now)
        if self._is_hopeless():
            return [*actions, GiveUp(f"{self._refused_in_row} machines in a row could not join: {self._last_failure}")]
        actions += self._release_silent(now)
        actions += self._release_idle(now)
        staying = [known for known in self.known.values() if not known.doomed and not known.advised]
        actions += self._drain_replaced(staying, in_run)
        on_demand = sum(known.machine.market == "on-demand" for known in staying)
        missing, missing_on_demand = self.target.count - len(staying), max(0, self.target.on_demand - on_demand)
        if missing_on_demand:
            actions += self._request(missing_on_demand, now, "on-demand")
        if missing > missing_on_demand:
            actions += self._request(missing - missing_on_demand, now, self.target.market)
        elif missing < 0 and not missing_on_demand:
            actions += self._release_surplus(staying, -missing, in_run)
        return actions

    def _is_hopeless(self) -> bool:
        """Whether machines fail by themselves, none has ever joined, and none is about to."""
        return self._refused_in_row >= _MAX_REFUSED_IN_ROW and not self._anything_joined and not self.known

    def set_on_demand(self, count: int, reason: str) -> list[Report]:
        """From now on, this many of the machines must not be spot machines."""
        if count == self.target.on_demand:
            return []
        self.target = dataclasses.replace(self.target, on_demand=count)
        return [Report(f"{count} of the machines will be on-demand machines: {reason}")]

    def _observe(self, machines: Sequence[Machine], in_run: Mapping[str, bool], now: float) -> list[FleetAction]:
        """Compare the machines with those known before."""
        actions: list[FleetAction] = []
        listed = {machine.id: machine for machine in machines}
        for machine in machines:
            if machine.state != "ended" and machine.id not in self._ended:
                self._update(machine, in_run, now)
        for id_, known in list(self.known.items()):
            found = listed.get(id_)
            if found is None and not known.was_listed and now - known.granted_at < _LISTING_DELAY_S:
                continue
            if found is None or found.state == "ended":
                del self.known[id_]
                actions += self._handle_end(known, found, now)
        return actions

    def _update(self, machine: Machine, in_run: Mapping[str, bool], now: float) -> None:
        known = self.known.get(machine.id)
        if known is None:
            offer = self._offer_of.get(machine.id, self._index_like(machine))
            known = self.known[machine.id] = KnownMachine(machine, offer, now)
        experience = self.experience[known.offer]
        known.machine, known.was_listed = machine, True
        if machine.state == "pending" and known.runs_since is not None:
            self._begin_again(known, now - known.runs_since)
            return
        if machine.state == "running" and known.runs_since is None:
            known.runs_since = now
        is_idle = in_run.get(machine.id) is False
        known.idle_since = (known.idle_since or now) if is_idle else None
        known.absent_since = None if machine.id in in_run else known.absent_since or now
        if machine.id in in_run and not known.has_joined:
            known.has_joined = self._anything_joined = True
            self._refused_in_row, experience.failures_in_row, self._told_shortage = 0, 0, False

    def _begin_again(self, known: KnownMachine, ran_s: float) -> None:
        """The engine replaces a machine by itself, under the same id: it counts as a new one that starts."""
        experience = self.experience[known.offer]
        experience.machine_s += ran_s
        experience.preemptions += known.has_joined
        known.runs_since = known.absent_since = known.idle_since = None
        known.has_joined = False

    def _handle_end(self, known: KnownMachine, ended: Machine | None, now: float) -> list[FleetAction]:
        """A machine has ended: count failures of its kind, and report it unless it was released."""
        id_ = known.machine.id
        self._ended.add(id_)
        experience = self.experience[known.offer]
        if known.runs_since is not None:
            experience.machine_s += now - known.runs_since
        reason = ended.reason if ended is not None and ended.reason else "no reason is known"
        if known.doomed:
            return []
        if ended is not None and ended.failed:
            experience.add_failure(now)
            self._refused_in_row += 1
            self._last_failure = reason
            return [Report(f"machine {id_} has failed: {reason}")]
        if known.has_joined:
            experience.preemptions += 1
        else:
            experience.add_failure(now)
        return [Report(f"machine {id_} is gone: {reason}")]

    def _release_silent(self, now: float) -> list[FleetAction]:
        """Replace machines that run without a node in the run."""
        actions: list[FleetAction] = []
        for known in self.known.values():
            since = known.absent_since if known.has_joined else known.runs_since
            limit_s = self.target.rejoin_within_s if known.has_joined else self.target.join_within_s
            if known.doomed or since is None or now - since < limit_s:
                continue
            known.doomed = "it has no node in the run"
            self.experience[known.offer].add_failure(now)
            what = "its node was lost and has not come back" if known.has_joined else "it has not joined the run"
            actions.append(ReleaseMachines((known.machine.id,), f"{what} within {limit_s:.0f} s"))
        return actions

    def _release_idle(self, now: float) -> list[FleetAction]:
        """Release one machine that the run has not used for long."""
        for known in self.known.values():
            if known.doomed or known.idle_since is None or now - known.idle_since < self.target.idle_s:
                continue
            known.doomed = "it is not used"
            self.target = dataclasses.replace(self.target, count=max(1, self.target.count - 1))
            reason = (
                f"its node has had no slot for {self.target.idle_s:.0f} s; {self.target.count} are wanted from now on"
            )
            return [ReleaseMachines((known.machine.id,), reason)]
        return []

    def _drain_replaced(self, staying: Sequence[KnownMachine], in_run: Mapping[str, bool]) -> list[FleetAction]:
        """Let advised machines go for which others have joined the run."""
        advised = [known for known in self.known.values() if known.advised and not known.doomed]
        joined = sum(known.machine.id in in_run for known in staying)
        leaving = advised[: max(0, joined + len(advised) - self.target.count)]
        for known in leaving:
            known.doomed = known.advised
        ids = tuple(known.machine.id for known in leaving)
        return [DrainMachines(ids, f"{leaving[0].advised}, and its replacement has joined")] if leaving else []

    def _request(self, missing: int, now: float, market: Market | None = None) -> list[FleetAction]:
        """Ask for all missing machines at the best offer that may be asked now, of one market if that is given."""
        affordable = [
            index
            for index, (offer, experience) in enumerate(zip(self.target.offers, self.experience, strict=True))
            if (math.inf if experience.price_per_h is None else experience.price_per_h) <= self.target.max_price
            and market in (None, offer.request.market)
        ]
        ready = [index for index in affordable if self.experience[index].retry_at <= now]
        if not ready:
            if affordable or self._told_price:
                return []
            self._told_price = True
            return [Report(f"no kind of machine costs ${self.target.max_price:g}/h or less: waiting for a lower price")]
        self._told_price = False
        best = min(ready, key=self.cost_per_h)
        request = msgspec.structs.replace(self.target.offers[best].request, count=missing)
        return [RequestMachines(request, self._request_reason(missing, best, len(ready)))]

    def cost_per_h(self, offer: int) -> float:
        """Dollars per useful hour of an offer: its price and what its preemptions are expected to cost. Infinite if the
        price is not known: such an offer is the last choice."""
        experience = self.experience[offer]
        if experience.price_per_h is None:
            return math.inf
        rate = experience.preemption_rate(self.target.preemption_rate)
        return experience.price_per_h * (1.0 + rate * _COST_OF_PREEMPTION_H)

    def _request_reason(self, missing: int, offer: int, choices: int) -> str:
        available = self.target.count - missing
        words = f"{available} of {self.target.count} machines are there"
        if choices > 1:
            experience = self.experience[offer]
            rate = experience.preemption_rate(self.target.preemption_rate)
            cost = "" if experience.price_per_h is None else f" at ${experience.price_per_h:.3f}/h"
            words += f"; the cheapest of {choices} kinds{cost} with {rate:.2f} preemptions per hour"
        return words

    def _release_surplus(
        self, staying: Sequence[KnownMachine], surplus: int, in_run: Mapping[str, bool]
    ) -> list[FleetAction]:
        """Release machines that are not needed: without a node first, then without a slot, then the most expensive."""

        def usefulness(known: KnownMachine) -> tuple[int, int, float]:
            used = in_run.get(known.machine.id)
            return (0 if used is None else 2 if used else 1, known.machine.state == "running", -self._price_of(known))

        firm = [known for known in sorted(staying, key=usefulness) if known.machine.market == "on-demand"]
        kept = firm[len(firm) - min(len(firm), self.target.on_demand) :]
        released = sorted((known for known in staying if known not in kept), key=usefulness)[:surplus]
        for known in released:
            known.doomed = "it is not needed"
        ids = tuple(known.machine.id for known in released)
        return [ReleaseMachines(ids, f"{len(staying)} machines are there and {self.target.count} are wanted")]

    def _price_of(self, known: KnownMachine) -> float:
        price = known.machine.price_per_h
        return price if price is not None else self.experience[known.offer].price_per_h or 0.0

    def _index_of(self, request: MachineRequest) -> int:
        one = msgspec.structs.replace(request, count=1)
        return next(index for index, offer in enumerate(self.target.offers) if offer.request == one)

    def _index_like(self, machine: Machine) -> int:
        """The offer that a machine fits which was requested by an earlier process."""
        for index, (request, _) in enumerate(self.target.offers):
            if request.instance in ("", machine.instance) and request.zone in ("", machine.zone):
                return index
        return 0


def _kind_words(request: MachineRequest) -> str:
    words = [word for word in (request.instance, request.zone and f"in {request.zone}") if word]
    return f" ({' '.join(words)})" if words else ""
