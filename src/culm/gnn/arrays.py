"""Arrays as users have them (NumPy, torch, SciPy, nested lists) to those of a graph, or one sentence why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from culm.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

_MANY_CLASSES = 1 << 16
"""A label from here on, and above the number of vertices, is no class but a number of something."""


def array(name: str, given: Any) -> Array | None:
    """A dense array out of whatever holds numbers; None out of None. Raises UsageError where it is none."""
    if given is None:
        return None
    if hasattr(given, "detach") and hasattr(given, "layout"):
        given = _from_torch(given)
    elif hasattr(given, "toarray"):
        given = given.toarray()
    try:
        return np.asarray(given)
    except (ValueError, TypeError):
        raise UsageError(f"{name} is no array, its rows differ in length: give as many numbers in every row") from None


def _from_torch(tensor: Any) -> Array:
    tensor = tensor.detach().cpu()
    if "strided" not in str(tensor.layout):
        tensor = tensor.to_dense()
    if str(tensor.dtype) == "torch.bfloat16":  # NumPy has no such type
        tensor = tensor.float()
    found: Array = tensor.numpy()
    return found


def whole(name: str, given: Array) -> Array:
    """The same as int64. Raises UsageError for what is no whole number."""
    if given.dtype.kind in "iub":
        return given.astype(np.int64, copy=False)
    if given.dtype.kind != "f":
        raise UsageError(f"{name} holds {given.dtype}: give whole numbers")
    odd = given[~(np.isfinite(given) & (given == np.floor(given)))]
    if odd.size:
        raise UsageError(f"{name} holds {odd.flat[0]}: give whole numbers")
    return given.astype(np.int64)


def features_of(given: Array) -> Array:
    """Rows of 32-bit floats. What is too large for one becomes infinite, which a graph refuses by its vertex."""
    if given.dtype.kind not in "fiub":
        raise UsageError(f"features holds {given.dtype}: give numbers")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(given, np.float32)


def labels_of(given: Array) -> Array:
    """A class for each vertex; a column of them is taken, too. Raises UsageError for anything else."""
    if given.ndim == 2 and given.shape[1] == 1:
        given = given[:, 0]
    if given.ndim != 1:
        raise UsageError(f"labels has the shape {given.shape}: give one class for every vertex, -1 where it is unknown")
    labels = whole("labels", given)
    if labels.max(initial=0) >= max(len(labels), _MANY_CLASSES):
        raise UsageError(f"labels goes up to {labels.max()} for {len(labels)} vertices: number the classes from 0")
    return labels


def mask_of(name: str, given: Array, vertices: int) -> Array:
    """A mask out of a mask or of vertex numbers. Raises UsageError for what names no vertices of the graph."""
    if given.ndim != 1:
        raise UsageError(f"the {name} set has the shape {given.shape}: give one split, as in train_mask[:, 0]")
    if _bytes_of_a_mask(given, vertices):
        given = given.astype(bool)
    if given.dtype == bool:
        if len(given) != vertices:
            raise UsageError(f"the {name} mask has {len(given)} rows for {vertices} vertices: give one row for each")
        return given
    if given.size and given.dtype.kind not in "iu":
        raise UsageError(f"the {name} set holds {given.dtype}: give a mask, or vertex numbers")
    strange = given[(given < 0) | (given >= vertices)]
    if strange.size:
        raise UsageError(f"the {name} set names vertex {strange[0]}, and the graph has {vertices}: number them from 0")
    mask = np.zeros(vertices, bool)
    mask[given.astype(np.int64)] = True
    return mask


def _bytes_of_a_mask(given: Array, vertices: int) -> bool:
    """Whether whole numbers are a mask, as files have it: a one or a zero for every vertex names none of them."""
    return given.dtype.kind in "iu" and len(given) == vertices > 2 and bool(((given == 0) | (given == 1)).all())
