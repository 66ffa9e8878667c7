"""ResNet-50 v1.5 (He et al. 2015, the stride in the 3 × 3 convolution) on images of bytes, raw or as JPEG.

Records are `tf.train.Example` with `image` and `label`: the pixels of a square image, channels first, or a JPEG file.
"""

import io
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from elasticdl.api.examples import parse_examples

from .step_times import watched

NUM_CLASSES = 1000
SIZE = 224  # of a crop
MEAN = (123.675, 116.28, 103.53)  # of ImageNet's training images, by channel
DEVIATION = (58.395, 57.12, 57.375)
EXPANSION = 4


class Bottleneck(nn.Module):  # type: ignore[misc]
    """Three convolutions beside a shortcut, which is a convolution itself where the shape changes."""

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        num_outputs = EXPANSION * width
        self.reduce = nn.Conv2d(num_inputs, width, 1, bias=False)
        self.reduce_norm = nn.BatchNorm2d(width)
        self.spatial = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.spatial_norm = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, num_outputs, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(num_outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or num_inputs != num_outputs:
            projection = nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(num_outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.reduce_norm(self.reduce(x)))
        inner = functional.relu(self.spatial_norm(self.spatial(inner)))
        return functional.relu(self.expand_norm(self.expand(inner)) + self.shortcut(x))


class ResNet(nn.Module):  # type: ignore[misc]
    """Takes images [batch, 3, side, side] of pixels from 0 to 255; returns logits [batch, 1000]."""

    def __init__(self, num_blocks: Sequence[int], width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN).reshape(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(DEVIATION).reshape(3, 1, 1), persistent=False)
        self.stem = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        blocks = []
        size = width
        for stage, count in enumerate(num_blocks):
            for k in range(count):
                blocks.append(Bottleneck(size, width << stage, 2 if stage and not k else 1))
                size = EXPANSION * width << stage
        self.blocks = nn.Sequential(*blocks)
        self.logits = nn.Linear(size, NUM_CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = (image - self.mean) / self.deviation
        x = functional.relu(self.stem_norm(self.stem(x)))
        x = functional.max_pool2d(x, 3, 2, padding=1)
        return self.logits(self.blocks(x).mean((2, 3)))


def custom_model() -> nn.Module:
    """ResNet-50, 25,557,032 parameters."""
    return ResNet((3, 4, 6, 3), 64)


def small_model() -> nn.Module:
    """Fourteen layers of an eighth of the width, for machines without a GPU."""
    return ResNet((1, 1, 1, 1), 8)


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(predictions, labels)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return watched(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4))


def feed(records: list[bytes], mode: str, metadata: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw pixels, each image copied once, to its place in a random order."""
    columns = parse_examples(records, {"image": (), "label": ()})
    images, labels = columns["image"], columns["label"]
    order = np.random.permutation(len(labels))
    side = round((len(images[0]) / 3) ** 0.5)
    pixels = np.empty((len(labels), 3 * side * side), np.uint8)
    for k, source in enumerate(order):
        pixels[k] = np.frombuffer(images[source], np.uint8)
    return torch.from_numpy(pixels.reshape(-1, 3, side, side)), torch.from_numpy(labels[order])


def feed_jpeg(records: list[bytes], mode: str, metadata: object) -> tuple[torch.Tensor, torch.Tensor]:
    """JPEG files, each decoded and cropped at random."""
    columns = parse_examples(records, {"image": (), "label": ()})
    images = torch.stack([cropped(file) for file in columns["image"]])
    return images.permute(0, 3, 1, 2), torch.from_numpy(columns["label"])


def cropped(file: bytes) -> torch.Tensor:
    """Return a random part of `SIZE` × `SIZE` pixels of a JPEG file, channels last."""
    from PIL import Image

    with Image.open(io.BytesIO(file)) as image:
        pixels = np.asarray(image.convert("RGB"))
    top, left = (int(torch.randint(0, extent - SIZE + 1, ())) for extent in pixels.shape[:2])
    return torch.from_numpy(pixels[top : top + SIZE, left : left + SIZE].copy())
