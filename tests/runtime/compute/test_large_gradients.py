"""Gradients of large embeddings and output layers have torch's bits, and are never whole in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import culm
from culm.runtime.compute import large_gradients
from culm.runtime.compute.large_gradients import LargeGradients
from culm.testing import Faults, reference, simulate

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS, WIDTH = 300, 16
PADDING = 3


class Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH, padding_idx=PADDING)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.embed(ids)
        return found


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        logits /= 2.0  # in place, as some models cap their logits
        return logits


class Both(nn.Module):
    """One weight for both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.linear(torch.tanh(self.embed(ids)), self.embed.weight)


def ids_with_repeats() -> Tensor:
    ids = torch.randint(0, TOKENS // 9, (4, 50), generator=torch.Generator().manual_seed(0))
    ids[0, :5], ids[1, :2] = PADDING, TOKENS - 1
    return ids


def sums(layers: list[nn.Module], *, deferred: bool) -> list[Tensor]:
    """The gradient sums of two micro-batches."""
    parameters = [p for layer in layers for p in layer.parameters()]
    held = [torch.zeros_like(p) for p in parameters]
    for parameter, total in zip(parameters, held, strict=True):
        parameter.grad = total
    for ids in (ids_with_repeats(), ids_with_repeats().flip(0)):
        with LargeGradients(parameters if deferred else ()):
            values: Any = ids
            for layer in layers:
                values = layer(values)
            loss = functional.cross_entropy(values.flatten(0, 1), ids.flatten())
        loss.backward()
    assert all(p.grad is total for p, total in zip(parameters, held, strict=True))
    return held


@pytest.mark.parametrize("kinds", [(Ids, Logits), (Both,)])
def test_sums_have_the_bits_of_torch(kinds: tuple[type[nn.Module], ...]) -> None:
    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        return [kind() for kind in kinds]

    for one, other in zip(sums(made(), deferred=False), sums(made(), deferred=True), strict=True):
        assert torch.equal(one, other)


def test_a_hook_of_the_user_gets_a_gradient_like_any_other() -> None:
    layers: list[nn.Module] = [Ids(), Logits()]
    seen: list[Tensor] = []
    for layer in layers:
        next(layer.parameters()).register_hook(lambda gradient: seen.append(gradient * 2))
    expected = sums(layers, deferred=False)
    plain, seen[:] = list(seen), []
    assert all(map(torch.equal, sums(layers, deferred=True), expected))
    assert all(map(torch.equal, seen, plain))


class _LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, large_gradients._DeferredGradient) for each in types):
            return NotImplemented  # it does the rest itself, which is seen here, too
        made = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, leaf.numel())
        return made


@pytest.mark.parametrize("deferred", [True, False])
def test_no_gradient_of_the_size_of_a_weight_is_made(deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_gradients, "_PART_BYTES", 1 << 12)
    tokens, width = 5000, 32
    embed, head = nn.Embedding(tokens, width), nn.Linear(width, tokens, bias=False)
    weights = [*embed.parameters(), *head.parameters()]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    with LargeGradients(weights if deferred else ()):
        loss = head(embed(torch.arange(4))).square().mean()
    with _LargestTensor() as largest:
        loss.backward()
    assert (largest.elements < tokens * width / 4) == deferred and largest.elements > tokens


def job(**fields: Any) -> culm.Job:
    rows = ids_with_repeats().view(-1, 10)
    described: dict[str, Any] = {
        "layers": [Ids, lambda: nn.Linear(WIDTH, WIDTH), nn.Tanh, Logits],
        "loss": lambda output, target: functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "data": [(row, row) for row in rows],
        "global_batch": 8,
        "micro_batch": 2,
        "steps": 3,
    }
    return culm.Job(**{**described, **fields})


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
@pytest.mark.parametrize(
    "fields", [{}, {"recompute": True}, {"tied": [("0.embed.weight", "3.head.weight")]}, {"precision": "bf16"}]
)
def test_runs_with_and_without_deferred_gradients_are_equal(
    fields: dict[str, Any], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> str:
        kill = Faults().kill(3, at="1B1", step=1)
        return simulate(job(**fields), pipelines=2, stages=2, schedule=schedule, faults=kill).state_sha256

    expected, alone = run(), reference(job(**fields)).state_sha256
    monkeypatch.setattr(large_gradients, "LARGE_BYTES", 0)
    assert run() == expected
    assert reference(job(**fields)).state_sha256 == alone


class _Differing:
    """Makes gradients in parts differ visibly from those of torch, as another BLAS might in their last bits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.added = 0
        monkeypatch.setattr(large_gradients, "LARGE_BYTES", 0)
        monkeypatch.setattr(large_gradients, "_Parts", self._parts)

    def _parts(self, add_to: Any, whole: Any) -> Any:
        def add(total: Tensor) -> None:
            self.added += 1
            add_to(total)
            total.add_(1e-3)

        return _PARTS(add, whole)


_PARTS = large_gradients._Parts


@pytest.mark.parametrize(
    "fields", [{}, {"recompute": True}, {"tied": [("0.embed.weight", "3.head.weight")]}, {"precision": "bf16"}]
)
def test_a_run_equals_the_reference_also_where_parts_have_other_bits_than_torch(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference, every schedule, every holder and every recovery add the same parts, or none."""
    plain = reference(job(**fields)).state_sha256
    differing = _Differing(monkeypatch)
    wanted = reference(job(**fields)).state_sha256
    assert wanted != plain and differing.added
    for schedule in ("gpipe", "1f1b", "interleaved", "zb"):
        request: dict[str, Any] = {"pipelines": 1, "stages": 2, "schedule": schedule, "strategy": "shadow"}
        for node in (0, 1):
            faults = Faults().kill(node, at=f"{node}F2", step=1)
            found = simulate(job(**fields), **request, faults=faults)
            assert found.state_sha256 == wanted, (schedule, node)
            assert found.faults_not_reached(faults) == []


@pytest.mark.parametrize("fields", [{"exact": True}, {"compile": {"backend": "aot_eager"}}])
def test_exact_and_compiled_jobs_add_no_parts(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = reference(job(**fields)).state_sha256
    differing = _Differing(monkeypatch)
    assert reference(job(**fields)).state_sha256 == wanted
    shapes = ((1, 2), (2, 2), (4, 1)) if "exact" in fields else ((1, 2),)
    for pipelines, stages in shapes:
        faults = Faults().kill(pipelines * stages - 1, at=f"{stages - 1}B3", step=1)
        found = simulate(job(**fields), pipelines=pipelines, stages=stages, faults=faults)
        assert found.state_sha256 == wanted and found.summary["preemptions"] == 1
    assert differing.added == 0
