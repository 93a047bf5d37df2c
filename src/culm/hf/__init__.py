"""Train Hugging Face models: `culm.Job(**culm.hf.parts(model_or_path), optimizer=..., data=..., ...)`.

Needs the extra `hf` (transformers, peft, datasets, tokenizers).
"""

from culm.hf.hf_export import export_hf
from culm.hf.hf_parts import parts
from culm.hf.instruction_data import Instructions, instructions

__all__ = ["Instructions", "export_hf", "instructions", "parts"]
