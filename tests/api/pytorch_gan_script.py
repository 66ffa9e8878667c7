"""A DCGAN in its usual shape: two models, two optimizers, three `backward()` for each batch.

pytorch_gan_script.py NOTES …: notes the models after every step.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from pytorch_script_of_a_user import digest
from script_waits import hold
from torch import nn
from torch.utils.data import TensorDataset

from elasticdl.api.pytorch import create_elastic_controller

SIZE = 400


def images(count=SIZE):
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(5)) * 2 - 1


class Gan:
    """The models, their optimizers, and the body of the training loop."""

    def __init__(self, has_norm=True):
        torch.manual_seed(1)
        norm = nn.BatchNorm2d if has_norm else lambda _: nn.Identity()
        up, down = nn.ConvTranspose2d, nn.Conv2d
        self.generator = nn.Sequential(up(8, 8, 4), norm(8), nn.ReLU(), up(8, 1, 4, 2, 1), nn.Tanh())
        layers = [down(1, 8, 4, 2, 1), norm(8), nn.LeakyReLU(0.2), down(8, 1, 4), nn.Flatten(0), nn.Sigmoid()]
        self.discriminator = nn.Sequential(*layers)
        self.optimizer_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.criterion = nn.BCELoss()

    @property
    def state(self):
        return [self.generator, self.discriminator, self.optimizer_d, self.optimizer_g]

    def train(self, real, noise=None, after_real=lambda: None, before_generator=lambda: None):
        ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
        self.discriminator.zero_grad()
        self.criterion(self.discriminator(real), ones).backward()
        after_real()
        fake = self.generator(torch.randn(len(real), 8, 1, 1) if noise is None else noise)
        self.criterion(self.discriminator(fake.detach()), zeros).backward()
        self.optimizer_d.step()
        before_generator()
        self.generator.zero_grad()
        self.criterion(self.discriminator(fake), ones).backward()
        self.optimizer_g.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("notes", type=Path)
    parser.add_argument("--hold-at", type=int, default=-1, help="worker 1 waits before its generator's backward there")
    parser.add_argument("--plain", action="store_true", help="without BatchNorm, and noise that is made of the images")
    parser.add_argument("--every", type=int, default=0, help="the generator is trained at each of these batches")
    args = parser.parse_args()
    worker = os.environ.get("WORKER_ID", "alone")
    gan = Gan(has_norm=not args.plain)
    controller = create_elastic_controller(8, 2, state=gan.state)
    loader = controller.loader(TensorDataset(images()))
    notes = (args.notes / f"steps-{worker}").open("a")
    last = number = 0

    def before_generator():
        is_there = worker == "1" and number == args.hold_at
        if is_there and controller.size > 1 and not (args.notes / "held").exists():
            hold(args.notes)

    def after_real():
        if args.plain:  # gradients of no use, as those of a penalty
            torch.autograd.grad(gan.discriminator(images(4)).sum(), list(gan.discriminator.parameters()))

    def train_simply(real, has_generator):
        gan.optimizer_d.zero_grad()
        gan.discriminator(real).mean().backward()
        gan.optimizer_d.step()
        if has_generator:
            gan.optimizer_g.zero_grad()
            gan.discriminator(gan.generator(torch.randn(len(real), 8, 1, 1))).mean().backward()
            gan.optimizer_g.step()

    for _ in controller.epochs():
        for (real,) in loader:
            with controller.step():
                if args.every:
                    train_simply(real, has_generator=number % args.every == int(worker))
                else:
                    noise = real[:, 0, :1, :].reshape(len(real), 8, 1, 1) if args.plain else None
                    gan.train(real, noise, after_real, before_generator)
            if not controller.is_rehearsal and controller.num_steps > last:
                number, last = number + 1, controller.num_steps
                models = gan.state[:2]
                weight = sum(value.double().sum().item() for one in models for value in one.state_dict().values())
                notes.write(f"{last} {digest(*models)} {weight}\n")
                notes.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
