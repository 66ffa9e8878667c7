"""A training script in PyTorch, its loop with an elastic controller and its plain one over the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticdl.api.data import DataShardService, Minibatch
from elasticdl.api.pytorch import ElasticController, create_elastic_controller

SIZE, WIDTH, BATCH, EPOCHS = 54, 6, 8, 2


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(SIZE, WIDTH, generator=generator)
    return TensorDataset(features, features.sum(1, keepdim=True).sign(), torch.arange(SIZE))


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 1))


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Script:
    """A training script: `train` is the body of its loop."""

    def __init__(self, train: Callable[[Script, Any], None] | None = None, compiled: bool = False) -> None:
        self.bare = make_model()
        self.model: Any = torch.compile(self.bare, backend="aot_eager") if compiled else self.bare
        self.optimizer = torch.optim.Adam(self.bare.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=64)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        self._train = train or Script.plainly

    @property
    def state(self) -> list[Any]:
        return [self.model, self.optimizer, self.scheduler, self.scaler]

    def train(self, batch: Any) -> None:
        self._train(self, batch)

    def plainly(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, batch).backward()
        self.optimizer.step()

    def scheduled(self, batch: Any) -> None:
        self.plainly(batch)
        self.scheduler.step()

    def clipped(self, batch: Any) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss_of(self.model, batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.optimizer.step()

    def scaled(self, batch: Any) -> None:
        """The first scales are far too large: steps are left out until they fit."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(self.model, batch)
        self.scaler.scale(1000 * loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.bare.state_dict().items()}


def minibatches(**options: Any) -> list[Minibatch]:
    """The batches that a script alone is given, in order."""
    return list(DataShardService(batch_size=BATCH, dataset_size=SIZE, num_epochs=EPOCHS, **options))


def plain_loop(script: Script, group: int = 1) -> dict[str, torch.Tensor]:
    data = dataset()
    given = minibatches()
    while given:
        now = given[:group]
        now = [m for m in now if m.epoch == now[0].epoch]
        given = given[len(now) :]
        indices = [index for minibatch in now for index in minibatch.indices]
        script.train([column[indices] for column in data.tensors])
    return script.values()


def elastic_loop(script: Script, **options: Any) -> dict[str, torch.Tensor]:
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)
    loader = controller.loader(dataset(), **options)
    for _ in controller.epochs():
        for batch in loader:
            with controller.step():
                script.train(batch)
    return script.values()


def loop(controller: ElasticController, data: Any, train: Callable[[Any], Any]) -> None:
    """One epoch."""
    for batch in controller.loader(data):
        with controller.step():
            train(batch)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(one[name], other[name]) for name in one | other), (one, other)
