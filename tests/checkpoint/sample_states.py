"""Small states to save, and helpers to compare them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from culm.checkpoint import CheckpointCatalog, Manifest, Storage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


def layer_tensors(number: int, step: int) -> dict[str, Tensor]:
    """A layer whose values encode the layer and the step, with its optimizer state."""
    value = float(100 * step + number)
    return {
        f"{number}.weight": torch.full((3, 2), value),
        f"{number}.bias": torch.arange(2, dtype=torch.bfloat16) + number,
        f"optimizer.{number}.weight.exp_avg": torch.full((3, 2), -value, dtype=torch.float64),
        f"optimizer.{number}.weight.step": torch.tensor(value),
    }


def state_tensors(step: int, layers: int = 4) -> dict[str, Tensor]:
    """All layers of one step."""
    return {name: tensor for number in range(layers) for name, tensor in layer_tensors(number, step).items()}


def save_checkpoint(
    catalog: CheckpointCatalog, step: int, *, workers: int = 2, layers: int = 4, facts: Mapping[str, Any] | None = None
) -> Manifest:
    """Write and commit one step, with its layers distributed over that many workers."""
    receipts = [
        catalog.write_shard(
            step,
            catalog.shard_name(step, worker),
            {
                name: tensor
                for number in range(worker, layers, workers)
                for name, tensor in layer_tensors(number, step).items()
            },
        )
        for worker in range(workers)
    ]
    return catalog.commit(step, receipts, {"optimizer.0.weight.lr": 0.5}, facts or {"seed": 1}, created=1.5)


def same_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Assert equal names, types, shapes and bits."""
    return found.keys() == wanted.keys() and all(same_bits(found[name], wanted[name]) for name in wanted)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and tensor_bytes(one) == tensor_bytes(other)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bytes of the values: equal for two NaN only if their payloads are."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def check_newest_checkpoint(root: Path | str) -> int:
    """The step of the newest checkpoint, after comparing every tensor in it with what that step saved.

    All committed checkpoints must be intact, including older ones.
    """
    catalog = CheckpointCatalog(Storage(root))
    for step in catalog.steps():
        catalog.check(step)
    found = catalog.newest()
    assert found.rejected == ()
    with catalog.open(found.manifest) as reader:
        assert same_tensors(reader.load(), state_tensors(found.manifest.step))
    return found.manifest.step


def files(folder: Path) -> set[str]:
    """All files below the folder, including temporary ones."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
