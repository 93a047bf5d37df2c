"""Models as lists of layers, and data to train them on: for examples, tests and benches."""

from culm.models.data import Characters, RandomImages, RandomTokens
from culm.models.gpt import SIZES, GPTConfig, gpt, gpt_config, gpt_loss, gpt_tied
from culm.models.resnet import resnet

__all__ = [
    "SIZES",
    "Characters",
    "GPTConfig",
    "RandomImages",
    "RandomTokens",
    "gpt",
    "gpt_config",
    "gpt_loss",
    "gpt_tied",
    "resnet",
]
