"""Small jobs, each with one thing that could go wrong. Everything is at module level, so that it pickles by name."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from culm.job import Job
from culm.models.gpt import gpt, gpt_loss, gpt_tied

from . import quiet
from .layers import (
    Activated,
    Behind,
    Chance,
    Dense,
    Forces,
    Frozen,
    HalfFrozen,
    Hooked,
    Ignoring,
    Normed,
    NormedTwice,
    Probe,
    Rectified,
    Residual,
    Shared,
    Sometimes,
    Stochastic,
    Tracked,
    Turned,
    Twice,
)
from .samples import (
    WIDTH,
    Clearing,
    Named,
    Noisy,
    Points,
    Ragged,
    Rebinding,
    Short,
    Tokens,
    adamw,
    at_each_position,
    by_label,
    by_name,
    drawing,
    fused,
    halves,
    in_place,
    jitter,
    mean,
    of_two,
    over_tokens,
    pad,
    sgd,
    warm,
)
from .sequences import (
    Across,
    Affine,
    Attending,
    EachPosition,
    Filtered,
    Flat,
    Forked,
    Mixed,
    NormedAcross,
    Permuted,
    Pooled,
    PostNorm,
    Recurrent,
    Repeated,
    Shifted,
    Signal,
    Silent,
    Sliced,
    Speak,
    Spectrum,
    Transposed,
    Words,
)
from .tuples import Added, Ahead, Along, Branch, Doubled, Merge, Stray, Tripled, Weighed


def dense(count: int = 5, *, dropout: float = 0.0, classes: int = 3) -> list[Callable[[], nn.Module]]:
    """Layers of equal width, and one to the classes."""
    return [*[partial(Dense, dropout=dropout)] * (count - 1), partial(Dense, WIDTH, classes)]


plain = Job(
    layers=dense(),
    loss=mean,
    optimizer=adamw,
    data=Points(),
    global_batch=10,
    micro_batch=2,
    steps=2,
    seed=5,
    device="cpu",
)
"""Five layers, M = 5: no number of pipelines or stages divides it."""


def but(base: Job = plain, **changes: Any) -> Job:
    """A job that differs in some fields."""
    return dataclasses.replace(base, **changes)


def around(*middle: Callable[[], nn.Module], **changes: Any) -> Job:
    """Layers between two plain ones."""
    return but(layers=[Dense, *middle, partial(Dense, WIDTH, 3)], **changes)


words = but(
    layers=[Words, Dense, partial(Dense, dropout=0.2), Speak],
    loss=over_tokens,
    data=Ragged(),
    collate=pad,
    optimizer=sgd,
)
sequences = but(data=Points(4, WIDTH))
gpt_layers: Sequence[Callable[[], nn.Module]] = gpt("nano", width=8, heads=2, blocks=2, context=5, vocab=7, dropout=0.1)
tiny_gpt = but(layers=gpt_layers, loss=gpt_loss, data=Tokens(), clip_norm=0.5, lr_schedule=warm)

everything = but(
    words,
    layers=[Words, partial(Dense, dropout=0.2), NormedAcross, Residual, partial(Dense, dropout=0.2), Speak],
    tied=[("0.table.weight", "5.head.weight")],
    clip_norm=0.2,
    lr_schedule=warm,
)
"""Tied, clipped, scheduled, weighted, with dropout, batch norm and sequences of all lengths."""

forked = but(
    sequences,
    layers=[Dense, Shifted, Forked, Shifted, Forked, EachPosition],
    loss=at_each_position,
    global_batch=16,
    steps=3,
    exact=True,
)

JOBS: Mapping[str, Job] = MappingProxyType(
    {
        "plain": plain,
        "clipped": but(clip_norm=0.05, optimizer=sgd),
        "dropout": but(layers=dense(dropout=0.3), clip_norm=0.1),
        "scheduled": but(lr_schedule=warm, optimizer=sgd),
        "gpt": tiny_gpt,
        "gpt tied": but(tiny_gpt, tied=gpt_tied(gpt_layers)),
        "gpt tied recompute": but(tiny_gpt, tied=gpt_tied(gpt_layers), recompute=True),
        "gpt bf16": but(tiny_gpt, precision="bf16"),
        "gpt bf16 recompute": but(tiny_gpt, precision="bf16", recompute=True),
        "tied three": but(
            words, layers=[Words, Mixed, Dense, Speak], tied=[("0.table.weight", "1.table", "3.head.weight")]
        ),
        "tied inside a layer": around(Twice, tied=[("1.first", "1.second")]),
        "tied and shared": around(Shared, Dense, tied=[("1.up.weight", "2.linear.weight")]),
        "tied and frozen": but(words, layers=[Silent, Dense, Speak], tied=[("0.table.weight", "2.head.weight")]),
        "tied, in other memory": but(
            words, layers=[Words, Dense, Speak], tied=[("0.table.weight", "2.head.weight")], optimizer=Rebinding
        ),
        "gradients taken away": but(optimizer=Clearing),
        "gradients replaced": around(Hooked, Hooked),
        "turned weight, fused": around(Turned, Turned, optimizer=fused),
        "gradients in forward": but(layers=[Forces, Forces, *dense(2)]),
        "bf16": around(Residual, Residual, precision="bf16"),
        "bf16 recompute": around(Residual, Residual, precision="bf16", recompute=True),
        "recompute": but(layers=dense(dropout=0.3), recompute=True),
        "batch norm": around(Normed, partial(Normed, None), global_batch=15, micro_batch=3),
        "batch norm recompute": around(Normed, Normed, global_batch=15, micro_batch=3, recompute=True),
        "batch norm twice": around(NormedTwice, partial(NormedTwice, None), global_batch=15, micro_batch=3),
        "stochastic depth": around(Stochastic, partial(Stochastic, None), global_batch=15, micro_batch=3),
        "batch norm of one's own": around(partial(Activated, WIDTH), global_batch=15, micro_batch=3),
        "instance norm": but(
            sequences,
            layers=[Dense, partial(nn.InstanceNorm1d, 4, track_running_stats=True), Pooled, partial(Dense, WIDTH, 3)],
        ),
        "own statistics": around(Tracked, Tracked),
        "weights as tensors": words,
        "weights as floats": but(loss=by_label, clip_norm=0.1),
        "named target": but(data=Named(), loss=by_name),
        "random data": but(data=Noisy(), collate=jitter),
        "random layers": around(Chance, Chance),
        "random layers recompute": around(Chance, Chance, recompute=True),
        "random layers, quietly": around(partial(quiet.Chance, WIDTH, WIDTH), partial(quiet.Steady, WIDTH, WIDTH)),
        "random loss, quietly": but(layers=[partial(quiet.Steady, WIDTH, WIDTH)] * 3, loss=quiet.loss),
        "random loss": but(loss=drawing, layers=dense(dropout=0.2)),
        "tuples": but(layers=[Branch, Along, Along, Ahead, Merge], collate=halves, data=Points(classes=WIDTH)),
        "tuples recompute": but(
            layers=[Branch, Along, Along, Ahead, Merge], collate=halves, data=Points(classes=WIDTH), recompute=True
        ),
        "tuple to the loss": around(Doubled, Added, Doubled, Added, Dense, loss=mean),
        "doubled": but(layers=[Dense, Doubled, Added, Doubled, Added, Dense, Doubled], loss=of_two),
        "tripled": around(Tripled, Weighed, Dense, Tripled, Weighed),
        "stray": but(layers=[Dense, Stray, Added, Stray, Added, partial(Dense, WIDTH, 3)]),
        "stray recompute": but(layers=[Dense, Stray, Added, Stray, Added, partial(Dense, WIDTH, 3)], recompute=True),
        "ignoring": around(Ignoring, Dense),
        "probe": around(Probe, Dense),
        "one weight twice": around(Twice, Shared),
        "frozen start": but(layers=[Frozen, Frozen, *dense(3)]),
        "frozen middle": but(layers=[Dense, Frozen, Frozen, *dense(2)]),
        "frozen end": around(HalfFrozen, Frozen, Frozen, loss=mean),
        "all but the head frozen": but(layers=[Frozen, Frozen, Frozen, partial(Dense, WIDTH, 3)]),
        "frozen end of all": but(layers=[Dense, Dense, Frozen, Frozen], data=Points(classes=WIDTH)),
        "sometimes": around(Sometimes, Sometimes),
        "in place": around(Rectified, partial(nn.ReLU, inplace=True), Rectified),
        "in place recompute": around(Rectified, partial(nn.Dropout, 0.3, inplace=True), Rectified, recompute=True),
        "in place first": but(layers=[Rectified, partial(nn.ReLU, inplace=True), *dense(2)], recompute=True),
        "in place, unnoted": but(layers=[Behind, Behind, *dense(2)], recompute=True),
        "in place loss": but(loss=in_place),
        "in place loss recompute": but(loss=in_place, recompute=True),
        "views": but(sequences, layers=[Dense, Transposed, partial(nn.Linear, 4, 5), partial(Flat, 30), Dense]),
        "attention": but(sequences, layers=[Attending, Recurrent, Attending, Pooled, Dense]),
        "attention bf16": but(sequences, layers=[Attending, Dense, Attending, Pooled, Dense], precision="bf16"),
        "pooled": but(sequences, layers=[Dense, partial(nn.Linear, WIDTH, WIDTH), Pooled, Residual, Dense]),
        "complex": around(Spectrum, Signal),
        "complex recompute": around(Spectrum, Signal, recompute=True),
        "sparse": but(words, layers=[partial(Words, sparse=True), Dense, Speak]),
        "bf16 after a norm": but(
            sequences, layers=[PostNorm, PostNorm, PostNorm, EachPosition], loss=at_each_position, precision="bf16"
        ),
        "turned": but(
            sequences,
            layers=[Dense, Shifted, Across, Shifted, Repeated, Shifted, Permuted, EachPosition],
            loss=at_each_position,
            steps=3,
        ),
        "turned at some lengths": but(
            words, layers=[Words, Shifted, Filtered, Shifted, Filtered, Speak], data=Short(), micro_batch=1, steps=3
        ),
        "everything": everything,
    }
)
"""By name: every run of each of them must equal the reference."""

ZOO: Sequence[Callable[[], nn.Module]] = (
    Affine, Across, Repeated, Sliced, Permuted, PostNorm, NormedAcross, Dense, partial(Dense, dropout=0.3), Twice,
    Shared, Residual, Recurrent, Attending, Chance, Rectified, partial(nn.ReLU, inplace=True), Probe, Frozen, Ignoring,
    partial(nn.LayerNorm, WIDTH), nn.Identity,
)  # fmt: skip


def stack(seed: int) -> Job:
    """Layers of the zoo in a random order, as a job with random settings."""
    draw = random.Random(seed)
    return but(
        layers=[Dense, *(draw.choice(ZOO) for _ in range(draw.randint(3, 6))), EachPosition],
        loss=at_each_position,
        data=Points(4, WIDTH),
        optimizer=draw.choice([adamw, sgd]),
        global_batch=6,
        steps=2,
        seed=seed,
        precision=draw.choice(["fp32", "fp32", "bf16"]),
        recompute=draw.random() < 0.25,
        exact=draw.random() < 0.5,
        clip_norm=draw.choice([None, 1.0]),
    )
