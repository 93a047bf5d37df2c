"""Compare the holders of each layer at a checkpoint, and find the node whose memory or arithmetic is faulty. Pure.

Holders of a layer make the same steps with the same reduced gradients, so that their weights and optimizer state are
equal, bit for bit, on machines with one fingerprint. A difference proves that at least one of them is faulty. The
steps since the last verified checkpoint are then wrong on every node: the gradients of the faulty one are in all sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

Checksums: TypeAlias = Mapping[int, Mapping[int, str]]
"""By worker and layer."""


class Comparison(NamedTuple):
    """The result of comparing all holders."""

    differing_layers: tuple[int, ...] = ()
    uncompared_layers: tuple[int, ...] = ()
    """Layers with a single holder."""
    faulty_workers: tuple[int, ...] = ()
    """Holders that a majority of at least two others contradicts."""

    @property
    def is_verified(self) -> bool:
        """Whether every layer has two holders at least, and all of them agree."""
        return not self.differing_layers and not self.uncompared_layers


def compare_holders(checksums: Checksums, layers: int) -> Comparison:
    """Compare the checksums of all holders of a model with this many layers."""
    differing, uncompared, faulty = [], [], set()
    for layer in range(layers):
        held = {node: own[layer] for node, own in checksums.items() if layer in own}
        if len(held) < 2:
            uncompared.append(layer)
        elif len(set(held.values())) > 1:
            differing.append(layer)
            faulty |= _outvoted(held)
    return Comparison(tuple(differing), tuple(uncompared), tuple(sorted(faulty)))


def _outvoted(held: Mapping[int, str]) -> set[int]:
    """The holders that a strict majority of at least two contradicts; none if there is no such majority."""
    value, votes = Counter(held.values()).most_common(1)[0]
    return {node for node in held if held[node] != value} if votes >= 2 and 2 * votes > len(held) else set()


def contradicted_by_replay(before: Checksums, after: Checksums, layers: Sequence[int]) -> tuple[int, ...]:
    """The holders of differing layers that a replay of the same steps, on which all holders agree, contradicts.

    Empty if it contradicts all of them: wrong weights had changed the gradients of every node before the comparison, so
    that no holder had the right result.
    """
    truth = {layer: value for own in after.values() for layer, value in own.items()}
    held = {node: {layer: own[layer] for layer in layers if layer in own} for node, own in before.items()}
    holders = [node for node, own in held.items() if own]
    wrong = [node for node in holders if any(truth.get(layer) != value for layer, value in held[node].items())]
    return tuple(sorted(wrong)) if len(wrong) < len(holders) else ()
