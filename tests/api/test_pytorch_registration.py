"""The many ways to set up an elastic loop: a loader made in each epoch, states by name, a forgotten optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_loops import BATCH, EPOCHS, SIZE, Script, assert_equal, dataset, loop, loss_of, plain_loop
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from elasticdl.api.pytorch import create_elastic_controller
from elasticdl.api.pytorch.registration import _scaler_of_step
from elasticdl_client.errors import DataError, JobError, ModelDefinitionError
from tests.chaos.job import LocalJob


@pytest.fixture(autouse=True)
def step_of_plateaus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what a loop that ends by an error leaves in PyTorch, where a script's process ends."""
    monkeypatch.setattr(ReduceLROnPlateau, "step", ReduceLROnPlateau.step)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["the same", "made anew", "in a DataLoader"])
def test_a_loader_may_be_made_in_the_loop_over_epochs(kind: str) -> None:
    script, data = Script(), dataset()
    makers = {
        "the same": lambda: data,
        "made anew": lambda: TensorDataset(*data.tensors),
        "in a DataLoader": lambda: DataLoader(TensorDataset(*data.tensors), batch_size=BATCH),
    }
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)
    numbers = []
    for epoch in controller.epochs():
        numbers.append(epoch)
        for batch in controller.loader(makers[kind]()):
            with controller.step():
                script.train(batch)
    assert numbers == list(range(EPOCHS))
    assert_equal(script.values(), plain_loop(Script()))


@pytest.mark.parametrize("kind", ["options", "DataLoader", "BatchSampler", "DistributedSampler"])
def test_the_loader_may_say_batch_size_and_shuffle(kind: str) -> None:
    orders, options = [], {"batch_size": BATCH, "shuffle": True}
    for shuffle in (True, None):
        script = Script()
        controller = create_elastic_controller(
            0 if shuffle else BATCH, 1, shuffle=shuffle and None, state=script.state, num_minibatches_per_shard=4
        )
        if shuffle is None:
            loader = controller.loader(dataset())
        elif kind == "options":
            loader = controller.loader(dataset(), **options)
        elif kind == "DataLoader":
            loader = controller.loader(DataLoader(dataset(), **options))
        elif kind == "BatchSampler":  # as Accelerate prepares a DataLoader
            batches = BatchSampler(RandomSampler(range(SIZE)), BATCH, drop_last=False)
            loader = controller.loader(DataLoader(dataset(), batch_sampler=batches))
        else:
            sampler = DistributedSampler(dataset(), num_replicas=2, rank=0)  # it shuffles unless it is told not to
            loader = controller.loader(DataLoader(dataset(), batch_size=BATCH, sampler=sampler))
        given = []
        for batch in loader:
            with controller.step():
                script.train(batch)
            given.append(batch[0].clone())
        orders.append(given)
    assert [len(batch) for batch in orders[0]] == [len(batch) for batch in orders[1]]
    assert not all(torch.equal(*pair) for pair in zip(*orders, strict=True))  # the records of a task are permuted
    assert torch.equal(*(torch.cat(given).sum(0).round(decimals=2) for given in orders))


@pytest.mark.parametrize(
    ("given", "loader", "what"),
    [
        ({"batch_size": 8}, {"batch_size": 16}, "batch_size is 8 in create_elastic_controller, and 16 in the loader"),
        (
            {"shuffle": False},
            {"shuffle": True},
            "shuffle is False in create_elastic_controller, and True in the loader",
        ),
        ({}, {"batch_size": 8, "drop_last": True}, "drop_last cannot be chosen"),
        ({}, {"sampler": torch.utils.data.WeightedRandomSampler([1.0] * SIZE, SIZE)}, "sampler cannot be chosen"),
        ({}, {"sampler": torch.utils.data.RandomSampler(range(SIZE), replacement=True)}, "sampler cannot be chosen"),
        ({}, {"sampler": torch.utils.data.RandomSampler(range(SIZE), num_samples=9)}, "sampler cannot be chosen"),
        ({}, {"sampler": torch.utils.data.RandomSampler(range(9))}, "sampler cannot be chosen"),
        ({}, {"sampler": torch.utils.data.SequentialSampler(range(9))}, "sampler cannot be chosen"),
        ({}, {"sampler": DistributedSampler(range(9), num_replicas=2, rank=0)}, "sampler cannot be chosen"),
        ({}, {"batch_sampler": BatchSampler(range(SIZE), 4, False)}, "sampler cannot be chosen"),
        ({"batch_size": 4}, {"batch_sampler": [range(4)]}, "batch_sampler cannot be chosen"),
    ],
)
@pytest.mark.parametrize("kind", ["options", "DataLoader"])
def test_a_loader_that_gives_other_records_is_refused(
    given: dict[str, Any], loader: dict[str, Any], what: str, kind: str
) -> None:
    controller = create_elastic_controller(num_epochs=1, state=Script().state, **given)
    data, options = (dataset(), loader) if kind == "options" else (DataLoader(dataset(), **loader), {})
    with pytest.raises(DataError, match=what):
        controller.loader(data, **options)


def test_a_loader_of_a_data_set_of_batches_is_refused() -> None:
    controller = create_elastic_controller(num_epochs=1, state=Script().state)
    with pytest.raises(DataError, match="batch_size=None has a data set of batches"):
        controller.loader(DataLoader(dataset(), batch_size=None))


@pytest.mark.parametrize(
    ("given", "loader", "size"),
    [(8, {}, 8), (8, {"drop_last": False, "sampler": None}, 8), (0, {"batch_size": 2}, 2), (0, {}, 1)],
)
def test_the_defaults_of_a_data_loader_contradict_nothing(given: int, loader: dict[str, Any], size: int) -> None:
    controller = create_elastic_controller(given, 1, state=Script().state)
    assert len(controller.loader(DataLoader(dataset(), **loader))) == -(-SIZE // size)


def test_another_data_set_is_no_second_loader() -> None:
    script, data = Script(), dataset()
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)
    controller.loader(data)
    for other in (dataset(), torch.utils.data.Subset(data, range(8)), lambda minibatch: minibatch):
        with pytest.raises(JobError, match="another data set") as refused:
            controller.loader(other)
        assert "DataLoader" in refused.value.hint


class Ring:
    """A data set that knows itself."""

    def __init__(self) -> None:
        self.itself = self

    def __len__(self) -> int:
        return SIZE


def test_a_data_set_that_holds_itself_is_compared_in_the_end() -> None:
    controller = create_elastic_controller(BATCH, EPOCHS, state=Script().state)
    controller.loader(Ring())
    with pytest.raises(JobError, match="another data set"):
        controller.loader(Ring())


def test_a_loop_over_epochs_without_a_loader_is_refused_after_the_first() -> None:
    controller = create_elastic_controller(BATCH, EPOCHS, state=Script().state)
    with pytest.raises(JobError, match="no data yet"):
        for _ in controller.epochs():
            pass


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """Samples of unknown number."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from DATA.tensors[0]


def test_a_data_set_without_a_length_needs_its_number_of_samples() -> None:
    controller = create_elastic_controller(BATCH, EPOCHS, state=Script().state)
    with pytest.raises(DataError, match="Stream has no length") as refused:
        controller.loader(Stream())
    assert "dataset_size" in refused.value.hint
    controller = create_elastic_controller(BATCH, EPOCHS, dataset_size=SIZE, state=Script().state)
    assert len(controller.loader(Stream())) == -(-SIZE // BATCH)


def test_states_may_have_names_and_a_single_one_needs_no_list() -> None:
    script = Script()
    named = {"net": script.bare, "adam": script.optimizer}
    controller = create_elastic_controller(BATCH, EPOCHS, state=named)
    assert {"net", "adam"} <= set(controller.state.names)
    model = nn.Sequential(nn.Linear(2, 1))
    assert create_elastic_controller(BATCH, EPOCHS, state=model).state.modules == [model]


def _train(script: Script, state: Any, parameters: Any = None) -> None:
    optimizer = torch.optim.Adam(parameters or script.bare.parameters(), lr=0.05)
    controller = create_elastic_controller(BATCH, EPOCHS, state=[optimizer if one is None else one for one in state])
    for _ in controller.epochs():
        for batch in controller.loader(DATA):
            with controller.step():
                optimizer.zero_grad()
                (loss_of(script.bare, batch) + sum(p.sum() for p in parameters or ())).backward()
                optimizer.step()


DATA = dataset()


def test_an_optimizer_with_a_state_has_to_be_registered() -> None:
    script = Script()
    with pytest.raises(ModelDefinitionError, match="Adam is not registered") as refused:
        _train(script, [script.bare])
    assert "state=[" in refused.value.hint


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_schedule_that_is_not_registered_is_warned_of_once(
    is_registered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script()
    optimizer = torch.optim.SGD(script.bare.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    unused = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(script.bare.parameters(), lr=0.01), 10)
    state = [script.bare, optimizer, schedule if is_registered else unused]
    controller = create_elastic_controller(BATCH, EPOCHS, state=state)
    for _ in controller.epochs():
        for batch in controller.loader(DATA):
            with controller.step():
                optimizer.zero_grad()
                loss_of(script.bare, batch).backward()
                optimizer.step()
                schedule.step()
    assert caplog.text.count("schedule that is not registered") == (0 if is_registered else 1)


def test_a_scaler_has_to_be_registered_unless_it_is_disabled() -> None:
    script = Script(Script.scaled)
    script.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with pytest.raises(ModelDefinitionError, match="GradScaler is not registered") as refused:
        loop(create_elastic_controller(BATCH, 1, state=[script.bare, script.optimizer]), DATA, script.train)
    assert "state=[" in refused.value.hint
    script.scaler = torch.amp.GradScaler("cpu", enabled=False)
    loop(create_elastic_controller(BATCH, 1, state=[script.bare, script.optimizer]), DATA, script.train)


def test_an_optimizer_without_a_state_may_be_left_out() -> None:
    script = Script()
    script.optimizer = torch.optim.SGD(script.bare.parameters(), lr=0.01)  # type: ignore[assignment]
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.bare)
    for _ in controller.epochs():
        for batch in controller.loader(DATA):
            with controller.step():
                script.train(batch)
    assert controller.global_completed_batch_num == EPOCHS * -(-SIZE // BATCH)


def test_parameters_of_no_registered_module_are_refused() -> None:
    script = Script()
    lone = nn.Parameter(torch.zeros(3))
    with pytest.raises(ModelDefinitionError, match="trains 1 parameter of shape 3 that no registered module has"):
        _train(script, [script.bare, None], [*script.bare.parameters(), lone])


class Both:
    """An object of the user's own that holds the state of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def test_an_object_of_the_users_own_may_hold_the_optimizer() -> None:
    script = Script()
    controller = create_elastic_controller(BATCH, EPOCHS, state=[script.bare, Both(script.optimizer)])
    for _ in controller.epochs():
        for batch in controller.loader(DATA):
            with controller.step():
                script.train(batch)
    assert_equal(script.values(), plain_loop(Script()))


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another one, as the user's libraries have them."""

    def __init__(self, inner: torch.optim.Optimizer, tells: bool) -> None:
        super().__init__(inner.param_groups, {})
        self._inner, self._tells = inner, tells

    def step(self, closure: Any = None) -> Any:
        return self._inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict() if self._tells else super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self._inner if self._tells else super()).load_state_dict(state)


def _train_wrapped(script: Script, tells: bool) -> None:
    controller = create_elastic_controller(BATCH, EPOCHS, state=[script.bare, Wrapping(script.optimizer, tells)])
    for _ in controller.epochs():
        for batch in controller.loader(DATA):
            with controller.step():
                script.train(batch)


def test_an_optimizer_may_be_in_the_state_of_one_around_it() -> None:
    script = Script()
    _train_wrapped(script, tells=True)
    assert_equal(script.values(), plain_loop(Script()))


def test_an_optimizer_that_the_one_around_it_says_nothing_of_is_refused() -> None:
    with pytest.raises(ModelDefinitionError, match="Adam is not registered"):
        _train_wrapped(Script(), tells=False)


def test_a_look_for_the_scaler_keeps_no_tensor_of_the_script() -> None:
    batch = torch.zeros(1)
    is_gone = weakref.finalize(batch, lambda: None)
    assert _scaler_of_step() is None
    del batch
    assert not is_gone.alive


def test_an_error_of_ours_in_a_script_is_tried_twice_and_no_more(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from elasticdl.api.pytorch import create_elastic_controller\n"
        "import torch\n"
        "controller = create_elastic_controller(4, 1, state=['no state'])\n"
    )
    flags = {"job_name": "twice", "num_workers": 2, "job_command": f"python {script}"}
    job = LocalJob(tmp_path / "job", flags | {"distribution_strategy": "AllReduceStrategy"}).start()
    assert job.wait(90) == 1, job.story()
    output = "\n".join(job.output)
    assert "It is not tried again" in output, job.story()
    assert "pods in a row" not in output, job.story()


@pytest.mark.parametrize("holder", ["state", "object", "nothing"])
def test_groups_that_an_optimizer_gets_after_its_first_step_are_checked(holder: str) -> None:
    """A worker that joins has an optimizer without them, and gradients of other modules are not averaged."""
    body, head, other = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    held = {"state": [optimizer], "object": [Both(optimizer)], "nothing": []}[holder]
    controller = create_elastic_controller(8, 1, state=[body, head, *held])
    expected = "has 2 groups of 4 parameters, and 1 of 2" if held else "that no registered module has"
    trained = []

    def train() -> None:
        for (features,) in controller.loader(TensorDataset(torch.randn(32, 4))):
            with controller.step():
                for module in (body, head, other):
                    module.zero_grad()
                hidden = body(features)
                (head(hidden) + other(hidden)).mean().backward()
                if trained:
                    optimizer.add_param_group({"params": [*(head if held else other).parameters()]})
                optimizer.step()
                trained.append(features)

    with pytest.raises(ModelDefinitionError, match=expected):
        train()
    assert len(trained) == 1


class Meter:
    """An object of the user's own that holds no optimizer."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_an_optimizer_without_a_state_may_get_groups_beside_an_object_of_the_users_own() -> None:
    body, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    controller = create_elastic_controller(8, 1, state=[body, head, Meter()])
    first = head.weight.detach().clone()

    def train(batch: Any) -> None:
        optimizer.zero_grad()
        head.zero_grad()
        head(body(batch[0])).mean().backward()
        if controller.num_steps == 1:
            optimizer.add_param_group({"params": [*head.parameters()]})
        optimizer.step()

    loop(controller, TensorDataset(torch.randn(32, 4)), train)
    assert not torch.equal(head.weight, first)


def test_an_optimizer_whose_step_depends_on_the_losses_of_one_worker_is_refused() -> None:
    script = Script()
    lbfgs = torch.optim.LBFGS(script.bare.parameters())

    def train(batch: Any) -> None:
        def closure() -> torch.Tensor:
            lbfgs.zero_grad()
            loss = loss_of(script.model, batch)
            loss.backward()
            return loss

        lbfgs.step(closure)

    controller = create_elastic_controller(BATCH, 1, state=[script.model, lbfgs])
    with pytest.raises(ModelDefinitionError, match="LBFGS computes the loss several times"):
        loop(controller, dataset(), train)
