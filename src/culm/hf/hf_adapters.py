"""Adapters of `peft` (LoRA and others that add modules): what is needed to save them in peft's own format."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from culm.errors import JobError

ADAPTER_NAMES = "culm_adapter.json"
"""File: saved name -> name in the model, of each tensor of the adapter."""
_PREFIX = "base_model.model."
_ADDED_BY_PEFT = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)\.")


def add_adapter(model: Any, config: Any) -> Any:
    """The peft model of a skeleton. Raises JobError for an adapter whose initial values depend on the weights."""
    from peft import LoraConfig, PeftConfig, get_peft_model

    if not isinstance(config, PeftConfig):
        raise JobError(f"adapter is a {type(config).__name__}: use a peft.LoraConfig")
    needs_weights = getattr(config, "use_dora", False) or getattr(config, "trainable_token_indices", None)
    if not isinstance(config, LoraConfig) or config.init_lora_weights is not True or needs_weights:
        raise JobError(
            f"adapter is a {type(config).__name__} whose first values need the weights: load the model and pass "
            "culm.hf.parts(peft.get_peft_model(model, config))"
        )
    return get_peft_model(model, config)


def adapter_files(model: Any) -> dict[str, bytes]:
    """The adapter's config, and the names of its tensors, as files. Raises JobError for an adapter that does more than
    adding modules."""
    from peft import PeftType, get_peft_model_state_dict

    adapter = model.active_adapter
    config = model.peft_config[adapter]
    if config.is_prompt_learning:
        raise JobError(
            f"the adapter is a {type(config).__name__}, which changes the inputs of the model and not its modules: it "
            "cannot be cut into layers; use LoRA or another adapter that adds modules"
        )
    if config.peft_type == PeftType.ADALORA:
        raise JobError(
            "the adapter is an AdaLoraConfig, which changes the ranks of all layers together between steps: no single "
            "layer can do that; use LoRA"
        )
    names = list(model.state_dict())
    markers = {name: torch.tensor(number) for number, name in enumerate(names)}
    saved = get_peft_model_state_dict(model, state_dict=markers, adapter_name=adapter, save_embedding_layers=False)
    found = {key: names[int(value)].removeprefix(_PREFIX) for key, value in saved.items()}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        text = (Path(folder) / "adapter_config.json").read_bytes()
    return {"adapter_config.json": text, ADAPTER_NAMES: json.dumps(found).encode()}


def name_before_adapter(name: str) -> str:
    """The name that a tensor had before an adapter was added: of a layer that is adapted, of a module that is kept
    beside its trained copy (`modules_to_save`), or of that copy."""
    return _ADDED_BY_PEFT.sub(".", name)


def reset_adapter(module: Any) -> None:
    """Initialise the adapter of a module as peft does, if it has one."""
    if hasattr(module, "reset_lora_parameters"):
        for name in module.active_adapters:
            module.reset_lora_parameters(name, True)
