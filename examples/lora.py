"""Train a LoRA adapter: the model is frozen, and checkpoints and exports have the adapter alone.

    culm run examples/lora.py --pipelines 2 --stages 2 --steps 50 --out runs/lora --kill "node=1 step=5"
    culm export runs/lora adapter --hf         # peft.PeftModel.from_pretrained(model, "adapter") loads it

A tiny Llama with random weights stands for the pretrained one. With a folder, culm.hf.parts(folder,
adapter=LoraConfig(...)) adds the adapter to weights that each node reads for its own layers only.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import culm
import culm.hf
from culm.models import Characters

RANK = 4


def model(vocab: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **sizes))


def job() -> culm.Job:
    data = Characters(length=32)  # (ids, ids shifted by one)
    adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return culm.Job(
        **culm.hf.parts(get_peft_model(model(data.vocab), adapter)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=data,
        global_batch=16,
        micro_batch=4,
        steps=50,
    )
