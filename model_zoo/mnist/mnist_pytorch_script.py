"""MNIST with a custom training script: numbered comments mark the lines that make it elastic.

    elasticdl train --job_command="python mnist/mnist_pytorch_script.py --training_data=… --validation_data=…" \\
        --distribution_strategy=AllReduceStrategy …
    python mnist/mnist_pytorch_script.py --training_data=… --validation_data=…

It trains the model of mnist_pytorch.py, with the same records.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch.nn import functional

from elasticdl.api.data import Minibatch, read_records
from elasticdl.api.examples import parse_examples
from elasticdl.api.pytorch import create_elastic_controller  # 1

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mnist.mnist_pytorch import Net


def images_and_labels(records: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    columns = parse_examples(records, {"image": (1, 28, 28), "label": ()})
    return torch.from_numpy(columns["image"]), torch.from_numpy(columns["label"])


def batch_of(minibatch: Minibatch) -> tuple[torch.Tensor, torch.Tensor]:
    return images_and_labels(minibatch.records)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--training_data", required=True)
    parser.add_argument("--validation_data", default="")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--num_epochs", type=int, default=1)
    parser.add_argument("--output", default="", help="a file for the trained weights")
    given = parser.parse_args()

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    controller = create_elastic_controller(  # 2
        given.batch_size,
        given.num_epochs,
        training_data=given.training_data,
        shuffle=True,
        state=[model, optimizer, scheduler],
    )
    loader = controller.loader(batch_of, num_workers=1)  # 3

    if given.validation_data:
        images, labels = images_and_labels(read_records(given.validation_data))

        @controller.on_evaluation(len(labels))
        def evaluate(indices: range) -> dict[str, float]:
            part = slice(indices.start, indices.stop)
            return {"accuracy": float((model(images[part]).argmax(1) == labels[part]).float().mean())}

    for epoch in controller.epochs():  # 4
        for image, label in loader:
            with controller.step():  # 5
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(image), label)
                loss.backward()
                optimizer.step()
                controller.log_loss(loss)
        scheduler.step()
        sys.stdout.write(f"Epoch {epoch + 1} is done\n")
    if given.output and controller.rank == 0:
        torch.save(model.state_dict(), given.output)


if __name__ == "__main__":
    main()
