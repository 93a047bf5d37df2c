"""Fine-tune a Llama on instructions; only the answers count in the loss.

    culm run examples/finetune_llama.py --pipelines 2 --stages 2 --steps 50 --out runs/llama --kill "node=3 step=5"
    culm export runs/llama llama --hf          # a folder that AutoModelForCausalLM.from_pretrained loads

Without the variable LLAMA it is a tiny Llama with random weights and a tokenizer of letters: nothing is downloaded.
LLAMA=folder names a folder that save_pretrained wrote; each node reads the weights of its own layers only.
"""

import os
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import culm
import culm.hf

FOLDER = os.environ.get("LLAMA")


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each letter."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *string.ascii_lowercase, " ", "?"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def tiny_llama(vocab: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def job() -> culm.Job:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER) if FOLDER else letters()
    return culm.Job(
        **culm.hf.parts(FOLDER or tiny_llama(len(tokenizer)), tokenizer=tokenizer),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        data=culm.hf.instructions(Path(__file__).parent / "instructions.jsonl", tokenizer, length=32),
        global_batch=8,
        micro_batch=2,
        steps=50,
    )
