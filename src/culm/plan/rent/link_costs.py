"""Network costs of a step: links within a node are faster than links between nodes, and workers share the latter.

Workers take adjacent slots: worker d P + s of the fleet runs stage s of pipeline d. A node has adjacent workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from culm.plan.model.accelerators import find_accelerator, within_node_bandwidth, worker_bandwidth
from culm.schedule import Costs

if TYPE_CHECKING:
    from culm.plan.model.model_profile import LayerCost


@dataclass(frozen=True, kw_only=True)
class NodeLinks:
    """Bandwidths of the workers of a node, in bytes per second and direction."""

    between_nodes: float
    """From one worker to another node while all workers of its node send: its share of the node's network."""
    within_node: float = 0.0
    """From one worker to another one of its node (NVLink or PCIe); 0: as between nodes."""
    workers: int = 1
    """Workers of a node."""

    @property
    def _within(self) -> float:
        return self.within_node or self.between_nodes

    def crosses_nodes(self, boundary: int, *, pipelines: int, stages: int) -> bool:
        """Whether the boundary after a segment is one between nodes in some pipeline. With several segments per worker
        the last stage sends to the first."""
        first, second = boundary % stages, (boundary + 1) % stages
        starts = [pipeline * stages for pipeline in range(pipelines)]
        return any((start + first) // self.workers != (start + second) // self.workers for start in starts)

    def send_bandwidth(self, boundary: int, *, pipelines: int, stages: int) -> float:
        """Bandwidth over the boundary after a segment: that of the slowest pipeline."""
        crosses = self.crosses_nodes(boundary, pipelines=pipelines, stages=stages)
        return self.between_nodes if crosses else self._within

    def reduce_bandwidth(self, *, pipelines: int, stages: int) -> float:
        """Bandwidth of a link in the ring that sums the gradients of one stage.

        A ring enters and leaves each node once. If a node has several holders of each stage, fewer rings share its
        network: as many as it has stages.
        """
        if pipelines * stages <= self.workers:
            return self._within
        rings = min(stages, self.workers)
        return min(self._within, self.between_nodes * self.workers / rings)


def links_of_instance(instance: str, accelerator: str, workers: int) -> NodeLinks:
    """The links of an instance that runs so many workers. Raises PlanError for an unknown accelerator."""
    return NodeLinks(
        between_nodes=worker_bandwidth(instance, workers),
        within_node=within_node_bandwidth(find_accelerator(accelerator)),
        workers=workers,
    )


MAX_ACTIVATION_SHARE = 0.9
"""A ring keeps at least the rest of the network, however much the stages send."""


def activation_share(segments: Sequence[tuple[LayerCost, ...]], pipelines: int, links: NodeLinks, stages: int) -> float:
    """Share of the network between nodes that activations and their gradients take while all stages compute.

    A micro-batch crosses each boundary once in either direction in the time of the slowest stage. The busiest worker
    counts: a ring is as fast as its slowest link.
    """
    crossing = [
        segments[b][-1].output_bytes * links.crosses_nodes(b, pipelines=pipelines, stages=stages)
        for b in range(len(segments) - 1)
    ]
    seconds = [sum(layer.time_s for layer in segment) for segment in segments]
    slowest_s = max(sum(seconds[stage::stages]) for stage in range(stages))
    by_segment = [a + b for a, b in zip([0, *crossing], [*crossing, 0], strict=True)]
    sent = max(sum(by_segment[stage::stages]) for stage in range(stages))
    return min(MAX_ACTIVATION_SHARE, sent / slowest_s / links.between_nodes) if slowest_s else 0.0


def stage_costs(
    segments: Sequence[tuple[LayerCost, ...]], pipelines: int, links: NodeLinks, stages: int | None = None
) -> Costs:
    """Costs of segments, which are stages unless there are fewer `stages`. R is a ring over the pipelines: every worker
    sends 2 (D - 1) / D of the gradient. Rings between nodes share the network with the activations of a running
    step."""
    P = stages or len(segments)
    ring = 2 * (pipelines - 1) / pipelines / links.reduce_bandwidth(pipelines=pipelines, stages=P)
    if pipelines * P > links.workers:
        ring /= 1 - activation_share(segments, pipelines, links, P)
    return Costs(
        forward=tuple(sum(c.forward_s for c in segment) for segment in segments),
        input=tuple(sum(c.input_s for c in segment) for segment in segments),
        weight=tuple(sum(c.weight_s for c in segment) for segment in segments),
        reduce=tuple(ring * sum(c.parameter_bytes for c in segment) for segment in segments),
        step=tuple(sum(c.step_s for c in segment) for segment in segments),
        send=tuple(
            segment[-1].output_bytes / links.send_bandwidth(boundary, pipelines=pipelines, stages=P)
            for boundary, segment in enumerate(segments[:-1])
        ),
        split=tuple(sum(c.halving_s or 0.0 for c in segment) for segment in segments),
    )


def without_first_input_gradient(costs: Costs) -> Costs:
    """The costs with those of the first segment as a run has them: nobody needs the gradient of its input, so that its
    I does nothing and its W runs the whole backward. `costs` are by segment, as from `stage_costs`."""
    inputs, weight, split = costs.input, costs.weight, costs.split
    assert isinstance(inputs, tuple) and isinstance(weight, tuple) and isinstance(split, tuple), "costs by segment"
    return replace(
        costs,
        input=(0.0, *inputs[1:]),
        weight=(inputs[0] + weight[0], *weight[1:]),
        split=(0.0, *split[1:]),
    )
