"""The layers of a simulated model and the links between its workers: they decide how long a step takes in other shapes
than the planned one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from culm.errors import UsageError
from culm.plan.model.layer_partition import Cuts, find_cuts, segment_layer_ranges
from culm.plan.model.model_profile import LayerCost
from culm.plan.rent.link_costs import NodeLinks, stage_costs, without_first_input_gradient
from culm.schedule import Costs

_LAYER_FIELDS = ("forward_s", "input_s", "weight_s", "step_s", "parameter_bytes", "output_bytes")
"""Figures of a layer in a plan file, in this order."""


@dataclass(frozen=True)
class ModelLayers:
    """Layers in order, and links."""

    layers: tuple[LayerCost, ...]
    links: NodeLinks

    def costs(self, pipelines: int, stages: int) -> Costs:
        """The costs of the stages if the model is cut so that the slowest of them is as fast as possible."""
        cuts = find_cuts(self.layers, stages, memory=None, in_flight=lambda *_: 0)
        assert cuts is not None, "without a limit of memory there are cuts for every depth"
        return self.costs_of_cuts(cuts, pipelines)

    def costs_of_cuts(self, cuts: Cuts, pipelines: int) -> Costs:
        """The costs of the segments between these cuts."""
        spans = segment_layer_ranges(cuts, len(self.layers))
        segments = [self.layers[span.start : span.stop] for span in spans]
        return without_first_input_gradient(stage_costs(segments, pipelines, self.links))

    def as_table(self) -> dict[str, Any]:
        """For a plan file."""
        return {
            "between_nodes": self.links.between_nodes,
            "within_node": self.links.within_node,
            "layers": [[getattr(layer, name) for name in _LAYER_FIELDS] for layer in self.layers],
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any], workers: int, where: str) -> ModelLayers:
        """The inverse of `as_table`. Raises UsageError for a table that this version does not write."""
        try:
            links = NodeLinks(
                between_nodes=float(table["between_nodes"]), within_node=float(table["within_node"]), workers=workers
            )
            return cls(tuple(_read_layer(number, row) for number, row in enumerate(table["layers"])), links)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{where}, [model], could not be read ({error}): write it again with culm plan") from error


def _read_layer(number: int, row: Sequence[float]) -> LayerCost:
    forward_s, input_s, weight_s, step_s, parameter_bytes, output_bytes = map(float, row)
    return LayerCost(
        name=str(number),
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
        step_s=step_s,
        parameter_bytes=int(parameter_bytes),
        output_bytes=int(output_bytes),
        state_bytes=0,
        activation_bytes=0,
    )
