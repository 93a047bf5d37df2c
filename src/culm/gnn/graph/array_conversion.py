"""Conversion of users' arrays (NumPy, torch, SciPy, nested lists) to those of a graph. Every function raises
UsageError with one sentence for values that cannot be converted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from culm.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

_CLASS_LIMIT = 1 << 16
"""A label that reaches both this limit and the number of vertices is taken for an error: it cannot be a class."""


def to_dense_array(name: str, values: Any) -> Array | None:
    """Return a dense array; None for None. Raises UsageError for rows of different lengths."""
    if values is None:
        return None
    if hasattr(values, "detach") and hasattr(values, "layout"):
        values = _from_torch(values)
    elif hasattr(values, "toarray"):
        values = values.toarray()
    try:
        return np.asarray(values)
    except (ValueError, TypeError):
        raise UsageError(f"{name} has rows of different lengths: give the same number of values in every row") from None


def _from_torch(tensor: Any) -> Array:
    tensor = tensor.detach().cpu()
    if "strided" not in str(tensor.layout):
        tensor = tensor.to_dense()
    if str(tensor.dtype) == "torch.bfloat16":  # NumPy has no bfloat16
        tensor = tensor.float()
    array: Array = tensor.numpy()
    return array


def to_integers(name: str, values: Array) -> Array:
    """Return the values as int64. Raises UsageError for values that are not whole numbers."""
    if values.dtype.kind in "iub":
        return values.astype(np.int64, copy=False)
    if values.dtype.kind != "f":
        raise UsageError(f"{name} holds {values.dtype}: give whole numbers")
    invalid = values[~(np.isfinite(values) & (values == np.floor(values)))]
    if invalid.size:
        raise UsageError(f"{name} holds {invalid.flat[0]}: give whole numbers")
    return values.astype(np.int64)


def to_feature_rows(values: Array) -> Array:
    """Return rows of 32-bit floats. A value too large for one becomes infinite; Graph then rejects it and names its
    vertex."""
    if values.dtype.kind not in "fiub":
        raise UsageError(f"features holds {values.dtype}: give numbers")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, np.float32)


def to_labels(values: Array) -> Array:
    """Return one class per vertex, from a row or a single column. Raises UsageError for anything else."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise UsageError(
            f"labels has the shape {values.shape}: give one class for every vertex, -1 where it is unknown"
        )
    labels = to_integers("labels", values)
    if labels.max(initial=0) >= max(len(labels), _CLASS_LIMIT):
        raise UsageError(f"labels goes up to {labels.max()} for {len(labels)} vertices: number the classes from 0")
    return labels


def to_mask(name: str, values: Array, vertices: int) -> Array:
    """Return a mask from a mask or from vertex numbers. Raises UsageError for numbers of vertices that the graph
    does not have."""
    if values.ndim != 1:
        raise UsageError(f"the {name} set has the shape {values.shape}: give one split, as in train_mask[:, 0]")
    if _is_byte_mask(values, vertices):
        values = values.astype(bool)
    if values.dtype == bool:
        if len(values) != vertices:
            raise UsageError(f"the {name} mask has {len(values)} rows for {vertices} vertices: give one row for each")
        return values
    if values.size and values.dtype.kind not in "iu":
        raise UsageError(f"the {name} set holds {values.dtype}: give a mask, or vertex numbers")
    invalid = values[(values < 0) | (values >= vertices)]
    if invalid.size:
        raise UsageError(f"the {name} set names vertex {invalid[0]}, and the graph has {vertices}: number them from 0")
    mask = np.zeros(vertices, bool)
    mask[values.astype(np.int64)] = True
    return mask


def _is_byte_mask(values: Array, vertices: int) -> bool:
    """Whether whole numbers are a mask, as some files store it: a 0 or 1 for every vertex, so not vertex numbers."""
    return values.dtype.kind in "iu" and len(values) == vertices > 2 and bool(((values == 0) | (values == 1)).all())
