"""A node that loads its layers of a large model from files reads its share, and allocates little more."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.real
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc/self/clear_refs")
def test_no_node_reads_or_allocates_more_than_its_share_plus_ten_percent() -> None:
    """Four nodes, with two blocks of 2.4 million parameters each; two of them also have an embedding or a head. A node
    that has loaded its layers has weights and sums of gradients; in a step also the gradients of a micro-batch. SGD has
    no state. `culm bench models --rows memory` measures a model of 1.1 billion parameters."""
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    from benchmarks.models.llama_spec import LlamaSpec
    from benchmarks.models.node_memory_bench import measure

    spec = LlamaSpec(name="small", width=384, blocks=8, heads=4, inner=1536, vocab=1000, tokens=8)
    for node in measure(spec):
        assert node["read"] == node["weights"]
        assert node["loading"] <= 1.1 * 2 * node["weights"], node
        assert node["training"] <= 1.1 * 3 * node["weights"], node
