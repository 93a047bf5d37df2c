"""Images: a folder with one subfolder of image files per class."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from culm.errors import JobError

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of the colour channels of ImageNet."""


class Images:
    """The images of FOLDER/CLASS/*.jpg (png, webp, ...) as (tensor, class number); classes in alphabetical order.

    An image is scaled so that its short side has `size` pixels, cropped to its centre and normalised by the means and
    deviations of ImageNet: a float tensor (3, size, size). `transform` replaces this: it takes the RGB image of
    Pillow, and may draw random numbers, which are seeded by (seed, step, micro-batch). Raises JobError if the folder
    has no class with an image, or if Pillow is not installed.
    """

    def __init__(
        self, folder: str | PathLike[str], size: int = 224, *, transform: Callable[[Any], Any] | None = None
    ) -> None:
        _import_pillow()
        root = Path(fspath(folder))
        if not root.is_dir():
            raise JobError(f"the image folder {str(root)!r} does not exist on this machine: name a folder of classes")
        self.classes = tuple(sorted(each.name for each in root.iterdir() if each.is_dir()))
        """Names of the classes, by number."""
        self._size, self._transform = size, transform
        self._items = [
            (str(file), number)
            for number, name in enumerate(self.classes)
            for file in sorted((root / name).rglob("*"))
            if file.suffix.lower() in _SUFFIXES
        ]
        if not self._items:
            raise JobError(f"the image folder {str(root)!r} has no image: put images into {root}/CLASS/")

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self._items[index]
        image_module = _import_pillow()
        try:
            with image_module.open(path) as opened:
                image = opened.convert("RGB")
        except OSError as error:
            raise JobError(f"the image {path} cannot be read: {error}") from None
        return (self._transform or self._scale)(image), label

    def _scale(self, image: Any) -> Tensor:
        import torch

        width, height = image.size
        factor = self._size / min(width, height)
        scaled = image.resize((max(self._size, round(width * factor)), max(self._size, round(height * factor))))
        left, top = (scaled.size[0] - self._size) // 2, (scaled.size[1] - self._size) // 2
        pixels = np.asarray(scaled.crop((left, top, left + self._size, top + self._size)), dtype=np.float32) / 255
        return (
            torch.from_numpy((pixels - np.asarray(_MEAN, np.float32)) / np.asarray(_DEVIATION, np.float32))
            .permute(2, 0, 1)
            .contiguous()
        )


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise JobError("culm.data.Images needs the package Pillow: install it with pip install pillow") from None
    return Image
