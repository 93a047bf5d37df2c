"""Train the ResNet of the papers, with fewer and narrower blocks, on images; batch norm and a metric.

    culm run examples/resnet_images.py --pipelines 2 --stages 2 --steps 50 --out runs/images --kill "node=1 step=5"

`culm.models.paper_job("resnet-152")` is the whole one, with the batch sizes of the papers. Replace the data by any
map-style data set of (image, label), such as torchvision.datasets.ImageFolder.
"""

import torch
from torch import Tensor, nn

import culm
from culm.models import RandomImages, resnet152


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def job() -> culm.Job:
    return culm.Job(
        layers=resnet152(width=8, depths=(1, 2, 1), classes=4),  # ImageStem, 4 Bottlenecks, ClassifyImage
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        data=RandomImages(count=512, size=32, classes=4),
        global_batch=16,
        micro_batch=4,
        steps=50,
        metrics={"accuracy": accuracy},
        evaluate=RandomImages(count=32, seed=1, size=32, classes=4),
        evaluate_every=10,
    )
