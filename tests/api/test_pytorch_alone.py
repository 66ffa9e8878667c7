"""A PyTorch script with an elastic controller, run by itself: the same model as a plain loop over the same batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from pytorch_loops import BATCH, EPOCHS, SIZE, Script, assert_equal, dataset, elastic_loop, loop, loss_of, plain_loop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticdl.api.pytorch import ElasticController, create_elastic_controller
from elasticdl_client.errors import FlagError, JobError, ModelDefinitionError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("train", [Script.plainly, Script.scheduled, Script.clipped, Script.scaled])
def test_the_model_is_that_of_a_plain_loop(train: Callable[[Script, Any], None]) -> None:
    assert_equal(elastic_loop(Script(train)), plain_loop(Script(train)))


def test_a_compiled_model_trains_as_the_plain_one() -> None:
    torch._dynamo.reset()
    assert_equal(elastic_loop(Script(compiled=True)), plain_loop(Script(compiled=True)))


def test_steps_that_a_scaler_leaves_out_count_as_made() -> None:
    script = Script(Script.scaled)
    elastic_loop(script)
    assert 0 < script.scaler.get_scale() < 2.0**127


def test_a_loop_over_range_and_a_decorated_function_do_the_same(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)
    loader = controller.loader(DataLoader(dataset(), batch_size=BATCH, num_workers=1))

    @controller.elastic_run
    def train(batch: Any) -> int:
        script.train(batch)
        return len(batch[0])

    with controller.scope():
        counts = [train(batch) for _ in range(EPOCHS) for batch in loader]
    assert sum(counts) == EPOCHS * SIZE
    assert caplog.text.count("This loop is empty") == EPOCHS - 1
    assert_equal(script.values(), plain_loop(Script()))


def test_inside_of_scope_one_loop_goes_over_all_epochs() -> None:
    script = Script()
    controller = create_elastic_controller(BATCH, EPOCHS)
    controller.set_broadcast_model(script.bare)
    controller.set_broadcast_optimizer(script.optimizer)
    loader = controller.loader(dataset())
    train = controller.elastic_run(script.train)
    epochs = []
    with controller.scope():
        for batch in loader:
            epochs.append(controller.get_current_epoch())
            train(batch)
    assert [epochs.count(epoch) for epoch in range(EPOCHS)] == [-(-SIZE // BATCH)] * EPOCHS
    assert_equal(script.values(), plain_loop(Script()))


def test_inside_of_scope_the_controllers_epochs_are_one_loop_each(caplog: pytest.LogCaptureFixture) -> None:
    loops: list[int] = []
    controller = create_elastic_controller(BATCH, EPOCHS, state=(script := Script()).state)
    loader = controller.loader(dataset())
    with controller.scope():
        for _ in controller.epochs():
            loops.append(0)
            for batch in loader:
                loops[-1] += 1
                with controller.step():
                    script.train(batch)
    assert loops == [-(-SIZE // BATCH)] * EPOCHS
    assert "This loop is empty" not in caplog.text


def test_a_fixed_global_batch_is_one_update_of_several_minibatches() -> None:
    script, other = Script(Script.scheduled), Script(Script.scheduled)
    for one in (script, other):
        one.bare[1] = nn.Identity()
        one.bare.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state, fixed_global_batch=3 * BATCH)
    loader = controller.loader(dataset(), num_workers=1)
    for _ in controller.epochs():
        for batch in loader:
            with controller.step():
                script.train(batch)
    expected = plain_loop(other, group=3)
    assert controller.num_steps == EPOCHS * 3 == script.scheduler.last_epoch
    for name, value in script.values().items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("group", [1, 3])
def test_a_module_that_two_registered_ones_share_is_trained_once(group: int) -> None:
    found = []
    for shares in (True, False):
        script = Script()
        state = [script.bare[:2], script.bare] if shares else [script.bare]
        fixed = {"fixed_global_batch": group * BATCH} if group > 1 else {}
        controller = create_elastic_controller(BATCH, 1, state=[*state, script.optimizer], **fixed)
        loop(controller, dataset(), script.train)
        found.append(script.values())
    assert_equal(*found)


@pytest.mark.parametrize("fixed_global_batch", [0, 3 * BATCH])
def test_a_buffer_that_gets_another_shape_is_refused_by_name(fixed_global_batch: int) -> None:
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 1)
            self.register_buffer("bank", torch.zeros(0, 2))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            self.bank = torch.cat([self.bank, features])
            return self.line(features)

    model = Bank()
    controller = create_elastic_controller(BATCH, 1, state=[model], fixed_global_batch=fixed_global_batch)
    data = TensorDataset(torch.randn(48, 2))
    with pytest.raises(
        ModelDefinitionError, match=r"The buffer bank has the shape \(8, 2\), and had the shape \(0, 2\)"
    ):
        loop(controller, data, lambda batch: model(batch[0]).mean().backward())


@pytest.mark.parametrize("fixed_global_batch", [0, 2 * BATCH])
@pytest.mark.parametrize("remove", [lambda model: setattr(model, "start", None), lambda model: delattr(model, "start")])
@pytest.mark.parametrize("is_in_step", [True, False])
def test_a_buffer_that_is_removed_is_refused_by_name(
    is_in_step: bool, remove: Callable[[nn.Module], None], fixed_global_batch: int
) -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("start", torch.ones(1))
    controller = create_elastic_controller(BATCH, 1, state=[model], fixed_global_batch=fixed_global_batch)

    def train() -> None:
        for (features,) in controller.loader(TensorDataset(torch.randn(48, 2))):
            if not is_in_step:
                remove(model)
            with controller.step():
                if is_in_step:
                    remove(model)
                model(features).mean().backward()

    with pytest.raises(ModelDefinitionError, match=r"The buffer start is gone, and had the shape \(1,\)"):
        train()
    assert controller.is_over, "the others are told, and the master"


@pytest.mark.parametrize(
    ("lazy", "name"), [(nn.LazyLinear(2), "weight"), (nn.LazyBatchNorm1d(affine=False), "running")]
)
def test_what_has_no_shape_is_refused_by_name(lazy: nn.Module, name: str) -> None:
    controller = create_elastic_controller(BATCH, 1, state=[nn.Sequential(nn.Linear(2, 2), lazy)])
    with pytest.raises(ModelDefinitionError, match=rf"^1\.{name}\w* has no shape yet"):
        controller.loader(dataset())


def test_losses_that_are_means_of_items_are_combined_by_their_items() -> None:
    """As by one process over all samples of the step; a minibatch without an item has a loss of NaN."""

    def kept(numbers: torch.Tensor) -> torch.Tensor:
        return (numbers // BATCH % 3 != 1) & (numbers % 5 > 0) & (numbers % 16 > 2)

    def masked(script: Script, batch: Any) -> None:
        keep = kept(batch[2])
        script.optimizer.zero_grad()
        loss = nn.functional.mse_loss(script.model(batch[0])[keep], batch[1][keep])
        controller.add_loss(loss)
        loss.backward()
        script.optimizer.step()
        losses.append(controller.mean_loss)

    found = []
    for group in (3, 1):
        script, losses = Script(masked), list[torch.Tensor]()
        script.bare[1] = nn.Identity()
        fixed = {"batch_size": BATCH, "fixed_global_batch": 3 * BATCH} if group == 3 else {"batch_size": 3 * BATCH}
        controller = create_elastic_controller(num_epochs=1, state=script.state, shuffle=False, **fixed)
        for batch in controller.loader(dataset()):
            with controller.step(kept(batch[2]).sum()):
                script.train(batch)
        found.append({**script.values(), "losses": torch.stack(losses).detach()})
    assert len(found[0]["losses"]) == 3
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])


@pytest.mark.parametrize("num_items", [-1, float("nan"), torch.inf, "many", [3], torch.ones(2)])
def test_a_number_of_items_that_is_none_is_refused(num_items: Any) -> None:
    script = Script()
    controller = create_elastic_controller(BATCH, 1, state=script.state)
    batch = next(iter(controller.loader(dataset())))
    with pytest.raises(JobError, match="num_items of a step is"), controller.step(num_items):
        script.train(batch)
    assert controller.is_over, "the others are told, and the master"


@pytest.mark.parametrize("num_items", [BATCH, BATCH * 2**16])
def test_a_step_of_which_some_batches_only_have_a_number_of_items_is_refused(num_items: int) -> None:
    """Also where records weigh little beside tokens."""
    script = Script()
    controller = create_elastic_controller(BATCH, 1, state=script.state, fixed_global_batch=2 * BATCH)
    numbers = iter([num_items, num_items, None, num_items])

    def train() -> None:
        for batch in controller.loader(dataset()):
            with controller.step(next(numbers)):
                script.train(batch)

    with pytest.raises(JobError, match="some batches of a step have num_items, and others have none"):
        train()
    assert next(numbers, "used up") == "used up"
    assert controller.num_steps == 1


def test_sparse_gradients_stay_so_in_a_step_of_several_minibatches() -> None:
    """SparseAdam takes no others: a script would train alone, and fail with a second worker."""
    data = TensorDataset(torch.randint(0, 20, (8, 3), generator=torch.Generator().manual_seed(2)))
    tables = []
    for size, fixed_global_batch in ((8, 0), (4, 8)):
        torch.manual_seed(1)
        table = nn.Embedding(20, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        controller = create_elastic_controller(size, 3, state=[table, optimizer], fixed_global_batch=fixed_global_batch)
        for _ in controller.epochs():
            for (words,) in controller.loader(data):
                with controller.step():
                    optimizer.zero_grad()
                    table(words).pow(2).mean().backward()
                    optimizer.step()
        assert controller.num_steps == 3
        tables.append(table.weight.detach())
    torch.testing.assert_close(*tables)


def test_several_losses_add_up_without_sync() -> None:
    def train(script: Script, batch: Any) -> None:
        script.optimizer.zero_grad()
        if controllers:
            with controllers[0].no_sync():
                loss_of(script.model, batch).backward()
        else:
            loss_of(script.model, batch).backward()
        script.model[3].weight.square().sum().backward()
        script.optimizer.step()

    controllers: list[ElasticController] = []
    expected = plain_loop(Script(train))
    script = Script(train)
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)
    controllers.append(controller)
    loader = controller.loader(dataset())
    for _ in controller.epochs():
        for batch in loader:
            with controller.step():
                script.train(batch)
    assert_equal(script.values(), expected)


def test_gradients_of_several_batches_are_not_added_up() -> None:
    script, number = Script(), iter(range(100))

    def accumulate(batch: Any) -> None:
        loss_of(script.model, batch).backward()
        if next(number) % 2:
            script.optimizer.step()
            script.optimizer.zero_grad()

    with pytest.raises(ModelDefinitionError, match="gradient of the batch before"):
        loop(create_elastic_controller(BATCH, EPOCHS, state=script.state), dataset(), accumulate)


@pytest.mark.parametrize("group", [1, 3])
def test_a_parameter_that_was_frozen_at_the_loader_is_not_trained_later(group: int) -> None:
    script, data = Script(), dataset()
    script.bare[0].requires_grad_(False)
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state, fixed_global_batch=group * BATCH)
    loop(controller, data, script.train)
    script.bare[0].weight.requires_grad_(True)
    with pytest.raises(ModelDefinitionError, match=r"^0\.weight is trained now"):
        loop(controller, data, script.train)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_batch_may_leave_its_update_out(set_to_none: bool) -> None:
    script, number = Script(), iter(range(100))

    def skip_some(batch: Any) -> None:
        script.optimizer.zero_grad(set_to_none)
        loss_of(script.model, batch).backward()
        if next(number) % 2:
            script.optimizer.step()

    loop(create_elastic_controller(BATCH, 1, state=script.state), dataset(), skip_some)
    assert int(script.optimizer.state_dict()["state"][0]["step"]) == -(-SIZE // BATCH) // 2


def test_evaluation_after_every_epoch_leaves_training_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    data = dataset()
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)

    @controller.on_evaluation(SIZE)
    def evaluate(indices: range) -> dict[str, float]:
        assert not script.bare.training
        torch.rand(3)
        right = script.model(data.tensors[0][list(indices)]).sign() == data.tensors[1][list(indices)]
        return {"accuracy": float(right.float().mean())}

    with caplog.at_level(logging.INFO, "elasticdl.api"):
        loader = controller.loader(data)
        for _ in controller.epochs():
            for batch in loader:
                with controller.step():
                    script.train(batch)
    assert script.bare.training
    assert_equal(script.values(), plain_loop(Script()))
    lines = [record.getMessage() for record in caplog.records if "Evaluation metrics" in record.getMessage()]
    assert [line.split(":")[0] for line in lines] == ["Evaluation metrics[step=7]", "Evaluation metrics[step=14]"]


def test_what_cannot_be_is_refused() -> None:
    script = Script()
    with pytest.raises(ModelDefinitionError, match="state_dict"):
        create_elastic_controller(BATCH, state=[object()])
    with pytest.raises(ModelDefinitionError, match="No model"):
        create_elastic_controller(BATCH).loader(dataset())
    waves = nn.Linear(2, 1, dtype=torch.complex64)
    with pytest.raises(ModelDefinitionError, match=r"^weight is complex"):
        create_elastic_controller(BATCH, state=[waves]).loader(dataset())
    with pytest.raises(FlagError, match="not a multiple"):
        create_elastic_controller(BATCH, state=script.state, fixed_global_batch=BATCH + 1).loader(dataset())
    controller = create_elastic_controller(BATCH, state=script.state)
    with pytest.raises(JobError, match="no data"), controller.step():
        pass
    with pytest.raises(JobError, match="without backward"):
        loop(controller, dataset(), lambda batch: None)
    controller = create_elastic_controller(BATCH, state=script.state)
    with pytest.raises(JobError, match="not trained"):
        list(controller.loader(dataset()))


def test_an_error_of_the_script_is_the_scripts() -> None:
    script = Script()
    controller = create_elastic_controller(BATCH, state=script.state)
    with pytest.raises(ZeroDivisionError):
        loop(controller, dataset(), lambda batch: 1 / 0)


def test_a_loop_that_continues_after_an_error_of_a_step_does_not_end_like_a_whole_one() -> None:
    controller = create_elastic_controller(BATCH, state=Script().state)
    batches = iter(controller.loader(dataset()))
    next(batches)
    with suppress(ZeroDivisionError), controller.step():
        raise ZeroDivisionError
    with pytest.raises(JobError, match=r"caught an error of a step, .* and continues: ZeroDivisionError"):
        next(batches)
