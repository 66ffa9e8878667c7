"""CIFAR-10 with PyTorch: ResNet-20 (He et al. 2015, arXiv:1512.03385, section 4.2).

    elasticdl train --model_def=cifar10.resnet20_pytorch.custom_model --distribution_strategy=AllReduceStrategy …

Records are `tf.train.Example` with `image` (3072 bytes, channels first, as in CIFAR's python batches) and `label`
(int64), as made by `scripts/gen_dataset.py cifar10`.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from elasticdl.api.examples import parse_examples

NUM_CLASSES = 10
MEAN = (125.3, 123.0, 113.9)  # of CIFAR-10's training images, by channel
DEVIATION = (63.0, 62.1, 66.7)
PADDING = 4


class Block(nn.Module):  # type: ignore[misc]
    """Two convolutions beside a shortcut; where the size changes, the shortcut is cut and padded with zeros."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(num_outputs)
        self.second = nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(num_outputs)
        self.stride = stride
        self.num_new = num_outputs - num_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        if self.stride > 1 or self.num_new:
            shortcut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new))
        x = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(x)) + shortcut)


class ResNet(nn.Module):  # type: ignore[misc]
    """Takes images [batch, 3, 32, 32] of pixels from 0 to 255; returns logits [batch, 10]."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN).reshape(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(DEVIATION).reshape(3, 1, 1), persistent=False)
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        blocks = []
        size = width
        for stage in range(3):
            for k in range(num_blocks):
                stride = 2 if stage and not k else 1
                blocks.append(Block(size, width << stage, stride))
                size = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.logits = nn.Linear(size, NUM_CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = (image.to(torch.float32) - self.mean) / self.deviation
        x = functional.relu(self.stem_norm(self.stem(x)))
        return self.logits(self.blocks(x).mean((2, 3)))


def custom_model(num_blocks: int = 3, width: int = 16) -> nn.Module:
    """Return a ResNet with 6 * num_blocks + 2 layers."""
    return ResNet(num_blocks, width)


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(predictions, labels)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)


def lr_scheduler(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return a schedule that divides the rate by 10 after 80 and after 120 epochs."""
    return {"scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [80, 120]), "interval": "epoch"}


def feed(records: list[bytes], mode: str, metadata: object) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if mode == "prediction":
        return images_of(parse_examples(records, {"image": ()}))
    columns = parse_examples(records, {"image": (), "label": ()})
    image, label = images_of(columns), torch.from_numpy(columns["label"])
    if mode == "training":
        order = torch.randperm(len(label))
        image, label = augmented(image[order]), label[order]
    return image, label


def images_of(columns: dict[str, np.ndarray]) -> torch.Tensor:
    pixels = np.frombuffer(bytearray(b"".join(columns["image"].tolist())), np.uint8)
    return torch.from_numpy(pixels).reshape(-1, 3, 32, 32)


def augmented(images: torch.Tensor) -> torch.Tensor:
    """Return each image shifted randomly by up to four pixels, and mirrored with probability 1/2."""
    count = len(images)
    padded = functional.pad(images, (PADDING,) * 4)
    tops, lefts = (torch.randint(0, 2 * PADDING + 1, (count, 1, 1)) for _ in range(2))
    rows = torch.arange(32).reshape(1, 32, 1) + tops
    columns = torch.arange(32).reshape(1, 1, 32)
    columns = torch.where(torch.rand(count, 1, 1) < 0.5, columns, 31 - columns) + lefts
    numbers = torch.arange(count).reshape(-1, 1, 1)
    return padded.permute(0, 2, 3, 1)[numbers, rows, columns].permute(0, 3, 1, 2)


def accuracy(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return predictions.argmax(1) == labels


def eval_metrics_fn() -> dict[str, object]:
    return {"accuracy": accuracy}
