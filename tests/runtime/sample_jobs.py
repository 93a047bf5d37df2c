"""Small jobs, each with one potential problem. Everything is at module level, so that it pickles by name."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from tests.runtime import hidden_rng_layers
from tests.runtime.sample_data import (
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
from tests.runtime.sample_layers import (
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
from tests.runtime.sequence_layers import (
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
from tests.runtime.tuple_layers import Added, Ahead, Along, Branch, Doubled, Merge, Stray, Tripled, Weighed
from torch import nn

from culm.job import Job
from culm.models.gpt import gpt, gpt_loss, gpt_tied


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
"""Five layers, M = 5: divisible by no number of pipelines or stages."""


def job_with(base: Job = plain, **changes: Any) -> Job:
    """A job that differs in some fields."""
    return dataclasses.replace(base, **changes)


def job_around(*middle: Callable[[], nn.Module], **changes: Any) -> Job:
    """Layers between two plain ones."""
    return job_with(layers=[Dense, *middle, partial(Dense, WIDTH, 3)], **changes)


words = job_with(
    layers=[Words, Dense, partial(Dense, dropout=0.2), Speak],
    loss=over_tokens,
    data=Ragged(),
    collate=pad,
    optimizer=sgd,
)
sequences = job_with(data=Points(4, WIDTH))
gpt_layers: Sequence[Callable[[], nn.Module]] = gpt("nano", width=8, heads=2, blocks=2, context=5, vocab=7, dropout=0.1)
tiny_gpt = job_with(layers=gpt_layers, loss=gpt_loss, data=Tokens(), clip_norm=0.5, lr_schedule=warm)

everything = job_with(
    words,
    layers=[Words, partial(Dense, dropout=0.2), NormedAcross, Residual, partial(Dense, dropout=0.2), Speak],
    tied=[("0.table.weight", "5.head.weight")],
    clip_norm=0.2,
    lr_schedule=warm,
)
"""Tied, clipped, scheduled, weighted, with dropout, batch norm and sequences of all lengths."""

forked = job_with(
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
        "clipped": job_with(clip_norm=0.05, optimizer=sgd),
        "dropout": job_with(layers=dense(dropout=0.3), clip_norm=0.1),
        "scheduled": job_with(lr_schedule=warm, optimizer=sgd),
        "gpt": tiny_gpt,
        "gpt tied": job_with(tiny_gpt, tied=gpt_tied(gpt_layers)),
        "gpt tied recompute": job_with(tiny_gpt, tied=gpt_tied(gpt_layers), recompute=True),
        "gpt bf16": job_with(tiny_gpt, precision="bf16"),
        "gpt bf16 recompute": job_with(tiny_gpt, precision="bf16", recompute=True),
        "tied three": job_with(
            words, layers=[Words, Mixed, Dense, Speak], tied=[("0.table.weight", "1.table", "3.head.weight")]
        ),
        "tied inside a layer": job_around(Twice, tied=[("1.first", "1.second")]),
        "tied and shared": job_around(Shared, Dense, tied=[("1.up.weight", "2.linear.weight")]),
        "tied and frozen": job_with(words, layers=[Silent, Dense, Speak], tied=[("0.table.weight", "2.head.weight")]),
        "tied, in other memory": job_with(
            words, layers=[Words, Dense, Speak], tied=[("0.table.weight", "2.head.weight")], optimizer=Rebinding
        ),
        "gradients taken away": job_with(optimizer=Clearing),
        "gradients replaced": job_around(Hooked, Hooked),
        "turned weight, fused": job_around(Turned, Turned, optimizer=fused),
        "gradients in forward": job_with(layers=[Forces, Forces, *dense(2)]),
        "bf16": job_around(Residual, Residual, precision="bf16"),
        "bf16 recompute": job_around(Residual, Residual, precision="bf16", recompute=True),
        "recompute": job_with(layers=dense(dropout=0.3), recompute=True),
        "batch norm": job_around(Normed, partial(Normed, None), global_batch=15, micro_batch=3),
        "batch norm recompute": job_around(Normed, Normed, global_batch=15, micro_batch=3, recompute=True),
        "batch norm twice": job_around(NormedTwice, partial(NormedTwice, None), global_batch=15, micro_batch=3),
        "stochastic depth": job_around(Stochastic, partial(Stochastic, None), global_batch=15, micro_batch=3),
        "batch norm of one's own": job_around(partial(Activated, WIDTH), global_batch=15, micro_batch=3),
        "instance norm": job_with(
            sequences,
            layers=[Dense, partial(nn.InstanceNorm1d, 4, track_running_stats=True), Pooled, partial(Dense, WIDTH, 3)],
        ),
        "own statistics": job_around(Tracked, Tracked),
        "weights as tensors": words,
        "weights as floats": job_with(loss=by_label, clip_norm=0.1),
        "named target": job_with(data=Named(), loss=by_name),
        "random data": job_with(data=Noisy(), collate=jitter),
        "random layers": job_around(Chance, Chance),
        "random layers recompute": job_around(Chance, Chance, recompute=True),
        "random layers, quietly": job_around(
            partial(hidden_rng_layers.HiddenRandomLinear, WIDTH, WIDTH),
            partial(hidden_rng_layers.DeterministicLinear, WIDTH, WIDTH),
        ),
        "random loss, quietly": job_with(
            layers=[partial(hidden_rng_layers.DeterministicLinear, WIDTH, WIDTH)] * 3, loss=hidden_rng_layers.loss
        ),
        "random loss": job_with(loss=drawing, layers=dense(dropout=0.2)),
        "tuples": job_with(layers=[Branch, Along, Along, Ahead, Merge], collate=halves, data=Points(classes=WIDTH)),
        "tuples recompute": job_with(
            layers=[Branch, Along, Along, Ahead, Merge], collate=halves, data=Points(classes=WIDTH), recompute=True
        ),
        "tuple to the loss": job_around(Doubled, Added, Doubled, Added, Dense, loss=mean),
        "doubled": job_with(layers=[Dense, Doubled, Added, Doubled, Added, Dense, Doubled], loss=of_two),
        "tripled": job_around(Tripled, Weighed, Dense, Tripled, Weighed),
        "stray": job_with(layers=[Dense, Stray, Added, Stray, Added, partial(Dense, WIDTH, 3)]),
        "stray recompute": job_with(
            layers=[Dense, Stray, Added, Stray, Added, partial(Dense, WIDTH, 3)], recompute=True
        ),
        "ignoring": job_around(Ignoring, Dense),
        "probe": job_around(Probe, Dense),
        "one weight twice": job_around(Twice, Shared),
        "frozen start": job_with(layers=[Frozen, Frozen, *dense(3)]),
        "frozen middle": job_with(layers=[Dense, Frozen, Frozen, *dense(2)]),
        "frozen end": job_around(HalfFrozen, Frozen, Frozen, loss=mean),
        "all but the head frozen": job_with(layers=[Frozen, Frozen, Frozen, partial(Dense, WIDTH, 3)]),
        "frozen end of all": job_with(layers=[Dense, Dense, Frozen, Frozen], data=Points(classes=WIDTH)),
        "sometimes": job_around(Sometimes, Sometimes),
        "in place": job_around(Rectified, partial(nn.ReLU, inplace=True), Rectified),
        "in place recompute": job_around(Rectified, partial(nn.Dropout, 0.3, inplace=True), Rectified, recompute=True),
        "in place first": job_with(layers=[Rectified, partial(nn.ReLU, inplace=True), *dense(2)], recompute=True),
        "in place, unnoted": job_with(layers=[Behind, Behind, *dense(2)], recompute=True),
        "in place loss": job_with(loss=in_place),
        "in place loss recompute": job_with(loss=in_place, recompute=True),
        "views": job_with(sequences, layers=[Dense, Transposed, partial(nn.Linear, 4, 5), partial(Flat, 30), Dense]),
        "attention": job_with(sequences, layers=[Attending, Recurrent, Attending, Pooled, Dense]),
        "attention bf16": job_with(sequences, layers=[Attending, Dense, Attending, Pooled, Dense], precision="bf16"),
        "pooled": job_with(sequences, layers=[Dense, partial(nn.Linear, WIDTH, WIDTH), Pooled, Residual, Dense]),
        "complex": job_around(Spectrum, Signal),
        "complex recompute": job_around(Spectrum, Signal, recompute=True),
        "sparse": job_with(words, layers=[partial(Words, sparse=True), Dense, Speak]),
        "bf16 after a norm": job_with(
            sequences, layers=[PostNorm, PostNorm, PostNorm, EachPosition], loss=at_each_position, precision="bf16"
        ),
        "turned": job_with(
            sequences,
            layers=[Dense, Shifted, Across, Shifted, Repeated, Shifted, Permuted, EachPosition],
            loss=at_each_position,
            steps=3,
        ),
        "turned at some lengths": job_with(
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
    """Sample layers in a random order, as a job with random settings."""
    draw = random.Random(seed)
    return job_with(
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
