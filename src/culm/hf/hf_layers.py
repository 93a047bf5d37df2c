"""The layers of a Hugging Face model, for Job.layers.

A layer holds its own modules under the names that they have in the model, so that the tensor `model.norm.weight` of
layer 5 is `5.model.norm.weight`. It runs the model's own forward on a skeleton: modules of other layers return
placeholders, and blocks are stubs. So masks, rotary embeddings, scaling and heads are computed by the model's code.

Between layers travel the hidden states and what later layers need: the attention mask, position ids, the sums of a
router, the output of an encoder. Masks and rotary embeddings are computed again in every layer, without gradients: they
are cheap, and would be larger than the hidden states for long sequences.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from culm.errors import JobError
from culm.hf.hf_adapters import name_before_adapter, reset_adapter
from culm.hf.hf_skeleton import (
    AbsentForward,
    BlockCall,
    BlockStub,
    BufferKeepingForward,
    ForwardState,
    ModelPlan,
    replace_blocks,
    wrap_result,
)
from culm.hf.hf_weights import WeightSource, check_shape


@dataclass(frozen=True)
class Router:
    """The routers of a mixture of experts, whose balance is part of the loss."""

    module_class: type[nn.Module]
    output: int
    """Which of the router's outputs are its logits."""
    experts: int
    top_k: int
    blocks: tuple[int, ...]
    """Blocks that have a router."""


@dataclass(frozen=True, eq=False)
class HfModel:
    """A model to be cut into layers: shared by all factories."""

    skeleton: Any
    plan: ModelPlan
    source: WeightSource
    inputs: tuple[str, ...]
    """Names of the tensors that layer 0 gets, in order."""
    kept: tuple[str, ...]
    """Inputs that every later layer needs."""
    router: Router | None
    aliases: Mapping[str, tuple[str, ...]]
    """All names of a parameter that has several."""
    returns_bias: bool
    """Whether blocks return (hidden states, position bias, ...), as those of T5 do."""
    encoder_decoder: bool

    @property
    def layers(self) -> list[LayerFactory]:
        found = []
        for number, stack in enumerate(self.plan.stacks):
            found.append(LayerFactory(self, (number, None)))
            found += [LayerFactory(self, (number, index)) for index in range(stack.blocks)]
        return [*found, LayerFactory(self, (len(self.plan.stacks), None))]

    def stored_name(self, name: str) -> str | None:
        """The name under which the source has a tensor; None if it has to be initialised."""
        names = (name, *self.aliases.get(name, ()))
        plain = tuple(map(name_before_adapter, names))
        return next((n for n in (*names, *plain) if self.source.has(n)), None)

    def modules_of(self, place: tuple[int, int | None]) -> list[str]:
        """Names of the modules that a layer trains."""
        phase, index = place
        if index is not None:
            return [f"{self.plan.stacks[phase].path}.{index}"]
        last = self.plan.unused if phase == len(self.plan.stacks) else ()
        return [*self.plan.phases[phase], *last]

    def layout(self, place: tuple[int, int | None]) -> tuple[str, ...]:
        """Names of the tensors that a layer gets."""
        phase, index = place
        if phase == 0 and index is None:
            return self.inputs
        stack = phase if index is not None else phase - 1
        bias = ("bias",) if self.returns_bias and index != 0 else ()
        router = ("router_tokens", "router_probabilities") if self.router else ()
        memory = ("memory",) if self.encoder_decoder and stack == 1 else ()
        kept = [name for name in self.kept if not (name == "decoder_input_ids" and stack == 1)]
        return ("hidden", *bias, *router, *memory, *kept)


@dataclass(frozen=True, eq=False)
class LayerFactory:
    """Builds one layer, with its own weights only."""

    model: HfModel
    place: tuple[int, int | None]
    """(phase, None), or (stack, block)."""

    def __call__(self) -> nn.Module:
        with unset_fake_temporarily():
            skeleton, state, held = _copy_for(self.model, self.place)
        _materialise(self.model, skeleton, held)
        kind = GlueLayer if self.place[1] is None else BlockLayer
        return kind(self.model, self.place, skeleton, state, held)

    def tensor_names(self) -> list[str]:
        """Names in the model of the tensors that the layer holds."""
        found = []
        for path in self.model.modules_of(self.place):
            module = self.model.skeleton.get_submodule(path)
            found += [f"{path}.{name}" for name in module.state_dict()]
        return found


def _copy_for(model: HfModel, place: tuple[int, int | None]) -> tuple[Any, ForwardState, dict[str, nn.Module]]:
    """(skeleton, its state, modules that the layer holds, by name): parameters are still on the meta device."""
    state, source = ForwardState(), model.skeleton
    mine = model.modules_of(place)
    memo: dict[int, Any] = {id(p): p for p in source.parameters()}  # replaced for held modules, else never used
    for number, stack in enumerate(model.plan.stacks):
        for index, block in enumerate(source.get_submodule(stack.path)):
            if (number, index) != place:
                memo[id(block)] = BlockStub(state, (number, index), block)
    skeleton = copy.deepcopy(source, memo)
    held = {path: skeleton.get_submodule(path) for path in mine}
    replace_blocks(skeleton, model.plan.stacks, state)
    for path in model.plan.helpers:
        for module in skeleton.get_submodule(path).modules():
            if "longrope" in str(getattr(module, "rope_type", "")):
                module.forward = BufferKeepingForward(module)
    for path in {path for phase in model.plan.phases for path in phase} - set(mine):
        skeleton.get_submodule(path).forward = AbsentForward(state)
    return skeleton, state, held


def _materialise(model: HfModel, skeleton: Any, held: Mapping[str, nn.Module]) -> None:
    """Give the held modules memory, and the values of the source or of the model's initialisation."""
    frozen = set(model.plan.unused)
    modules = [
        (f"{path}.{name}" if name else path, m) for path, held_m in held.items() for name, m in held_m.named_modules()
    ]
    made: dict[int, nn.Parameter] = {}
    targets: dict[str, Tensor] = {}
    for path, module in modules:
        unused = any(path == name or path.startswith(f"{name}.") for name in frozen)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                value = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad and not unused)
            setattr(module, name, made[id(parameter)])
            targets[f"{path}.{name}"] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                targets[f"{path}.{name}"] = buffer
    if active_fake_mode() is not None:
        return
    with torch.no_grad():
        for path, module in modules:
            own = [f"{path}.{name}" for name, p in module._parameters.items() if p is not None]
            if any(model.stored_name(name) is None for name in own):
                skeleton._init_weights(module)
        for _, module in modules:
            reset_adapter(module)
        for name, target in targets.items():
            stored = model.stored_name(name)
            if stored is not None:
                value = model.source.read([stored])[stored]
                check_shape(name, value.shape, target.shape)
                target.copy_(value)


class _HfLayer(nn.Module):
    """A layer with modules at their paths in the model, and the skeleton that it runs."""

    def __init__(
        self,
        model: HfModel,
        place: tuple[int, int | None],
        skeleton: Any,
        state: ForwardState,
        held: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        for path, module in held.items():
            _register(self, path, module)
        for path in model.plan.helpers:
            _register(self, path, skeleton.get_submodule(path))
        self.phase, self.index = place
        self.layout = model.layout(place)
        self.router, self.kept, self.returns_bias = model.router, model.kept, model.returns_bias
        self.encoder_decoder, self.stacks = model.encoder_decoder, len(model.plan.stacks)
        self.result_length = model.plan.result_length
        self._unregistered = [skeleton]
        self._state = state
        self._pad = 1 if getattr(skeleton.config, "pad_token_id", None) == 0 else 0

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors that the layer got, by name."""
        if len(tensors) != len(self.layout):
            raise JobError(
                f"the input has {len(tensors)} tensors and culm.hf.parts expects {len(self.layout)} "
                f"({', '.join(self.layout)}): name the tensors of an item in order, as in "
                "culm.hf.parts(model, inputs=('input_ids', 'attention_mask'))"
            )
        return dict(zip(self.layout, tensors, strict=True))

    def train(self, mode: bool = True) -> _HfLayer:
        """Also the modules without parameters that only the skeleton has, such as the dropout before a head."""
        super().train(mode)
        self._unregistered[0].train(mode)
        return self

    def placeholders(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """Arguments of the model's forward in a layer after the first one: what is kept, and placeholders for ids."""
        hidden = values["hidden"]
        given: dict[str, Any] = {name: values[name] for name in self.kept if name in values}
        ids = torch.full(hidden.shape[:2], self._pad, dtype=torch.long, device=hidden.device)
        if self._unregistered[0].main_input_name == "pixel_values":
            given["pixel_values"] = hidden.new_zeros(hidden.shape[0], 1, 1, 1)
        elif not self.encoder_decoder:
            given.setdefault("input_ids", ids)
        elif "memory" in values:
            given |= {"encoder_outputs": (values["memory"],), "decoder_input_ids": ids}
        else:
            given |= {"input_ids": ids}
        return given

    def run_until(self, arguments: Mapping[str, Any], stop_at: tuple[int, int]) -> BlockCall:
        """Run the model's forward up to the call of a block."""
        self._state.stop_at = stop_at
        try:
            self._unregistered[0](**arguments, use_cache=False)
        except BlockCall as call:
            return call
        finally:
            self._state.stop_at = None
        raise JobError(f"the model did not call block {stop_at[1]} of its stack {stop_at[0]}: it cannot be cut there")

    def block_result(self, values: Mapping[str, Tensor]) -> Any:
        """What a block returns whose hidden states are given."""
        if self.returns_bias:
            return (values["hidden"], values.get("bias"), None)
        return wrap_result(values["hidden"], self.result_length)

    def pack(self, values: Mapping[str, Tensor], layout: Sequence[str]) -> Tensor | tuple[Tensor, ...]:
        packed = tuple(values[name] for name in layout)
        return packed[0] if len(packed) == 1 else packed


def _register(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root._modules[parent]  # type: ignore[assignment]
    root.add_module(name, module)


class GlueLayer(_HfLayer):
    """What runs before the first block, between two stacks, or after the last block."""

    def __init__(self, model: HfModel, *rest: Any) -> None:
        super().__init__(model, *rest)
        self._next_layout = model.layout((self.phase, 0)) if self.phase < self.stacks else ()

    def forward(self, *tensors: Tensor) -> Any:
        values = self.named(tensors)
        if self.phase == 0:
            arguments: dict[str, Any] = dict(values)
        else:
            arguments = self.placeholders(values)
            if self.encoder_decoder and self.phase == 1:
                arguments["decoder_input_ids"] = values["decoder_input_ids"]
            self._state.hidden = values["hidden"].detach()
            self._state.result = self.block_result(values)
        try:
            if self.phase == self.stacks:
                return self._finish(arguments, values)
            call = self.run_until(arguments, (self.phase, 0))
        finally:
            self._state.result = self._state.hidden = None
        return self.pack(self._next_values(call, values), self._next_layout)

    def _next_values(self, call: BlockCall, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hidden = call.args_given[0] if call.args_given else call.kwargs_given["hidden_states"]
        found = {**values, "hidden": hidden}
        if self.router is not None and "router_tokens" not in found:
            zeros = torch.zeros(self.router.experts, device=hidden.device)
            found |= {"router_tokens": zeros, "router_probabilities": zeros.clone()}
        if self.encoder_decoder and self.phase == 1:
            found["memory"] = _encoder_states(call)
        return found

    def _finish(self, arguments: Mapping[str, Any], values: Mapping[str, Tensor]) -> Any:
        if self.router is not None:
            arguments = {**arguments, "output_router_logits": False}
        logits = self._unregistered[0](**arguments, use_cache=False).logits
        if self.router is None:
            return logits
        return logits, _balance_loss(self.router, values)


def _encoder_states(call: BlockCall) -> Tensor:
    """The encoder's output among the arguments of the first decoder block."""
    if "encoder_hidden_states" in call.kwargs_given:
        found: Tensor = call.kwargs_given["encoder_hidden_states"]
        return found
    states: Tensor = call.args_given[3]
    return states


class BlockLayer(_HfLayer):
    """One block of a stack."""

    def __init__(self, model: HfModel, *rest: Any) -> None:
        super().__init__(model, *rest)
        assert self.index is not None
        self._path = f"{model.plan.stacks[self.phase].path}.{self.index}"
        self._next_layout = model.layout((self.phase, self.index + 1))
        self._arguments: tuple[tuple[Any, ...], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        self._router_logits: list[Tensor] = []
        self._block = [self.get_submodule(self._path)]  # in a list: registered already, and looked up in every forward
        self._unregistered[0].eval()  # nothing that only prepares a block's arguments may draw random numbers
        if self.router is not None:
            for module in self._block[0].modules():
                if isinstance(module, self.router.module_class):
                    module.register_forward_hook(self._note_router_logits)

    def _note_router_logits(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        assert self.router is not None
        self._router_logits.append(output[self.router.output] if isinstance(output, tuple) else output)

    def train(self, mode: bool = True) -> BlockLayer:
        nn.Module.train(self, mode)
        return self

    def forward(self, *tensors: Tensor) -> Any:
        values = self.named(tensors)
        args, kwargs = self._block_arguments(values)
        self._router_logits = []
        output = self._block[0](values["hidden"], *args, **kwargs)
        found = {**values, "hidden": output[0] if isinstance(output, tuple) else output}
        if self.returns_bias:
            found["bias"] = output[1]
        if self.router is not None:
            for logits in self._router_logits:
                _add_router_sums(self.router, found, logits, values.get("attention_mask"))
            self._router_logits = []
        return self.pack(found, self._next_layout)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _block_arguments(self, values: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model passes to this block besides the hidden states. It is the same for every input of a shape,
        unless it depends on a mask or on positions."""
        hidden = values["hidden"]
        key = (hidden.shape, hidden.dtype, hidden.device)
        depends_on_input = any(name in self.layout for name in (*self.kept, "bias", "memory"))
        if not depends_on_input and self._arguments is not None and self._arguments[0] == key:
            return self._arguments[1]
        assert self.index is not None
        with torch.no_grad():
            detached = {name: value.detach() for name, value in values.items()}
            self._state.hidden = detached["hidden"]
            self._state.result = self.block_result(detached)
            try:
                call = self.run_until(self.placeholders(detached), (self.phase, self.index))
            finally:
                self._state.result = self._state.hidden = None
        args, kwargs = list(call.args_given), dict(call.kwargs_given)
        if args:
            args = args[1:]
        else:
            del kwargs["hidden_states"]
        if self.returns_bias:  # these carry gradients: pass the tensors themselves
            args[1] = values.get("bias")
            if "memory" in values:
                args[2] = values["memory"]
        found = tuple(args), kwargs
        if not depends_on_input:
            self._arguments = key, found
        return found


def _add_router_sums(router: Router, values: dict[str, Tensor], logits: Tensor, mask: Tensor | None) -> None:
    """Add the sums of one router, as transformers' load_balancing_loss_func does."""
    weights = torch.nn.functional.softmax(logits, dim=-1)
    _, selected = torch.topk(weights, router.top_k, dim=-1)
    flat = torch.ones(weights.shape[0], device=weights.device) if mask is None else mask.reshape(-1).float()
    tokens = torch.zeros(router.experts, device=weights.device).scatter_add(
        0, selected.reshape(-1), flat.repeat_interleave(router.top_k)
    )
    values["router_tokens"] = values["router_tokens"] + tokens
    values["router_probabilities"] = values["router_probabilities"] + (weights.float() * flat.unsqueeze(-1)).sum(dim=0)


def _balance_loss(router: Router, values: Mapping[str, Tensor]) -> Tensor:
    mask, hidden = values.get("attention_mask"), values["hidden"]
    rows = hidden.shape[0] * hidden.shape[1] if mask is None else mask.float().sum()
    total = rows * len(router.blocks)
    return torch.sum(values["router_tokens"] / total * (values["router_probabilities"] / total)) * router.experts
