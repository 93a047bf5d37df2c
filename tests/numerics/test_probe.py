"""What does not fit together is refused before anything starts, by name and in one sentence."""

from __future__ import annotations

import resource
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from culm.errors import JobError
from culm.job import Job
from culm.runtime import statistics
from culm.runtime.blueprint import probe
from culm.runtime.call import call_layer
from culm.runtime.state import HeldLayer, build_layer

from .jobs import JOBS, around, but, everything, plain
from .layers import Dense, Frozen, Shared
from .samples import WIDTH, Points, mean
from .sequences import Words
from .tuples import Doubled


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
    """Moves a buffer and tells nobody."""

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
    """Says how to move its buffer, but never by what."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def apply_statistics(self, *values: Tensor) -> None: ...


class Eager(Silent):
    """Says it twice."""

    def forward(self, x: Tensor) -> Tensor:
        statistics.record(self, x.mean())
        statistics.record(self, x.mean())
        return x


class Named(nn.Module):
    """Gives a dictionary."""

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
    """What comes with the first argument is there at times."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) if mask is None else super().forward(x) * mask


class Scaled(nn.Module):
    """A loss that would have to be trained."""

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
        around(Dense, partial(Dense, 5, WIDTH)),
        r"the layers do not run: layer 2 \(Dense\) raised RuntimeError on input \(2, 6\) float32: .*2x6 and 5x6",
    ),
    "an input of another type": (
        around(Words),
        r"layer 1 \(Words\) raised RuntimeError on input \(2, 6\) float32: .*indices",
    ),
    "a vector for a loss": (
        but(loss=vector),
        r"Job\.loss returned a tensor of shape \(2,\): return a scalar mean, or \(sum, weight\)",
    ),
    "a number for a loss": (but(loss=number), r"Job\.loss returned a float: return a scalar mean"),
    "a vector for a weight": (but(loss=uneven), r"Job\.loss returned a weight of shape \(2,\): return one number"),
    "a loss that raises": (but(loss=raising), r"the layers do not run: the loss raised KeyError: 'no such label'"),
    "a dictionary for a weight": (but(loss=talkative), r"Job\.loss returned a dict as its weight: return a scalar"),
    "a complex loss": (but(loss=complex_loss), r"Job\.loss returned a complex number: return a real one"),
    "a loss with parameters": (
        but(loss=Scaled()),
        r"Job\.loss computes with a trainable parameter of shape \(3,\) .*: make it part of a layer, or freeze it",
    ),
    "nothing to train": (but(layers=[Frozen, Frozen], loss=mean), r"Job\.loss does not depend on any trainable"),
    "a constant loss": (but(loss=constant), r"Job\.loss does not depend on any trainable parameter"),
    "a moving buffer": (around(Counting), r"Job\.layers\[1\] moves its buffer 'seen' in forward: call .*record\(\)"),
    "a buffer set anew": (around(partial(Counting, anew=True)), r"Job\.layers\[1\] moves its buffer 'seen'"),
    "a buffer of a spectral norm": (
        around(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
        r"Job\.layers\[1\] moves its buffer 'parametrizations\.weight\.0\._u'",
    ),
    "statistics that are not recorded": (
        around(Silent),
        r"a Silent has apply_statistics\(\) but recorded nothing .*: call culm\.runtime\.statistics\.record\(\)",
    ),
    "statistics recorded twice": (around(Eager), r"a Eager records statistics twice for one micro-batch"),
    "extra state": (around(partial(nn.Sequential, Extra())), r"Job\.layers\[1\]\.0 keeps extra state"),
    "a batch norm over all nodes": (around(batch_norm), r"Job\.layers\[1\] is a SyncBatchNorm: use BatchNorm"),
    "a dictionary between layers": (
        around(Named, Dense),
        r"the output of layer 1 \(Named\) is a OrderedDict: between layers travels a tensor or a tuple of tensors",
    ),
    "two types in a layer": (around(TwoTypes), r"Job\.layers\[1\] trains parameters of types float32, float64"),
    "a lazy layer": (around(partial(nn.LazyLinear, WIDTH)), r"Job\.layers\[1\] is lazy, '1\.weight' has no shape yet"),
    "a lazy batch norm": (
        around(partial(nn.LazyBatchNorm1d, affine=False)),
        r"Job\.layers\[1\] is lazy, '1\.running_mean' has no shape yet",
    ),
    "a sparse tensor between layers": (
        around(Sparse, Dense),
        r"the output of layer 1 \(Sparse\) is sparse_coo float32: hand dense tensors from layer to layer",
    ),
    "several tensors for the first argument": (
        around(Doubled, Masked),
        r"layer 2 \(Masked\) raised TypeError on input .* as one tuple \(forward gets several arguments if",
    ),
    "a tied name that is not there": (
        but(tied=[("0.linear.weight", "1.linear.wait")]),
        r"Job\.tied names '1\.linear\.wait', which layer 1 does not have: it has linear\.weight, linear\.bias",
    ),
    "a tied second name": (
        around(Shared, tied=[("0.linear.weight", "1.down.weight")]),
        r"Job\.tied names '1\.down\.weight', which layer 1 has as 'up\.weight' first: use that name",
    ),
    "tied shapes": (
        but(tied=[("0.linear.weight", "4.linear.weight")]),
        r"Job\.tied joins parameters of different shapes \(0\.linear\.weight \(6, 6\), 4\.linear\.weight \(3, 6\)\)",
    ),
    "no optimizer": (but(optimizer=no_optimizer), r"Job\.optimizer returned a NoneType: return a torch\.optim"),
    "an optimizer with a closure": (
        but(optimizer=torch.optim.LBFGS),
        r"Job\.optimizer returned a LBFGS: gradients are dense and the loss is computed once a step",
    ),
    "an optimizer that raises": (but(optimizer=bad_optimizer), r"Job\.optimizer raised ValueError: lr must be above 0"),
    "no module": (around(no_module), r"Job\.layers\[1\] made a int: a factory returns a torch\.nn\.Module"),
    "a factory that raises": (
        around(unbuildable),
        r"Job\.layers\[1\] could not be built: FileNotFoundError: no weights",
    ),
    "data that raise": (but(data=Broken()), r"Job\.data raised OSError for item \[.*\]: the disk is gone"),
    "data that end the process": (but(data=Leaving()), r"Job\.data raised SystemExit for item \[.*\]: no licence"),
    "an item that is no pair": (but(data=Single()), r"Job\.data gives Tensor after collation: an item must be a pair"),
    "evaluation data that raise": (
        but(evaluate=Broken(), evaluate_every=1),
        r"Job\.evaluate raised OSError for item \[0, 1\]: the disk is gone",
    ),
    "an item to evaluate that is no pair": (
        but(evaluate=Single(), evaluate_every=1),
        r"Job\.evaluate gives Tensor after collation: an item must be a pair",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    job, sentence = REFUSED[name]
    with pytest.raises(JobError, match=sentence):
        probe(job)


@pytest.mark.parametrize("name", ["plain", "gpt tied", "batch norm", "tuples", "in place", "complex", "own statistics"])
def test_what_fits_is_looked_at_layer_by_layer(name: str) -> None:
    job = JOBS[name]
    found = probe(job).profile
    assert len(found.layers) == len(job.layers)
    sizes = [sum(p.nbytes for p in layer().parameters()) for layer in job.layers]
    assert [cost.parameter_bytes for cost in found.layers] == sizes


def test_a_loss_with_a_weight_is_noticed() -> None:
    assert probe(everything).weighted
    assert not probe(plain).weighted


def wide() -> nn.Module:
    """20 GB."""
    return nn.Sequential(nn.Linear(WIDTH, 400_000_000), nn.Linear(400_000_000, WIDTH))


def test_a_layer_larger_than_this_machine_is_looked_at_without_its_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = probe(around(wide, exact=True)).profile
    assert found.layers[1].parameter_bytes > 19e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_what_is_wrong_with_a_large_layer_is_said_without_its_memory_too() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(JobError, match="scalar mean"):
        probe(around(wide, loss=vector))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


class Looking(Dense):
    """Decides by a value, which a fake tensor does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.detach().sum()) > 0 else x


class Measured(Dense):
    """Built by a value."""

    def __init__(self) -> None:
        super().__init__(dropout=float(torch.linspace(0, 0.5, 3)[1]))


class Numpy(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.from_numpy(x.detach().numpy() > 0)


@pytest.mark.parametrize("layer", [Looking, Measured, Numpy])
def test_code_that_looks_at_values_is_run_for_real(layer: Any) -> None:
    assert len(probe(around(layer)).profile.layers) == 3


def test_looking_does_not_move_anything() -> None:
    """Modules, not factories: they are the user's."""
    modules = [Dense(), nn.BatchNorm1d(WIDTH), Dense(WIDTH, 3)]
    before = [value.clone() for module in modules for value in module.state_dict().values()]
    probe(but(layers=modules))
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
    layer = HeldLayer(plain, 0, kind(), {})
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
        JobError, match=r"one parameter as '0\.weight' and '1\.weight': add \('0\.weight', '1\.weight'\)"
    ):
        but(layers=layers)
    assert but(layers=layers, tied=[("1.weight", "0.weight")])


def test_a_hook_that_copies_of_a_module_would_lack_is_refused() -> None:
    layer = nn.Linear(WIDTH, 3)
    layer.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(JobError, match=r"Job\.layers\[0\] has a hook on its parameter 'weight', which copies"):
        but(layers=[layer])


def test_a_model_is_no_list_of_layers() -> None:
    with pytest.raises(JobError, match=r"Job\.layers is a Sequential: pass a list .* as list\(model\)"):
        but(layers=nn.Sequential(nn.Linear(WIDTH, 3)))


def test_a_factory_that_gives_out_one_module_gives_each_holder_its_own() -> None:
    module = nn.Linear(WIDTH, 3)
    for layers in ([lambda: module], [lambda: nn.Sequential(module)]):
        one, other = (next(build_layer(but(layers=layers), 0).parameters()) for _ in range(2))
        assert torch.equal(one, module.weight)
        assert len({one.data_ptr(), other.data_ptr(), module.weight.data_ptr()}) == 3


def test_a_factory_that_makes_a_module_is_not_copied_from() -> None:
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3).double()))
        return made[-1]

    assert build_layer(but(layers=[make]), 0) is made[0]
