"""A classifier's training script in the usual shape: options, train() and test(), a scheduler, progress.

Its five elastic lines are marked.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from elasticdl.api.pytorch import create_elastic_controller  # 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.dropout = nn.Dropout(0.1)
        self.output = nn.Linear(4 * 6 * 6, 2)

    def forward(self, images):
        found = functional.relu(self.convolution(images))
        return functional.log_softmax(self.output(self.dropout(found.flatten(1))), dim=1)


def squares(count, seed):
    """Images with a bright upper or lower half, and which it is."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = torch.rand(count, 1, 8, 8, generator=generator), torch.arange(count) % 2
    images[labels == 0, :, :4] += 1
    images[labels == 1, :, 4:] += 1
    return TensorDataset(images, labels)


def train(args, model, device, train_loader, optimizer, epoch, controller):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        with controller.step():  # 5
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = functional.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        if batch_idx % args.log_interval == 0:
            done, of = batch_idx * len(data), len(train_loader.dataset)
            print(f"Epoch {epoch} [{done}/{of} ({100 * batch_idx / len(train_loader):.0f}%)] loss {loss.item():.4f}")
    print(f"Epoch {epoch}: {batch_idx + 1} of {len(train_loader)} batches")


def test(model, device, test_loader):
    model.eval()
    loss = correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device))
            loss += functional.nll_loss(output, target.to(device), reduction="sum").item()
            correct += (output.argmax(1) == target.to(device)).sum().item()
    print(f"Test: loss {loss / len(test_loader.dataset):.4f}, accuracy {correct / len(test_loader.dataset):.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--log-interval", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cpu")
    test_loader = DataLoader(squares(60, 2), batch_size=50)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    controller = create_elastic_controller(args.batch_size, args.epochs, state=[model, optimizer, scheduler])  # 2
    train_loader = controller.loader(DataLoader(squares(600, 1), batch_size=args.batch_size, shuffle=True))  # 3
    for epoch in controller.epochs():  # 4
        train(args, model, device, train_loader, optimizer, epoch, controller)
        test(model, device, test_loader)
        scheduler.step()
    print("rate", optimizer.param_groups[0]["lr"])


if __name__ == "__main__":
    main()
