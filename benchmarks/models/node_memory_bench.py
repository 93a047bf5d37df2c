"""`culm bench models --rows memory`: what each of four nodes reads and allocates when it loads its layers of a Llama of
1.1 billion parameters from safetensors files and trains one step with SGD.

The share of a node is the weights of its layers and the sums of their gradients. Nodes are measured one after another,
each in a process of its own, so that the machine needs the memory of one; a process first trains a tiny model, and what
it has then (interpreter, torch, code) is taken off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from benchmarks.common.gpt_job import even_cut
from benchmarks.models.llama_spec import LlamaSpec
from rich.table import Table

import culm
import culm.hf
from culm.errors import RunError
from culm.hf.hf_weights import WeightSource
from culm.runtime.compute.model_state import ModelState
from culm.runtime.compute.segment import Segment
from culm.runtime.compute.weight_update import finalize_gradients
from culm.text_format import format_bytes

STAGES = 4
ALLOWED = 1.1
"""The peak of a node, as a multiple of its share."""
LLAMA_1B = LlamaSpec(name="llama 1.1 B", width=2048, blocks=22, heads=32, kv_heads=4, inner=5632, vocab=32000, tokens=8)
LLAMA_100M = LlamaSpec(name="llama 100 M", width=640, blocks=16, heads=10, inner=2048, vocab=8192, tokens=8)
_TINY = LlamaSpec(name="tiny", width=32, blocks=2, heads=2, inner=64, vocab=64, tokens=8)
_SHARD_BYTES = 1 << 30


class NodeMemory(TypedDict):
    """A node, in bytes."""

    weights: int
    read: int
    """Of the tensors that it read from files."""
    loading: int
    """Peak of its resident memory, with its layers loaded."""
    training: int
    """The same after a step."""


class NodeMemoryResult(TypedDict):
    """The JSON of the row."""

    model: str
    parameters: int
    nodes: list[NodeMemory]
    worst_read: float
    """The most that a node read, as a multiple of its weights."""
    worst_peak: float
    """The largest peak of a step, as a multiple of weights and gradient sums."""
    worst_loading: float
    """The same with the layers loaded, before the step."""
    within_limit: bool


def run(*, quick: bool = False, progress: Callable[[str], object] = lambda _: None) -> NodeMemoryResult:
    """Measure every node. Raises RunError if that could take the memory that other processes of the machine use."""
    spec = LLAMA_100M if quick else LLAMA_1B
    needed = 2 * 2 * max(stage_weights(spec))
    if needed > (available := _available_bytes()) // 2:
        raise RunError(
            f"a node of {spec.name} may take {format_bytes(needed)}, and {format_bytes(available)} are available here: "
            "the bench takes at most half of that"
        )
    nodes = measure(spec)
    for stage, node in enumerate(nodes):
        progress(
            f"{spec.name}, stage {stage}: {node['training'] / 1e6:.0f} MB for {node['weights'] / 1e6:.0f} MB of weights"
        )
    worst_read = max(node["read"] / node["weights"] for node in nodes)
    worst_peak = max(node["training"] / (2 * node["weights"]) for node in nodes)
    return NodeMemoryResult(
        model=spec.name,
        parameters=sum(stage_weights(spec)) // 4,
        nodes=nodes,
        worst_read=worst_read,
        worst_loading=max(node["loading"] / (2 * node["weights"]) for node in nodes),
        worst_peak=worst_peak,
        within_limit=max(worst_read, worst_peak) <= ALLOWED,
    )


def measure(spec: LlamaSpec) -> list[NodeMemory]:
    """What the node of each stage reads and allocates."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, each in (("tiny", _TINY), ("model", spec)):
            (Path(scratch) / name).mkdir()
            write_zeros(each, Path(scratch) / name)
        cuts = zip(stage_weights(spec), _cut(spec), strict=True)
        return [_measure_node(Path(scratch), layers, weights) for weights, layers in cuts]


def _measure_node(scratch: Path, layers: range, weights: int) -> NodeMemory:
    command = [sys.executable, "-m", __name__, str(scratch), str(layers.start), str(layers.stop)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RunError(f"the process of a node failed: {done.stderr}")
    found: dict[str, int] = json.loads(done.stdout)
    return NodeMemory(weights=weights, read=found["read"], loading=found["loading"], training=found["training"])


@dataclass(frozen=True)
class CountingWeights:
    """A source that counts what is read from it."""

    source: WeightSource
    sizes: list[int]

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        found = self.source.read(names)
        self.sizes.extend(value.nbytes for value in found.values())
        return found


def train_one_step(folder: Path, layers: Sequence[int] | None = None) -> dict[str, int]:
    """Load layers of a model folder (default: all) as a worker does, and train one step."""
    read: list[int] = []
    fields = culm.hf.parts(folder)
    model = fields["layers"][0].model
    ids = torch.arange(8)
    job = culm.Job(
        **{**fields, "layers": replace(model, source=CountingWeights(model.source, read)).layers},
        optimizer=_sgd,
        data=[(ids, ids)],
        global_batch=1,
        micro_batch=1,
        steps=1,
    )
    layers = range(len(job.layers)) if layers is None else layers
    state = ModelState(job, layers)
    loading = _status("VmHWM")
    width = model.skeleton.config.hidden_size
    segment = Segment(job, state, layers)
    inputs = ids[None] if layers[0] == 0 else torch.zeros(1, len(ids), width, requires_grad=True)
    outputs, _ = segment.forward(0, 0, (inputs,), ids[None])
    segment.backward(0, 0, tuple(map(torch.ones_like, outputs)))
    for layer in state.layers.values():
        layer.accumulator.collect_grads()
    finalize_gradients(state.layers.values(), 1.0)
    state.step(0)
    return {"read": sum(read), "loading": loading, "training": _status("VmHWM")}


def stage_weights(spec: LlamaSpec) -> list[int]:
    """Bytes of the weights of each stage."""
    sizes = {name: 4 * value.numel() for name, value in _skeleton(spec).state_dict().items()}
    return [sum(sizes[name] for name in names) for names in _stage_names(spec)]


def write_zeros(spec: LlamaSpec, folder: Path) -> None:
    """A model folder, as `save_pretrained` writes it, whose weights are zeros: files with holes, which take no time."""
    spec.config().save_pretrained(folder)
    tensors = {name: value.shape for name, value in _skeleton(spec).state_dict().items()}
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, shape in tensors.items():
        if size and size + 4 * shape.numel() > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = {"dtype": "F32", "shape": [*shape], "data_offsets": [size, size + 4 * shape.numel()]}
        size += 4 * shape.numel()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        path = folder / f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        header = json.dumps(shard).encode()
        header += b" " * (-len(header) % 8)
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + max(entry["data_offsets"][1] for entry in shard.values()))
        weight_map |= dict.fromkeys(shard, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def render_table(result: NodeMemoryResult) -> Table:
    """A row for each node."""
    table = Table(title=f"{result['model']}, {result['parameters'] / 1e9:.2f} B parameters, {STAGES} nodes, fp32, SGD")
    for name in ("stage", "weights", "read", "peak loading", "peak of a step", "of weights and sums"):
        table.add_column(name, justify="right")
    for stage, node in enumerate(result["nodes"]):
        sizes = (node["weights"], node["read"], node["loading"], node["training"])
        table.add_row(str(stage), *(f"{size / 1e6:.0f} MB" for size in sizes), f"{node['training'] / 2 / sizes[0]:.3f}")
    return table


def _sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _skeleton(spec: LlamaSpec) -> Any:
    return culm.hf.parts(spec.config())["layers"][0].model.skeleton


def _cut(spec: LlamaSpec) -> Sequence[range]:
    return even_cut(spec.blocks + 2, STAGES)


def _stage_names(spec: LlamaSpec) -> list[list[str]]:
    layers = culm.hf.parts(spec.config())["layers"]
    return [[name for number in span for name in layers[number].tensor_names()] for span in _cut(spec)]


def _status(field: str) -> int:
    """A field of this process's status, in bytes."""
    return _kilobytes(Path("/proc/self/status"), field)


def _available_bytes() -> int:
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable")


def _kilobytes(file: Path, field: str) -> int:
    line = next(line for line in file.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def _main(scratch: str, first: str, last: str) -> None:
    torch.set_num_threads(1)
    train_one_step(Path(scratch) / "tiny")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    found = train_one_step(Path(scratch) / "model", range(int(first), int(last)))
    print(json.dumps({**found, "loading": found["loading"] - before, "training": found["training"] - before}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
