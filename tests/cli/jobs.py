"""Jobs for the command line: a tiny one that trains in milliseconds, and one for each way to go wrong."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import culm


class Narrow(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


class Wide(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 4)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def tiny(**changes: object) -> culm.Job:
    """Four layers, four micro-batches."""
    generator = torch.Generator().manual_seed(0)
    items = [tuple(torch.randn(2, 4, generator=generator)) for _ in range(64)]
    fields: dict[str, object] = {
        "layers": [Narrow] * 4,
        "loss": mean_square,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "data": items,
        "global_batch": 8,
        "micro_batch": 2,
        "steps": 4,
    }
    return culm.Job(**{**fields, **changes})  # type: ignore[arg-type]


def job() -> culm.Job:
    return tiny()


def endless() -> culm.Job:
    return tiny(steps=10**9)


def number() -> int:
    return 42


def raises() -> culm.Job:
    raise FileNotFoundError("no such corpus")


def leaves() -> culm.Job:
    sys.exit("I have had enough")


def uneven() -> culm.Job:
    return tiny(global_batch=10, micro_batch=4)


def misfit() -> culm.Job:
    return tiny(layers=[Narrow, Wide])


def vector_loss() -> culm.Job:
    return tiny(loss=lambda output, target: (output - target).square().mean(0))


def not_a_number() -> culm.Job:
    return tiny(loss=_Falling().loss)


class _Falling:
    """A loss that is NaN from its seventh micro-batch on, which is in the second step."""

    calls = 0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        made = mean_square(output, target)
        return made * float("nan") if self.calls > 6 else made


class Stumbling(Narrow):
    """Raises in the forward of its tenth micro-batch, which is in step 2."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 10:
            raise ZeroDivisionError("stumbled over a stone")
        return super().forward(input)


def stumbling() -> culm.Job:
    return tiny(layers=[Narrow, Narrow, Stumbling, Narrow])


class Talking(Narrow):
    """Prints in every forward."""

    def forward(self, input: Tensor) -> Tensor:
        print("a layer speaks [not markup]", flush=False)
        return super().forward(input)


def talking() -> culm.Job:
    print("the job speaks")
    return tiny(layers=[Narrow, Talking])


class _Importing:
    """A loss that writes down what has been imported since there is a job."""

    def __init__(self) -> None:
        self.before = frozenset(sys.modules)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        Path(os.environ["CULM_TEST_IMPORTED"]).write_text("\n".join(set(sys.modules) - self.before))
        return mean_square(output, target)


def importing() -> culm.Job:
    """It talks, too."""
    return tiny(layers=[Narrow, Narrow, Narrow, Talking], loss=_Importing().loss, optimizer=torch.optim.AdamW)


def brief() -> culm.Job:
    """It lasts for seconds: longer than it takes to disturb it."""
    return tiny(steps=120, loss=slow_mean_square)


def slow_mean_square(output: Tensor, target: Tensor) -> Tensor:
    time.sleep(0.005)
    return mean_square(output, target)
