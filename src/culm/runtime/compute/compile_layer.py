"""Compile layers with torch.compile so that recoveries stay exact.

Kernels of a compiled layer must depend on the layer and the shape of its input only, and not on the inputs that a
worker has seen before: shapes are not generalised, and the backward is compiled together with the forward, so that a
stand-in that has run a forward has both. Buffers are not donated to the backward: a recovery may run it in two halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from culm.errors import JobError

_MAX_SHAPES = 64
"""Input shapes that one layer is compiled for. Beyond them torch would run it without compiling, in other kernels."""


def compile_layer(index: int, module: nn.Module, options: bool | Mapping[str, Any]) -> None:
    """Compile the calls of a module in place. It happens at the first call with each shape (`Segment.compile_layers`
    makes one ahead of time). Layers with the same code share what is compiled.

    `options`: keyword arguments of torch.compile, or True. Raises JobError if torch refuses them.
    """
    if not options:
        return
    import torch._dynamo
    from torch._functorch import config as functorch

    _set_in_all_threads(functorch, "donated_buffer", False)
    _set_in_all_threads(functorch, "force_non_lazy_backward_lowering", True)
    _set_in_all_threads(torch._dynamo.config, "recompile_limit", _MAX_SHAPES)
    given = {} if options is True else dict(options)
    run: Any = module._call_impl

    def call(*args: Any, **named: Any) -> Any:
        """Torch does not compile functions of its own modules, such as nn.Sequential.forward, unless a function
        outside of torch calls them."""
        return run(*args, **named)

    try:
        module._compiled_call_impl = torch.compile(call, **{"dynamic": False, **given})
    except (TypeError, RuntimeError, AttributeError) as error:
        raise JobError(f"Job.compile does not fit Job.layers[{index}]: {error}") from error


def _set_in_all_threads(config: Any, name: str, value: bool | int) -> None:
    """Set a setting of torch for the process. torch keeps what is assigned by thread, and layers are compiled and run
    in several; the backward of a GPU runs in threads of autograd."""
    config._config[name].default = value
    setattr(config, name, value)
