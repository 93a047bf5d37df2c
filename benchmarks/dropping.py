"""`culm bench dropping`: what it does to training to drop samples. The small GPT's loss against the drop rate.

In every step each of four pipelines loses its samples with the drop rate as probability, and the gradient is the mean
over what is left: what the baseline `drop` does, here in one plain loop of torch. The number of steps is fixed, as in
Bamboo's figure; one pipeline always stays, since a step without samples would be none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from culm.models import Characters, gpt, gpt_loss

PIPELINES = 4
SAMPLES = 4
"""Of a pipeline, in a step."""
LENGTH = 32
RATES = (0.0, 0.01, 0.05, 0.10, 0.175, 0.25, 0.50)
BAMBOO = {0.0: "6.6", 0.01: "6.8", 0.05: "7.2", 0.10: "7.15", 0.175: "7.25", 0.25: "8.1", 0.50: "> 8.4"}
"""GPT-2 after about 180 steps, read off Bamboo's chart (NSDI'23): another model, so only the direction compares."""
_EVALUATED = 128
"""Pieces of the text, evenly spread, that the loss at the end is taken over."""


def drawn(rate: float, steps: int, seed: int) -> dict[int, tuple[int, ...]]:
    """By step: the pipelines whose samples are dropped, at most all but one. A higher rate drops these and more."""
    dice = random.Random(f"dropped {seed}")
    found = {}
    for step in range(steps):
        lots = [(dice.random(), pipeline) for pipeline in range(PIPELINES)]
        lost = [pipeline for lot, pipeline in sorted(lots) if lot < rate]
        found[step] = tuple(lost[: PIPELINES - 1])
    return found


def trained(steps: int, seed: int, dropped: Mapping[int, Collection[int]]) -> float:
    """The loss over fixed pieces of the text after so many steps; the seed decides weights and samples."""
    data = Characters(length=LENGTH)
    torch.manual_seed(seed)
    model = nn.Sequential(*(layer() for layer in gpt("nano", vocab=data.vocab)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for step in range(steps):
        drawn_from = torch.randint(len(data), (PIPELINES, SAMPLES))  # also for those that are dropped
        left = [pipeline for pipeline in range(PIPELINES) if pipeline not in dropped.get(step, ())]
        inputs, targets = _batch(data, drawn_from[left].flatten().tolist())
        optimizer.zero_grad()
        gpt_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    inputs, targets = _batch(data, range(0, len(data) - 1, len(data) // _EVALUATED))
    with torch.no_grad():
        return float(gpt_loss(model(inputs), targets))


def _batch(data: Characters, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*(data[index] for index in indices), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def run(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The loss for each rate, over some seeds, and how much it is above that of the same seeds without drops."""
    steps, seeds = (10, (0, 1)) if quick else (50, (0, 1, 2))
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for rate in RATES[:: 3 if quick else 1]:
        rows.append(_row(rate, steps, seeds, rows[0]["losses"] if rows else None))
        progress(f"dropping {rate:.1%} of the samples: loss {rows[-1]['loss']:.3f}")
    return {"rows": rows, "steps": steps, "seeds": len(seeds), "pipelines": PIPELINES, "model": "gpt nano"}


def _row(rate: float, steps: int, seeds: Sequence[int], without: Sequence[float] | None) -> dict[str, Any]:
    drops = [drawn(rate, steps, seed) for seed in seeds]
    losses = [trained(steps, seed, dropped) for seed, dropped in zip(seeds, drops, strict=True)]
    above = [loss - base for loss, base in zip(losses, without or losses, strict=True)]
    return {
        "rate": rate,
        "dropped": mean(len(lost) / PIPELINES for dropped in drops for lost in dropped.values()),
        "loss": mean(losses),
        "above": mean(above),
        "above_spread": stdev(above),
        "losses": losses,
        "bamboo": BAMBOO[rate],
    }


def table(result: dict[str, Any]) -> Table:
    """The figures for people."""
    title = f"{result['model']}, {result['steps']} steps, {result['seeds']} seeds"
    made = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("drop rate", "dropped", "loss", "above none", "spread of that", "Bamboo's GPT-2 (off a chart)"):
        made.add_column(heading, justify="right")
    for row in result["rows"]:
        shares = (f"{row['rate']:.1%}", f"{row['dropped']:.1%}")
        figures = (f"{row['loss']:.3f}", f"{row['above']:+.3f}", f"{row['above_spread']:.3f}")
        made.add_row(*shares, *figures, row["bamboo"])
    return made
