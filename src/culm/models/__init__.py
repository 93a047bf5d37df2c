"""Models as lists of layers, and datasets to train them on, for examples, tests and benchmarks."""

from culm.models.bert import BertConfig, bert, bert_loss, bert_tied
from culm.models.convnets import alexnet, resnet152, vgg19
from culm.models.datasets import Characters, MaskedTokens, RandomImages, RandomTokens, Translations
from culm.models.gnmt import GnmtConfig, gnmt, gnmt_loss, gnmt_tied
from culm.models.gpt import SIZES, GPTConfig, gpt, gpt_config, gpt_loss, gpt_tied
from culm.models.paper_models import PAPER_MODELS, PaperModel, paper_job
from culm.models.resnet import resnet
from culm.models.vocabulary_loss import chunked_cross_entropy

__all__ = [
    "PAPER_MODELS",
    "SIZES",
    "BertConfig",
    "Characters",
    "GPTConfig",
    "GnmtConfig",
    "MaskedTokens",
    "PaperModel",
    "RandomImages",
    "RandomTokens",
    "Translations",
    "alexnet",
    "bert",
    "bert_loss",
    "bert_tied",
    "chunked_cross_entropy",
    "gnmt",
    "gnmt_loss",
    "gnmt_tied",
    "gpt",
    "gpt_config",
    "gpt_loss",
    "gpt_tied",
    "paper_job",
    "resnet",
    "resnet152",
    "vgg19",
]
