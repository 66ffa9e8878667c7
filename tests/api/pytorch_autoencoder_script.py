"""A variational autoencoder's training script in the usual shape: losses summed up over an epoch, then their mean.

Its five elastic lines are marked.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from elasticdl.api.pytorch import create_elastic_controller  # 1


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 8)
        self.mean, self.log_variance = nn.Linear(8, 2), nn.Linear(8, 2)
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 16), nn.Sigmoid())

    def forward(self, x):
        hidden = functional.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(log_variance / 2)
        return self.decoder(code), mean, log_variance


def loss_of(found, x, mean, log_variance):
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return functional.binary_cross_entropy(found, x, reduction="sum") + divergence


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(1)
    rows = (torch.rand(320, 1) < 0.5).float().repeat(1, 16)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    controller = create_elastic_controller(args.batch_size, args.epochs, state=[model, optimizer])  # 2
    train_loader = controller.loader(TensorDataset(rows))  # 3
    for epoch in controller.epochs():  # 4
        model.train()
        train_loss = 0
        for batch_idx, (data,) in enumerate(train_loader):
            with controller.step():  # 5
                optimizer.zero_grad()
                found, mean, log_variance = model(data)
                loss = loss_of(found, data, mean, log_variance)
                loss.backward()
                train_loss += loss.item()
                optimizer.step()
            if batch_idx % 4 == 0:
                share = 100.0 * batch_idx / len(train_loader)
                print(f"Epoch {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)} ({share:.0f}%)]")
        print(f"Epoch {epoch}: {batch_idx + 1} of {len(train_loader)} batches")
        print(f"mean loss {train_loss / len(train_loader.dataset):.4f}")


if __name__ == "__main__":
    main()
