"""A script with a convolution and BatchNorm on the GPU: a user's script, with the elastic lines."""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from elasticdl.api.pytorch import create_elastic_controller


def squares(count: int) -> TensorDataset:
    """Images with a bright upper or lower half, and which it is."""
    images, labels = torch.rand(count, 1, 8, 8), torch.arange(count) % 2
    images[labels == 0, :, :4] += 1
    images[labels == 1, :, 4:] += 1
    return TensorDataset(images, labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, required=True)
    args = parser.parse_args()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    controller = create_elastic_controller(8, 3, state=[model, optimizer])
    loader = controller.loader(DataLoader(squares(args.records), batch_size=8, shuffle=True, pin_memory=True))
    for epoch in controller.epochs():
        for images, labels in loader:
            with controller.step():
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
                loss.backward()
                optimizer.step()
        print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
