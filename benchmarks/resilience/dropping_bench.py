"""`culm bench dropping`: what dropping samples does to training. The loss of a small GPT by drop rate.

In every step each of four pipelines loses its samples with the drop rate as probability, and the gradient is the mean
over the remaining samples: what the baseline `drop` does, here in a plain torch loop. The number of steps is fixed, as
in Bamboo's figure; at least one pipeline remains, because a step needs samples.
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
"""Samples per pipeline and step."""
LENGTH = 32
DROP_RATES = (0.0, 0.01, 0.05, 0.10, 0.175, 0.25, 0.50)
BAMBOO_LOSSES = {0.0: "6.6", 0.01: "6.8", 0.05: "7.2", 0.10: "7.15", 0.175: "7.25", 0.25: "8.1", 0.50: "> 8.4"}
"""GPT-2 after about 180 steps, read from Bamboo's chart (NSDI'23): another model, so only the trend is comparable."""
_EVALUATION_SAMPLES = 128
"""Number of evenly spaced text pieces over which the final loss is computed."""


def draw_dropped_pipelines(rate: float, steps: int, seed: int) -> dict[int, tuple[int, ...]]:
    """By step: the pipelines whose samples are dropped, at most all but one. A higher rate drops a superset."""
    rng = random.Random(f"dropped {seed}")
    dropped = {}
    for step in range(steps):
        draws = [(rng.random(), pipeline) for pipeline in range(PIPELINES)]
        lost = [pipeline for draw, pipeline in sorted(draws) if draw < rate]
        dropped[step] = tuple(lost[: PIPELINES - 1])
    return dropped


def train_with_drops(steps: int, seed: int, dropped: Mapping[int, Collection[int]]) -> float:
    """The loss over fixed pieces of the text after this many steps; the seed determines weights and samples."""
    data = Characters(length=LENGTH)
    torch.manual_seed(seed)
    model = nn.Sequential(*(layer() for layer in gpt("nano", vocab=data.vocab)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for step in range(steps):
        sample_indices = torch.randint(len(data), (PIPELINES, SAMPLES))  # drawn for dropped pipelines too
        kept = [pipeline for pipeline in range(PIPELINES) if pipeline not in dropped.get(step, ())]
        inputs, targets = _batch(data, sample_indices[kept].flatten().tolist())
        optimizer.zero_grad()
        gpt_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    inputs, targets = _batch(data, range(0, len(data) - 1, len(data) // _EVALUATION_SAMPLES))
    with torch.no_grad():
        return float(gpt_loss(model(inputs), targets))


def _batch(data: Characters, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*(data[index] for index in indices), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def run(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The loss for each rate, over several seeds, and its difference to the same seeds without drops."""
    steps, seeds = (10, (0, 1)) if quick else (50, (0, 1, 2))
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for rate in DROP_RATES[:: 3 if quick else 1]:
        rows.append(_measure_rate(rate, steps, seeds, rows[0]["losses"] if rows else None))
        progress(f"dropping {rate:.1%} of the samples: loss {rows[-1]['loss']:.3f}")
    return {"rows": rows, "steps": steps, "seeds": len(seeds), "pipelines": PIPELINES, "model": "gpt nano"}


def _measure_rate(
    rate: float, steps: int, seeds: Sequence[int], baseline_losses: Sequence[float] | None
) -> dict[str, Any]:
    drops = [draw_dropped_pipelines(rate, steps, seed) for seed in seeds]
    losses = [train_with_drops(steps, seed, dropped) for seed, dropped in zip(seeds, drops, strict=True)]
    above = [loss - base for loss, base in zip(losses, baseline_losses or losses, strict=True)]
    return {
        "rate": rate,
        "dropped": mean(len(lost) / PIPELINES for dropped in drops for lost in dropped.values()),
        "loss": mean(losses),
        "above": mean(above),
        "above_spread": stdev(above),
        "losses": losses,
        "bamboo": BAMBOO_LOSSES[rate],
    }


def render_table(result: dict[str, Any]) -> Table:
    """The figures as a table."""
    title = f"{result['model']}, {result['steps']} steps, {result['seeds']} seeds"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("drop rate", "dropped", "loss", "above none", "spread of that", "Bamboo's GPT-2 (off a chart)"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        shares = (f"{row['rate']:.1%}", f"{row['dropped']:.1%}")
        figures = (f"{row['loss']:.3f}", f"{row['above']:+.3f}", f"{row['above_spread']:.3f}")
        table.add_row(*shares, *figures, row["bamboo"])
    return table
