"""Steps in other shapes follow from the layers of a model and the links of a node, as in `culm plan`."""

from __future__ import annotations

from pathlib import Path

import pytest

from culm.errors import UsageError
from culm.plan.model.accelerators import find_accelerator
from culm.plan.model.reference_models import find_model
from culm.plan.rent.failure_free_step import failure_free_step_s
from culm.plan.rent.link_costs import NodeLinks
from culm.plan.rent.rental_options import InstanceOffer, RentalOption, RentalQuery, find_rental_options
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.planned_workload import planned_workload, workload_toml
from culm.sim.step_times import StepTimes
from culm.sim.workload import Workload, read_workload
from culm.strategies import registry

OFFER = InstanceOffer(
    instance="p4d.24xlarge", memory=36 << 30, bandwidth=6.25e9, node_link=3e11, usd_per_h=20.0, workers=8, zones=3
)


def _query(pipelines: int, stages: int, schedule: str = "1f1b") -> RentalQuery:
    profile = find_model("bert-large").profile(find_accelerator("A100"), 4, precision="bf16")
    return RentalQuery(
        profiles={4: profile}, global_batch=256, node_range=(4, 4), pipelines=pipelines, stages=stages,
        strategies=registry.by_preference(), schedule=schedule,
    )  # fmt: skip


def _planned(pipelines: int, stages: int, schedule: str = "1f1b") -> tuple[RentalOption, Workload]:
    query = _query(pipelines, stages, schedule)
    row = find_rental_options(query, OFFER).table[0]
    return row, planned_workload(row, "bert", query, OFFER)


@pytest.mark.parametrize(("pipelines", "stages"), [(16, 2), (8, 4), (4, 8), (2, 13)])
def test_a_simulated_step_in_another_shape_is_the_one_that_would_be_planned(pipelines: int, stages: int) -> None:
    """Workers of a node share its network: 32 x 1 has one ring per node, 8 x 4 has four."""
    _, flat = _planned(32, 1)
    other, _ = _planned(pipelines, stages)
    simulated_s = StepTimes(flat, ClusterCosts()).at_depth(pipelines, stages, as_published=True)
    assert simulated_s == pytest.approx(other.failure_free_step_s, rel=0.1)


def test_a_plan_file_has_the_layers_and_the_limits_of_planned(tmp_path: Path) -> None:
    row, workload = _planned(8, 4, "planned")
    file = tmp_path / "plan.toml"
    file.write_text(workload_toml(workload))
    read = read_workload(file)
    assert read.planned_activations == row.limits
    assert read.failure_free_step_s() == row.failure_free_step_s
    assert failure_free_step_s(row.case, "planned", row.limits) == row.failure_free_step_s
    assert (read.model, workload.model) != (None, None)
    for shape in ((8, 4), (16, 2), (5, 6)):
        assert read.model and workload.model
        assert read.model.costs(*shape) == workload.model.costs(*shape)


@pytest.mark.parametrize("change", [("between_nodes", "network"), ("layers = [[", "layers = [[1.0], [")])
def test_a_table_that_is_not_understood_is_refused(change: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(workload_toml(_planned(8, 4)[1]).replace(*change))
    with pytest.raises(UsageError, match=r"plan.toml, \[model\], could not be read .*: write it again with culm plan"):
        read_workload(file)


def test_links_of_a_plan_are_those_of_its_nodes() -> None:
    _, workload = _planned(8, 4)
    assert workload.model is not None
    assert workload.model.links == NodeLinks(between_nodes=6.25e9, within_node=3e11, workers=8)
