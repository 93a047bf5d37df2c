"""A bit flips in the memory of a real worker process: the run returns to a verified checkpoint without that node."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_jobs import job
from torch import nn

import culm
from culm.testing import reference


def flipping_optimizer(mark: str) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """SGD that flips a bit of its first parameter in its fifth step, in the first process that gets there."""

    class Flipping(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            self.steps += 1
            if self.steps == 5:
                try:
                    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return loss
                self.param_groups[0]["params"][0].data.view(torch.int32).view(-1)[0] ^= 1
            return loss

    return lambda parameters: Flipping(parameters, lr=0.1, momentum=0.9)


@pytest.mark.real
def test_a_faulty_machine_is_found_and_the_result_is_right(tmp_path: Path, fork_server: Any) -> None:
    fields: dict[str, Any] = {"exact": True, "steps": 10}
    mark, out = str(tmp_path / "flipped"), tmp_path / "run"
    described = job(**fields, optimizer=flipping_optimizer(mark))
    summary = culm.train(
        described, pipelines=3, stages=1, strategy="reroute", checkpoint_every=2, out=str(out), fork_server=fork_server
    )
    assert Path(mark).exists()
    assert summary.weights_sha256 == reference(job(**fields)).weights_sha256
    assert summary.corruptions >= 1, "a leader on the faulty machine is replaced, and the next one may find it again"
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert len({event["node"] for event in events if event["kind"] == "quarantined"}) == 1
