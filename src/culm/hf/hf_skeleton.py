"""The skeleton of a Hugging Face model: its modules, with parameters on the meta device, and where its blocks are.

The skeleton is traced once on fake tensors, with pass-through blocks, to find out which modules run before, between and
after the lists of blocks ("stacks"). Layers are then built from it one at a time.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from culm.errors import JobError, message_suffix

_SIMPLE = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Stack:
    """A list of blocks that the model calls one after another."""

    path: str
    """Name of the ModuleList in the model, such as 'model.layers'."""
    blocks: int


@dataclass(frozen=True)
class ModelPlan:
    """How a model is cut: phase 0 runs before the first stack, phase n after stack n - 1."""

    stacks: tuple[Stack, ...]
    phases: tuple[tuple[str, ...], ...]
    """By phase: names of the outermost modules that run in it and have parameters."""
    helpers: tuple[str, ...]
    """Outermost modules without parameters that have buffers, such as rotary embeddings: every layer has them."""
    unused: tuple[str, ...]
    """Outermost modules with parameters that do not run. They are kept in the last layer and not trained."""
    result_length: int = 0
    """Blocks return a tuple of so many values, the hidden states first; 0: they return the hidden states."""


class BlockCall(Exception):
    """Raised by a stub instead of running the block: the arguments that the model calls the block with."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args_given, self.kwargs_given = args, kwargs


class ForwardState:
    """What the stubs of one skeleton do in a forward."""

    def __init__(self) -> None:
        self.stop_at: tuple[int, int] | None = None
        """(stack, block) whose call ends the forward."""
        self.result: Any = None
        """What every other block returns."""
        self.hidden: Tensor | None = None
        """What modules return that belong to other layers."""

    def call_block(self, place: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.stop_at == place:
            raise BlockCall(args, kwargs)
        return self.result


class BlockStub(nn.Module):
    """Replaces a block in a skeleton. It has the block's plain attributes, which some models read in their loop."""

    def __init__(self, state: ForwardState, place: tuple[int, int], block: nn.Module) -> None:
        super().__init__()
        self.state, self.place = state, place
        for name, value in vars(block).items():
            if isinstance(value, _SIMPLE) and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.state.call_block(self.place, args, kwargs)


class AbsentForward:
    """The forward of a module that belongs to another layer: its result is not used, only its shape."""

    def __init__(self, state: ForwardState) -> None:
        self.state = state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - those of any module
        return self.state.hidden


class BufferKeepingForward:
    """The forward of a module that writes to its buffers only to read them at once, such as a rotary embedding whose
    frequencies depend on the length: the buffers are as before afterwards."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own_forward = module, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = dict(self.module._buffers)
        self.module._buffers.update({n: None if buffer is None else buffer.clone() for n, buffer in kept.items()})
        try:
            return self.own_forward(*args, **kwargs)
        finally:
            self.module._buffers.update(kept)


def make_skeleton(model: nn.Module) -> Any:
    """A copy of a model with its parameters on the meta device. Shared parameters stay shared; buffers are copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    skeleton = copy.deepcopy(model, memo)
    for module in skeleton.modules():
        if hasattr(module, "gradient_checkpointing"):
            cast(Any, module).gradient_checkpointing = False  # Job.recompute does this
    return skeleton


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters of modules that are created here have no memory. Buffers are real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # a shared parameter stays one object
            meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = meta

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def find_stacks(model: Any) -> tuple[Stack, ...]:
    """The lists of blocks: those that the model's own pipeline plan names, else its outermost long lists of equal
    modules."""
    named = _planned_lists(model) or _block_lists(model)
    if not named:
        raise JobError(
            f"{type(model).__name__} has no list of blocks (an nn.ModuleList of equal modules) to cut: pass Job.layers "
            "as a list of your own modules, as in docs/job.md"
        )
    return tuple(Stack(path, len(model.get_submodule(path))) for path in named)


def _planned_lists(model: Any) -> list[str]:
    """Block lists that `pp_plan` (or the config's base_model_pp_plan) names."""
    plan = getattr(model, "_pp_plan", None) or {}
    base = getattr(model.config, "base_model_pp_plan", None) or {}
    prefix = model.base_model_prefix
    names = [*plan, *(f"{prefix}.{name}" if hasattr(model, prefix) else name for name in base)]
    known = dict(model.named_modules())
    return list(dict.fromkeys(n for n in names if isinstance(known.get(n), nn.ModuleList) and len(known[n])))


def _block_lists(model: nn.Module) -> list[str]:
    """Outermost ModuleLists of modules of one class that hold most of the parameters."""
    total = sum(p.numel() for p in model.parameters())
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found) or not isinstance(module, nn.ModuleList):
            continue
        size = sum(p.numel() for p in module.parameters())
        if len({type(block) for block in module}) == 1 and size > 0.02 * total:
            found.append(name)
    return found


def replace_blocks(skeleton: Any, stacks: Sequence[Stack], state: ForwardState) -> list[list[nn.Module]]:
    """Put stubs into the stacks of a skeleton. Returns the blocks."""
    blocks = []
    for number, stack in enumerate(stacks):
        parent = skeleton.get_submodule(stack.path)
        blocks.append(list(parent))
        for index, block in enumerate(blocks[-1]):
            parent[index] = BlockStub(state, (number, index), block)
    return blocks


def trace_phases(
    model: Any, stacks: Sequence[Stack], inputs: dict[str, Any], block_result: Callable[[Tensor], Any] | None
) -> ModelPlan:
    """Find out which modules run in which phase. `inputs`: arguments of a forward. `block_result` makes what a block
    returns from the hidden states; None: run one to see. Raises JobError, which names the module, for a model that can
    not be cut."""
    state = _TracingState(stacks, block_result)
    skeleton = copy.deepcopy(model)
    state.blocks = replace_blocks(skeleton, stacks, state)
    outer = _outermost_modules(skeleton, stacks)
    calls: dict[str, set[int]] = {name: set() for name in outer}
    for name, module in outer.items():
        module.register_forward_pre_hook(lambda *_, name=name: calls[name].add(state.phase))
    _check_own_parameters(skeleton, outer)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.enable_grad():
            for module in (skeleton, *(blocks[0] for blocks in state.blocks)):
                _make_fake(module, fake)
            given = {n: fake.from_tensor(v) if isinstance(v, Tensor) else v for n, v in inputs.items()}
            skeleton(**given, use_cache=False)
    except _TrainedArgument as error:
        raise JobError(
            f"{type(model).__name__} passes its blocks a trained tensor besides the hidden states ({error}), which no "
            "single layer holds: pass Job.layers as a list of your own modules instead"
        ) from None
    except Exception as error:
        raise JobError(
            f"{type(model).__name__} cannot be cut at {', '.join(s.path for s in stacks)}: its forward raised "
            f"{type(error).__name__}{message_suffix(error)}; pass Job.layers as a list of your own modules instead"
        ) from error
    finally:
        log.setLevel(level)
    _check_order(model, stacks, state)
    has_parameters = {name for name, module in outer.items() if any(True for _ in module.parameters())}
    phases = [[n for n in outer if phase in calls[n] and n in has_parameters] for phase in range(len(stacks) + 1)]
    helpers = [n for n, m in outer.items() if n not in has_parameters and any(True for _ in m.buffers())]
    unused = [n for n in outer if not calls[n] and n in has_parameters]
    return ModelPlan(tuple(stacks), tuple(map(tuple, phases)), tuple(helpers), tuple(unused), state.result_length)


class _TrainedArgument(Exception):
    """A block is called with a tensor that depends on parameters, besides the hidden states."""


class _TracingState(ForwardState):
    """Counts the phases: a stack has been passed once its last block was called. The first block of each stack is run,
    to see what it returns."""

    def __init__(self, stacks: Sequence[Stack], block_result: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.phase = 0
        self.order: list[tuple[int, int]] = []
        self.blocks: list[list[nn.Module]] = []
        """By stack: the blocks that the stubs replace."""
        self.result_length = 0
        self._stacks, self._block_result = stacks, block_result

    def call_block(self, place: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.order.append(place)
        stack, index = place
        self.phase += index == self._stacks[stack].blocks - 1
        hidden = args[0] if args else kwargs["hidden_states"]
        if self._block_result is not None:
            return self._block_result(hidden)
        others = kwargs if args else {name: value for name, value in kwargs.items() if name != "hidden_states"}
        _check_not_trained({**{f"argument {n + 1}": value for n, value in enumerate(args[1:])}, **others})
        if not index:
            self.result_length = _result_length(self.blocks[stack][0], args, kwargs)
        return wrap_result(hidden, self.result_length)


def wrap_result(hidden: Any, length: int) -> Any:
    """What a block returns that gives these hidden states."""
    return (hidden, *[None] * (length - 1)) if length else hidden


def _result_length(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    try:
        result = block(*args, **kwargs)
    except Exception:  # fake tensors do not know everything, such as how many tokens an expert gets
        return 0
    return len(result) if isinstance(result, tuple) else 0


def _check_not_trained(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            if value.requires_grad:
                raise _TrainedArgument(name)
        elif isinstance(value, tuple | list):
            _check_not_trained(dict.fromkeys([name], None) | {f"{name}[{n}]": each for n, each in enumerate(value)})
        elif isinstance(value, dict):
            _check_not_trained({f"{name}[{key!r}]": each for key, each in value.items()})


def _check_order(model: Any, stacks: Sequence[Stack], state: _TracingState) -> None:
    expected = [(s, b) for s, stack in enumerate(stacks) for b in range(stack.blocks)]
    if state.order != expected:
        raise JobError(
            f"{type(model).__name__} does not call the blocks of {', '.join(s.path for s in stacks)} once each and in "
            "order: pass Job.layers as a list of your own modules instead"
        )


def _outermost_modules(skeleton: nn.Module, stacks: Sequence[Stack]) -> dict[str, nn.Module]:
    """The outermost modules that contain no stack, by name."""
    paths = [stack.path for stack in stacks]
    found: dict[str, nn.Module] = {}
    for name, module in skeleton.named_modules():
        contains = not name or any(path == name or path.startswith(f"{name}.") for path in paths)
        inside = any(name.startswith(f"{path}.") for path in paths) or any(name.startswith(f"{n}.") for n in found)
        if not contains and not inside:
            found[name] = module
    return found


def _check_own_parameters(skeleton: nn.Module, outer: dict[str, nn.Module]) -> None:
    held = {id(p) for module in outer.values() for p in module.parameters()}
    for name, parameter in skeleton.named_parameters():
        if id(parameter) not in held:
            raise JobError(
                f"{type(skeleton).__name__} has the parameter {name!r} next to its blocks, not in a module of its own: "
                "it cannot be assigned to a layer; move it into a module that runs before or after the blocks"
            )


def _make_fake(skeleton: nn.Module, fake: FakeTensorMode) -> None:
    for module in skeleton.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                with fake:
                    module._parameters[name] = nn.Parameter(
                        torch.empty(parameter.shape, dtype=parameter.dtype), parameter.is_floating_point()
                    )
