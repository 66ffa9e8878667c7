"""A PyTorch script of one's own on the paced digits; minibatches and epochs are the job's.

python -m paced.pytorch_script VALIDATION_DATA
"""

import sys

import torch
from torch import nn
from torch.nn import functional

from elasticdl.api.data import Minibatch, read_records
from elasticdl.api.examples import parse_examples
from elasticdl.api.pytorch import create_elastic_controller

from .pace import pause

NUM_PIXELS, NUM_CLASSES = 64, 10


def columns_of(records: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    columns = parse_examples(records, {"image": (NUM_PIXELS,), "label": ()})
    return torch.from_numpy(columns["image"]) / 16, torch.from_numpy(columns["label"])


def batch_of(minibatch: Minibatch) -> tuple[torch.Tensor, torch.Tensor]:
    pause(len(minibatch.records))
    return columns_of(minibatch.records)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(NUM_PIXELS, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, NUM_CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    controller = create_elastic_controller(state=[model, optimizer])
    loader = controller.loader(batch_of)
    images, labels = columns_of(read_records(sys.argv[1]))

    @controller.on_evaluation(len(labels))
    def evaluate(indices: range) -> dict[str, float]:
        part = slice(indices.start, indices.stop)
        return {"accuracy": float((model(images[part]).argmax(1) == labels[part]).float().mean())}

    for _ in controller.epochs():
        for image, label in loader:
            with controller.step():
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(image), label)
                loss.backward()
                optimizer.step()
                controller.log_loss(loss)


if __name__ == "__main__":
    main()
