"""`culm bench dropping`: what it does to training to drop samples. The small GPT's loss against the drop rate.

In every step each of four pipelines loses its samples with the drop rate as probability, and the gradient is divided by
what was counted: what the baseline `drop` does, run by the reference loop, which its runs equal bit for bit. The number
of steps is fixed, as in Bamboo's figure; one pipeline always stays, since a step without samples would be none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import Any

import torch
from rich import box
from rich.table import Table

from culm import Job
from culm.models import Characters, gpt, gpt_loss
from culm.testing import reference

PIPELINES = 4
RATES = (0.0, 0.01, 0.05, 0.10, 0.175, 0.25, 0.50)
BAMBOO = {0.0: "6.6", 0.01: "6.8", 0.05: "7.2", 0.10: "7.15", 0.175: "7.25", 0.25: "8.1", 0.50: "> 8.4"}
"""GPT-2 after about 180 steps, read off Bamboo's chart (NSDI'23): another model, so only the direction compares."""
_EVALUATED = 64
"""Pieces of the text, evenly spread, that the loss at the end is taken over."""


def job(steps: int, seed: int) -> Job:
    """nano GPT on Shakespeare, one micro-batch of four samples for each pipeline, an evaluation at the end."""
    data = Characters(length=32)
    return Job(
        layers=gpt("nano", vocab=data.vocab),
        loss=gpt_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
        data=data,
        global_batch=4 * PIPELINES,
        micro_batch=4,
        steps=steps,
        seed=seed,
        clip_norm=1.0,
        evaluate=[data[i * (len(data) // _EVALUATED)] for i in range(_EVALUATED)],
        evaluate_every=steps,
    )


def drawn(rate: float, steps: int, seed: int) -> dict[int, tuple[int, ...]]:
    """By step: the pipelines whose samples are dropped, at most all but one."""
    dice = random.Random(f"{rate} {seed}")
    found = {}
    for step in range(steps):
        lost = [pipeline for pipeline in range(PIPELINES) if dice.random() < rate]
        dice.shuffle(lost)
        found[step] = tuple(lost[: PIPELINES - 1])
    return found


def run(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The loss for each rate, over some seeds; the seed decides weights, samples and what is dropped."""
    steps, seeds = (10, (0, 1)) if quick else (80, (0, 1, 2))
    rows = []
    for rate in RATES[:: 3 if quick else 1]:
        rows.append(_row(rate, steps, seeds))
        progress(f"dropping {rate:.1%} of the samples: loss {rows[-1]['loss']:.3f}")
    for row in rows:
        row["above"] = row["loss"] - rows[0]["loss"]
    return {"rows": rows, "steps": steps, "seeds": len(seeds), "pipelines": PIPELINES, "model": "gpt nano"}


def _row(rate: float, steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    losses, shares = [], []
    for seed in seeds:
        dropped = drawn(rate, steps, seed)
        trained = reference(job(steps, seed), dropped=dropped)
        losses.append(trained.evaluations[steps - 1])
        shares.append(sum(map(len, dropped.values())) / (steps * PIPELINES))
    return {
        "rate": rate,
        "dropped": mean(shares),
        "loss": mean(losses),
        "spread": stdev(losses),
        "losses": losses,
        "bamboo": BAMBOO[rate],
    }


def table(result: dict[str, Any]) -> Table:
    """The figures for people."""
    title = f"{result['model']}, {result['steps']} steps, {result['seeds']} seeds"
    made = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("drop rate", "dropped", "loss", "spread", "above none", "Bamboo's GPT-2 (read off a chart)"):
        made.add_column(heading, justify="right")
    for row in result["rows"]:
        figures = (f"{row['rate']:.1%}", f"{row['dropped']:.1%}", f"{row['loss']:.3f}", f"{row['spread']:.3f}")
        made.add_row(*figures, f"{row['above']:+.3f}", row["bamboo"])
    return made
