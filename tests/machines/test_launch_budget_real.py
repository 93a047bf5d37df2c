"""A whole launch with a budget and a deadline: an on-demand machine helps out, and the budget ends the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.machines.launched_jobs import LIMIT_S, STEPS, launched_job

pytestmark = [pytest.mark.real, pytest.mark.waits(25), pytest.mark.usefixtures("forked_programs")]

PROVIDER = """
import msgspec
from pathlib import Path
from culm.machines.engines.local_machines import LocalMachines

class MarketMachines(LocalMachines):
    # Processes of this machine as a market offers them: one spot machine, and on-demand ones for ten times as much.
    name = "market"
    costs_money = True

    def __init__(self, settings):
        super().__init__(settings)
        self.market = {{}}

    def price(self, request):
        return 36.0 if request.market == "spot" else 360.0

    async def request(self, spec, request):
        spot = request.market == "spot"
        one = msgspec.structs.replace(request, count=min(request.count, 1))
        ids = [] if spot and "spot" in self.market.values() else await super().request(spec, one)
        self.market.update(dict.fromkeys(ids, request.market))
        return ids

    async def machines(self):
        prices = {{"spot": 36.0, "on-demand": 360000.0 if Path({dearer!r}).exists() else 360.0}}
        found = [(each, self.market[each.id]) for each in await super().machines()]
        return [msgspec.structs.replace(each, market=market, price_per_h=prices[market]) for each, market in found]
"""


def test_the_deadline_brings_an_on_demand_machine_and_the_budget_ends_the_run_with_a_checkpoint(
    tmp_path: Path, culm_program: str
) -> None:
    dearer = tmp_path / "dearer"
    (tmp_path / "market.py").write_text(PROVIDER.format(dearer=str(dearer)))
    options = ["--on", "market:MarketMachines", "--yes", "--spot", "--nodes", "2", "--pipelines", "2"]
    options += [
        "--start-after",
        "1",
        "--deadline",
        "310s",
        "--budget",
        "1000",
        "--suspect-after",
        "2",
        "--program",
        culm_program,
    ]
    with launched_job(tmp_path, *options, "--address", "127.0.0.1") as launched:
        launched.wait_for("the run begins, because 1 of 2 nodes have joined")
        said = launched.wait_for("1 of the machines will be on-demand machines")
        launched.wait_for("requesting 1 machine (on-demand)")
        launched.wait_for("node 1 runs layers")
        decided = launched.wait_for_event("fleet", on_demand=1)
        assert said.endswith(decided["why"])
        assert "deadline" in decided["why"]
        dearer.touch()
        assert launched.process.wait(LIMIT_S) == 1, launched.output
        launched.wait_for("the budget of $1,000.00 is reached")
        stopped = launched.wait_for_event("stopped")
        assert list((tmp_path / "run" / "checkpoints").glob(f"step-{stopped['step'] + 1:08}"))
        (row,) = [json.loads(launched.culm("cost", "--json", str(tmp_path / "run")))]
        assert {kind["market"] for kind in row["kinds"]} == {"spot", "on-demand"}
        assert row["cost_usd"] > 0
        assert stopped["step"] < launched.steps < STEPS
    assert launched.processes() == []
    assert list((launched.home / "launches").iterdir()) == []
