"""`culm.hf.parts`: the fields of a Job from a Hugging Face model."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping, Sequence, Set
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from culm.errors import JobError
from culm.hf.hf_adapters import ADAPTER_NAMES, adapter_files, add_adapter
from culm.hf.hf_batches import Collate
from culm.hf.hf_layers import HfModel, Router
from culm.hf.hf_losses import Classification, CrossEntropy
from culm.hf.hf_skeleton import find_stacks, make_skeleton, parameters_on_meta, trace_phases
from culm.hf.hf_weights import MemoryWeights, NoWeights, WeightSource, open_folder
from culm.initial_location import cached_model

_log = logging.getLogger("culm.hf")

Task: TypeAlias = Literal[
    "causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification", "token-classification", "image-classification"
]
_AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "image-classification": "AutoModelForImageClassification",
}
_CLASS_ENDINGS = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForConditionalGeneration": "seq2seq-lm",
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
}
_ONE_LABEL = "single_label_classification"
_KEPT = ("attention_mask", "position_ids", "decoder_input_ids", "decoder_attention_mask")
"""Inputs that blocks need, too."""


def parts(
    model_or_path: Any,
    task: Task = "causal-lm",
    *,
    inputs: str | Sequence[str] = (),
    freeze: str | Sequence[str] = (),
    tokenizer: Any = None,
    adapter: Any = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Job fields of a `transformers` model: layers, loss, tied, collate, files. For a `peft` model also
    save_frozen=False.

    `model_or_path`: a model, whose class decides the task; a folder that `save_pretrained` wrote, whose weights each
    node reads for its own layers only; or a config, for random weights. `inputs`: names of the tensors of an item, in
    order; default ("input_ids",), or ("pixel_values",) for images. `freeze`: beginnings of the names of parameters that
    are not trained. `tokenizer`: saved with exports; default: that of the folder. `adapter`: a LoraConfig of
    `peft`, to add to the model. `dtype`: of weights from a folder or a config.

    Raises JobError, which names the module, if the model cannot be cut into layers.
    """
    _import_transformers()
    with_adapter = hasattr(model_or_path, "peft_config")
    model = model_or_path.get_base_model() if with_adapter else model_or_path
    if task not in _AUTO_CLASSES:
        raise JobError(f"culm.hf.parts got the task {task!r}: use one of {', '.join(_AUTO_CLASSES)}")
    folder = _find_folder(model) if isinstance(model, str | Path) else None
    skeleton, source = _open_model(model, folder, task, dtype)
    task = task if folder or not isinstance(model, nn.Module) else _task_of(model)
    adapters = adapter_files(model_or_path) if with_adapter else {}
    if adapter is not None:
        wrapped = add_adapter(skeleton, adapter)
        adapters, skeleton = adapter_files(wrapped), make_skeleton(wrapped.get_base_model())
    _freeze(skeleton, freeze)
    names = _input_names(skeleton, inputs)
    found = _cut(skeleton, source, names, task)
    new = json.loads(adapters[ADAPTER_NAMES]).values() if adapter is not None else ()
    _report_missing(found, folder, frozenset(new))
    fields: dict[str, Any] = {
        "layers": found.layers,
        "loss": _loss(skeleton, task, found.router),
        "tied": _tied(found),
        "collate": _collate(skeleton, task, names),
        "files": _files(skeleton, folder, tokenizer, adapters),
    }
    return fields | ({"save_frozen": False} if adapters else {})


def _import_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise JobError("culm.hf needs transformers: install it with pip install 'culm[hf]'") from error


def _find_folder(given: str | Path) -> Path:
    """A folder with a model, or the one of "org/name" in the local cache of Hugging Face."""
    folder = Path(given).expanduser()
    if not (folder / "config.json").is_file() and not folder.exists():
        folder = cached_model(str(given)) or folder
    if not (folder / "config.json").is_file():
        what = f"no config.json in {str(given)!r}" if folder.exists() else f"no folder {str(given)!r} on this machine"
        raise JobError(
            f"there is {what}, and no such model in the local cache of Hugging Face: give a folder that "
            "save_pretrained wrote, or run 'hf download' first (culm.hf downloads nothing)"
        )
    return folder


def _open_model(model: Any, folder: Path | None, task: str, dtype: torch.dtype) -> tuple[Any, WeightSource]:
    """(skeleton, source of its weights)."""
    from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

    if isinstance(model, PreTrainedModel):
        absent = next((name for name, value in model.state_dict().items() if value.is_meta), None)
        if absent is not None:
            raise JobError(
                f"the {type(model).__name__} has {absent!r} on the meta device, without values: pass its config, or "
                "the folder with its weights"
            )
        tensors = {name: value.detach().cpu() for name, value in model.state_dict(keep_vars=True).items()}
        return make_skeleton(model), MemoryWeights(tensors)
    if folder is not None:
        try:
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise JobError(f"the config.json in {str(folder)!r} cannot be used: {str(error).splitlines()[0]}") from None
        skeleton = _empty_model(config, task, dtype)
        return skeleton, open_folder(folder, skeleton)
    if isinstance(model, PreTrainedConfig):
        return _empty_model(model, task, dtype), NoWeights()
    if isinstance(model, type):
        raise JobError(
            f"culm.hf.parts got the class {model.__name__}: pass an object, as in {model.__name__}(...), or a folder "
            "that save_pretrained wrote"
        )
    raise JobError(
        f"culm.hf.parts got a {type(model).__name__}: pass a transformers model, a folder that save_pretrained wrote, "
        "or a config"
    )


def _empty_model(config: Any, task: str, dtype: torch.dtype) -> Any:
    """A model without memory for its parameters."""
    import transformers
    from transformers.initialization import no_init_weights

    auto = getattr(transformers, _AUTO_CLASSES[task])
    try:
        with no_init_weights(), parameters_on_meta():
            model = auto.from_config(config, dtype=dtype)
            model.tie_weights()
    except ValueError as error:
        text = str(error).splitlines()[0].split(" for this kind of AutoModel")[0]
        raise JobError(f"{type(config).__name__} is not a model for {task!r}: {text}") from None
    return make_skeleton(model)


def _task_of(model: nn.Module) -> Any:
    name = type(model).__name__
    found = next((task for ending, task in _CLASS_ENDINGS.items() if name.endswith(ending)), None)
    if found is None:
        raise JobError(
            f"{name} has no head that culm.hf knows a loss for: use a class that ends in "
            f"{', '.join(_CLASS_ENDINGS)}, or pass Job.layers and Job.loss yourself"
        )
    return found


def _freeze(skeleton: nn.Module, given: str | Sequence[str]) -> None:
    beginnings = (given,) if isinstance(given, str) else given
    names = [name for name, _ in skeleton.named_parameters()]
    for beginning in beginnings:
        matched = [n for n in names if n == beginning or n.startswith(f"{beginning}.")]
        if not matched:
            parents = {".".join(n.split(".")[:k]) for n in names for k in range(1, n.count(".") + 2)}
            close = get_close_matches(beginning, sorted(parents), n=3) or sorted(parents, key=len)[:3]
            raise JobError(f"freeze has {beginning!r}, which the model does not have: did you mean {', '.join(close)}?")
        for name in matched:
            skeleton.get_parameter(name).requires_grad_(False)


def _input_names(skeleton: Any, inputs: str | Sequence[str]) -> tuple[str, ...]:
    names = ((inputs,) if isinstance(inputs, str) else tuple(inputs)) or (skeleton.main_input_name,)
    known = tuple(inspect.signature(skeleton.forward).parameters)
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1) or [skeleton.main_input_name]
            raise JobError(
                f"inputs has {name!r}, which {type(skeleton).__name__} does not take: did you mean {close[0]!r}?"
            )
    if skeleton.main_input_name not in names:
        raise JobError(f"inputs has {', '.join(names)} and not {skeleton.main_input_name!r}: add it")
    if skeleton.config.is_encoder_decoder and "decoder_input_ids" not in names:
        names = (*names, "decoder_input_ids")
    return names


def _cut(skeleton: Any, source: WeightSource, inputs: tuple[str, ...], task: str) -> HfModel:
    _check_config(skeleton)
    stacks = find_stacks(skeleton)
    encoder_decoder = bool(skeleton.config.is_encoder_decoder)
    returns_bias = hasattr(skeleton.config, "relative_attention_num_buckets")
    if encoder_decoder and not returns_bias:
        raise JobError(
            f"{type(skeleton).__name__} is an encoder-decoder of another kind than T5: only T5 and models with its "
            "blocks can be cut; pass Job.layers as a list of your own modules instead"
        )
    if returns_bias and not encoder_decoder:
        raise JobError(
            f"the blocks of {type(skeleton).__name__} share a position bias, and it is not a T5: pass Job.layers as a "
            "list of your own modules instead"
        )
    plan = trace_phases(
        skeleton,
        stacks,
        _example_inputs(skeleton, inputs),
        (lambda hidden: (hidden, None, None)) if returns_bias else None,
    )
    kept = [name for name in inputs if name in _KEPT]
    if task == "sequence-classification" and hasattr(skeleton, "score"):
        kept.append("input_ids")  # the head looks for the last token that is no padding
    return HfModel(
        skeleton=skeleton,
        plan=plan,
        source=source,
        inputs=inputs,
        kept=tuple(kept),
        router=_find_router(skeleton, stacks[0].path),
        aliases=_aliases(skeleton),
        returns_bias=returns_bias,
        encoder_decoder=encoder_decoder,
    )


def _check_config(skeleton: Any) -> None:
    """Raise JobError for settings that no layer can follow by itself: whether a block runs at all, and rotary
    frequencies that depend on the inputs that came before."""
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(skeleton.config, name, 0):
            raise JobError(
                f"config.{name} is {getattr(skeleton.config, name)}: blocks that are skipped at random cannot be "
                "layers of a pipeline; set it to 0"
            )
    for module in skeleton.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if isinstance(kind, str) and "dynamic" in kind:
                raise JobError(
                    f"config.rope_parameters has rope_type={kind!r}, with which the rotary embedding remembers the "
                    "longest sequence so far, and every worker sees other sequences: use 'yarn', 'linear' or 'longrope'"
                )


def _example_inputs(skeleton: Any, inputs: tuple[str, ...]) -> dict[str, Any]:
    config = skeleton.config
    if "pixel_values" in inputs:
        config = getattr(config, "vision_config", config)
        side = getattr(config, "image_size", 224)
        size = side if isinstance(side, list | tuple) else (side, side)
        return {"pixel_values": torch.zeros(2, getattr(config, "num_channels", 3), *size)}
    options = {"output_router_logits": False} if hasattr(config, "output_router_logits") else {}
    return {name: torch.ones(2, 4, dtype=torch.long) for name in inputs} | options


def _find_router(skeleton: Any, path: str) -> Router | None:
    config = skeleton.config
    if not getattr(config, "output_router_logits", False):
        return None
    base = getattr(skeleton, skeleton.base_model_prefix, skeleton)
    recorder = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", recorder)
    if not isinstance(kind, type):
        raise JobError(
            f"{type(skeleton).__name__} does not say which module is its router: set config.output_router_logits to "
            "False to train without the auxiliary loss"
        )
    blocks = skeleton.get_submodule(path)
    having = [n for n, block in enumerate(blocks) if any(isinstance(m, kind) for m in block.modules())]
    experts = getattr(skeleton, "num_experts", None) or getattr(config, "num_local_experts", None) or config.num_experts
    return Router(kind, getattr(recorder, "index", 0) or 0, experts, config.num_experts_per_tok, tuple(having))


def _aliases(skeleton: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}


def _tied(model: HfModel) -> list[tuple[str, ...]]:
    """Job.tied: parameters that several layers have."""
    places: dict[str, str] = {}
    for index, factory in enumerate(model.layers):
        seen: set[tuple[str, ...]] = set()
        for name in factory.tensor_names():
            group = model.aliases.get(name)
            if group is None or group not in seen:  # a layer has it once, under its first name there
                places[name] = f"{index}.{name}"
            seen |= {group} if group else set()
    groups = {group: [places[name] for name in group if name in places] for group in model.aliases.values()}
    return [tuple(names) for names in groups.values() if len(names) > 1]


def _report_missing(model: HfModel, folder: Path | None, new: Set[str]) -> None:
    """`new`: tensors of an adapter that was added, which no folder has."""
    if folder is None:
        return
    for factory in model.layers:
        for name in factory.tensor_names():
            if name not in new and model.stored_name(name) is None:
                _log.warning("%s is not in %s: it is newly initialised", name, folder)
    for name in getattr(model.source, "unused", ()):
        _log.warning("%s in %s is not used: the model has no such tensor", name, folder)


def _loss(skeleton: Any, task: str, router: Router | None) -> Any:
    if task in ("sequence-classification", "image-classification"):
        return Classification(skeleton.config.num_labels, getattr(skeleton.config, "problem_type", None))
    return CrossEntropy(skeleton.config.router_aux_loss_coef if router else 0.0)


def _collate(skeleton: Any, task: str, inputs: tuple[str, ...]) -> Collate:
    config = skeleton.config
    pad = getattr(config, "pad_token_id", None) or 0
    start = None
    if config.is_encoder_decoder:
        start = getattr(config, "decoder_start_token_id", None)
        start = pad if start is None else start
    vocab = getattr(config, "vocab_size", None)
    classes = vocab
    if task.endswith("classification"):
        classes = config.num_labels if config.num_labels > 1 and config.problem_type in (None, _ONE_LABEL) else None
    return Collate(inputs, pad, vocab, classes, task == "causal-lm", start)


def _files(skeleton: Any, folder: Path | None, tokenizer: Any, adapters: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files that an export needs besides the weights: config, tokenizer, names of shared tensors."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        config = skeleton.config.__class__.from_dict(skeleton.config.to_dict())
        config.architectures = [type(skeleton).__name__]
        config.save_pretrained(scratch)
        if getattr(skeleton, "generation_config", None) is not None and skeleton.can_generate():
            skeleton.generation_config.save_pretrained(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        found = {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir()) if path.is_file()}
    if folder is not None and tokenizer is None:
        known = ("token", "vocab", "merges", "special", "added", "chat_template", "preprocessor", "processor", "spiece")
        found |= {
            path.name: path.read_bytes()
            for path in sorted(folder.iterdir())
            if path.is_file() and path.name.startswith(known)
        }
    aliases = sorted({tuple(group) for group in _aliases(skeleton).values()})
    return {**found, "culm_hf.json": json.dumps({"aliases": aliases}).encode(), **adapters}
