"""Layers that do not fit together are refused before anything starts, by name and in one sentence."""

from __future__ import annotations

import resource
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from tests.runtime.sample_data import WIDTH, Points, mean
from tests.runtime.sample_jobs import JOBS, everything, job_around, job_with, plain
from tests.runtime.sample_layers import Dense, Frozen, Shared
from tests.runtime.sequence_layers import Words
from tests.runtime.tuple_layers import Doubled
from torch import Tensor, nn

from culm.errors import JobError
from culm.job import Job
from culm.runtime.compute import buffer_statistics
from culm.runtime.compute.model_check import check_model
from culm.runtime.compute.model_state import LayerReplica, build_layer
from culm.runtime.compute.user_code import call_layer


def vector(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="none")


def number(output: Tensor, target: Tensor) -> Any:
    return mean(output, target).item()


def uneven(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return mean(output, target), torch.ones_like(target)


def constant(output: Tensor, target: Tensor) -> Tensor:
    return torch.zeros(())


def raising(output: Tensor, target: Tensor) -> Tensor:
    raise KeyError("no such label")


class Counting(nn.Module):
    """Changes a buffer without recording statistics."""

    seen: Tensor

    def __init__(self, *, anew: bool = False) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.anew = anew

    def forward(self, x: Tensor) -> Tensor:
        if self.anew:
            self.seen = self.seen + 1
        else:
            self.seen += 1
        return x


class Silent(Counting):
    """Has apply_statistics, but never records."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def apply_statistics(self, *values: Tensor) -> None: ...


class Eager(Silent):
    """Records twice."""

    def forward(self, x: Tensor) -> Tensor:
        buffer_statistics.record(self, x.mean())
        buffer_statistics.record(self, x.mean())
        return x


class Named(nn.Module):
    """Returns a dictionary."""

    def forward(self, x: Tensor) -> Any:
        return OrderedDict(features=x)


class Extra(nn.Identity):
    def get_extra_state(self) -> Any:
        return {"a": 1}


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a + self.b.float()


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()


class Masked(Dense):
    """The second argument is optional."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) if mask is None else super().forward(x) * mask


class Scaled(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mean(output * self.scale, target)


def talkative(output: Tensor, target: Tensor) -> Any:
    return mean(output, target), {"accuracy": 0.5}


def complex_loss(output: Tensor, target: Tensor) -> Tensor:
    return mean(output, target) * 1j


class Broken(Points):
    def __getitem__(self, index: int) -> Any:
        raise OSError("the disk is gone")


class Leaving(Points):
    def __getitem__(self, index: int) -> Any:
        raise SystemExit("no licence")


class Single(Points):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0]


def no_module() -> Any:
    return 3


def no_optimizer(parameters: list[nn.Parameter]) -> Any:
    return None


def bad_optimizer(parameters: list[nn.Parameter]) -> Any:
    raise ValueError("lr must be above 0")


def unbuildable() -> nn.Module:
    raise FileNotFoundError("no weights here")


batch_norm = partial(nn.SyncBatchNorm, WIDTH)
REFUSED: dict[str, tuple[Job, str]] = {
    "layers that do not fit": (
        job_around(Dense, partial(Dense, 5, WIDTH)),
        r"the layers do not run: layer 2 \(Dense\) raised RuntimeError on input \(2, 6\) float32: .*2x6 and 5x6",
    ),
    "an input of another type": (
        job_around(Words),
        r"layer 1 \(Words\) raised RuntimeError on input \(2, 6\) float32: .*indices",
    ),
    "a vector for a loss": (
        job_with(loss=vector),
        r"Job\.loss returned a tensor of shape \(2,\): return a scalar mean, or \(sum, weight\)",
    ),
    "a number for a loss": (job_with(loss=number), r"Job\.loss returned a float: return a scalar mean"),
    "a vector for a weight": (job_with(loss=uneven), r"Job\.loss returned a weight of shape \(2,\): return one number"),
    "a loss that raises": (job_with(loss=raising), r"the layers do not run: the loss raised KeyError: 'no such label'"),
    "a dictionary for a weight": (
        job_with(loss=talkative),
        r"Job\.loss returned a dict as its weight: return a scalar",
    ),
    "a complex loss": (job_with(loss=complex_loss), r"Job\.loss returned a complex number: return a real one"),
    "a loss with parameters": (
        job_with(loss=Scaled()),
        r"Job\.loss computes with a trainable parameter of shape \(3,\) .*: make it part of a layer, or freeze it",
    ),
    "nothing to train": (job_with(layers=[Frozen, Frozen], loss=mean), r"Job\.loss does not depend on any trainable"),
    "a constant loss": (job_with(loss=constant), r"Job\.loss does not depend on any trainable parameter"),
    "a moving buffer": (
        job_around(Counting),
        r"Job\.layers\[1\] moves its buffer 'seen' in forward: call .*record\(\)",
    ),
    "a buffer set anew": (job_around(partial(Counting, anew=True)), r"Job\.layers\[1\] moves its buffer 'seen'"),
    "a buffer of a spectral norm": (
        job_around(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
        r"Job\.layers\[1\] moves its buffer 'parametrizations\.weight\.0\._u'",
    ),
    "statistics that are not recorded": (
        job_around(Silent),
        r"a Silent has apply_statistics\(\) but recorded nothing .*: call culm\.runtime\.compute\.buffer_statistics\.",
    ),
    "statistics recorded twice": (job_around(Eager), r"a Eager records statistics twice for one micro-batch"),
    "extra state": (job_around(partial(nn.Sequential, Extra())), r"Job\.layers\[1\]\.0 keeps extra state"),
    "a batch norm over all nodes": (job_around(batch_norm), r"Job\.layers\[1\] is a SyncBatchNorm: use BatchNorm"),
    "a dictionary between layers": (
        job_around(Named, Dense),
        r"the output of layer 1 \(Named\) is a OrderedDict: layers pass a tensor or a tuple of tensors to each other",
    ),
    "two types in a layer": (job_around(TwoTypes), r"Job\.layers\[1\] trains parameters of types float32, float64"),
    "a lazy layer": (
        job_around(partial(nn.LazyLinear, WIDTH)),
        r"Job\.layers\[1\] is lazy, '1\.weight' has no shape yet",
    ),
    "a lazy batch norm": (
        job_around(partial(nn.LazyBatchNorm1d, affine=False)),
        r"Job\.layers\[1\] is lazy, '1\.running_mean' has no shape yet",
    ),
    "a sparse tensor between layers": (
        job_around(Sparse, Dense),
        r"the output of layer 1 \(Sparse\) is sparse_coo float32: hand dense tensors from layer to layer",
    ),
    "several tensors for the first argument": (
        job_around(Doubled, Masked),
        r"layer 2 \(Masked\) raised TypeError on input .* as one tuple \(forward gets several arguments if",
    ),
    "a tied name that is not there": (
        job_with(tied=[("0.linear.weight", "1.linear.wait")]),
        r"Job\.tied names '1\.linear\.wait', which layer 1 does not have: its parameters are linear\.weight, ",
    ),
    "a tied second name": (
        job_around(Shared, tied=[("0.linear.weight", "1.down.weight")]),
        r"Job\.tied names '1\.down\.weight', which layer 1 has as 'up\.weight' first: use that name",
    ),
    "tied shapes": (
        job_with(tied=[("0.linear.weight", "4.linear.weight")]),
        r"Job\.tied joins parameters of different shapes \(0\.linear\.weight \(6, 6\), 4\.linear\.weight \(3, 6\)\)",
    ),
    "no optimizer": (job_with(optimizer=no_optimizer), r"Job\.optimizer returned a NoneType: return a torch\.optim"),
    "an optimizer with a closure": (
        job_with(optimizer=torch.optim.LBFGS),
        r"Job\.optimizer returned a LBFGS: gradients are dense and the loss is computed once a step",
    ),
    "an optimizer that raises": (
        job_with(optimizer=bad_optimizer),
        r"Job\.optimizer raised ValueError: lr must be above 0",
    ),
    "no module": (job_around(no_module), r"Job\.layers\[1\] made a int: a factory returns a torch\.nn\.Module"),
    "a factory that raises": (
        job_around(unbuildable),
        r"Job\.layers\[1\] could not be built: FileNotFoundError: no weights",
    ),
    "data that raise": (job_with(data=Broken()), r"Job\.data raised OSError for item \[.*\]: the disk is gone"),
    "data that end the process": (job_with(data=Leaving()), r"Job\.data raised SystemExit for item \[.*\]: no licence"),
    "an item that is no pair": (
        job_with(data=Single()),
        r"Job\.data gives Tensor after collation: an item must be a pair",
    ),
    "evaluation data that raise": (
        job_with(evaluate=Broken(), evaluate_every=1),
        r"Job\.evaluate raised OSError for item \[0, 1\]: the disk is gone",
    ),
    "an item to evaluate that is no pair": (
        job_with(evaluate=Single(), evaluate_every=1),
        r"Job\.evaluate gives Tensor after collation: an item must be a pair",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    job, sentence = REFUSED[name]
    with pytest.raises(JobError, match=sentence):
        check_model(job)


@pytest.mark.parametrize("name", ["plain", "gpt tied", "batch norm", "tuples", "in place", "complex", "own statistics"])
def test_a_valid_job_is_described_layer_by_layer(name: str) -> None:
    job = JOBS[name]
    found = check_model(job).profile
    assert len(found.layers) == len(job.layers)
    sizes = [sum(p.nbytes for p in layer().parameters()) for layer in job.layers]
    assert [cost.parameter_bytes for cost in found.layers] == sizes


def test_a_loss_with_a_weight_is_noticed() -> None:
    assert check_model(everything).weighted_loss
    assert not check_model(plain).weighted_loss


def wide() -> nn.Module:
    """20 GB."""
    return nn.Sequential(nn.Linear(WIDTH, 400_000_000), nn.Linear(400_000_000, WIDTH))


def test_a_layer_larger_than_this_machine_is_checked_without_its_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = check_model(job_around(wide, exact=True)).profile
    assert found.layers[1].parameter_bytes > 19e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_an_error_in_a_large_layer_is_found_without_its_memory_too() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(JobError, match="scalar mean"):
        check_model(job_around(wide, loss=vector))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


class Looking(Dense):
    """Branches on a value, which a fake tensor does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.detach().sum()) > 0 else x


class Measured(Dense):
    """Its constructor reads a value."""

    def __init__(self) -> None:
        super().__init__(dropout=float(torch.linspace(0, 0.5, 3)[1]))


class Numpy(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.from_numpy(x.detach().numpy() > 0)


@pytest.mark.parametrize("layer", [Looking, Measured, Numpy])
def test_code_that_looks_at_values_is_run_for_real(layer: Any) -> None:
    assert len(check_model(job_around(layer)).profile.layers) == 3


def test_the_check_changes_nothing() -> None:
    """Modules instead of factories: they belong to the user and must not change."""
    modules = [Dense(), nn.BatchNorm1d(WIDTH), Dense(WIDTH, 3)]
    before = [value.clone() for module in modules for value in module.state_dict().values()]
    check_model(job_with(layers=modules))
    after = [value for module in modules for value in module.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Several(nn.Module):
    def forward(self, *values: Tensor) -> Tensor:
        return sum(values[1:], start=values[0])


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Whole(nn.Module):
    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0] + values[1]


@pytest.mark.parametrize("kind", [Several, Pair, Whole])
def test_a_layer_gets_a_tuple_as_its_forward_names_it(kind: type[nn.Module]) -> None:
    layer = LayerReplica(plain, 0, kind(), {})
    (made,) = call_layer(layer, (torch.ones(2), torch.ones(2)), 0)
    assert made.tolist() == [2.0, 2.0]


def shared() -> list[nn.Module]:
    """Two layers with one weight."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    return [first, second]


def test_a_parameter_that_modules_share_has_to_be_named() -> None:
    layers = shared()
    with pytest.raises(
        JobError, match=r"same parameter as '0\.weight' and as '1\.weight': add \('0\.weight', '1\.weight'\)"
    ):
        job_with(layers=layers)
    assert job_with(layers=layers, tied=[("1.weight", "0.weight")])


def test_a_hook_that_copies_of_a_module_would_lack_is_refused() -> None:
    layer = nn.Linear(WIDTH, 3)
    layer.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(JobError, match=r"Job\.layers\[0\] has a hook on its parameter 'weight', which copies"):
        job_with(layers=[layer])


def test_a_model_is_no_list_of_layers() -> None:
    with pytest.raises(JobError, match=r"Job\.layers is a Linear, and not its layers in order: list them"):
        job_with(layers=nn.Linear(WIDTH, 3))


def test_a_factory_that_gives_out_one_module_gives_each_holder_its_own() -> None:
    module = nn.Linear(WIDTH, 3)
    for layers in ([lambda: module], [lambda: nn.Sequential(module)]):
        one, other = (next(build_layer(job_with(layers=layers), 0).parameters()) for _ in range(2))
        assert torch.equal(one, module.weight)
        assert len({one.data_ptr(), other.data_ptr(), module.weight.data_ptr()}) == 3


def test_a_factory_that_makes_a_module_is_not_copied_from() -> None:
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3).double()))
        return made[-1]

    assert build_layer(job_with(layers=[make]), 0) is made[0]
