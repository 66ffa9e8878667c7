"""Parts of the adapters for trainers of other libraries: trainable state, mean losses, steps that are left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch_loops import BATCH, EPOCHS, SIZE, Script, dataset, loss_of
from torch import nn

from elasticdl.activities import Activity
from elasticdl.api.pytorch import create_elastic_controller, join_job
from elasticdl.api.pytorch.alone import LoneGroup
from elasticdl.api.pytorch.state import RegisteredState
from elasticdl.api.pytorch.trainers import CollateParts, check_epochs, check_minibatch_size
from elasticdl_client.errors import CheckpointError, JobError
from elasticdl_client.job_spec import JobSpec

pytestmark = pytest.mark.usefixtures("one_thread")
PER_EPOCH = -(-SIZE // BATCH)


def adapted(seed: int, rank: int = 4) -> nn.Module:
    """A large frozen layer with a small trained one beside it, and running statistics."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"base": nn.Linear(256, 256), "adapter": nn.Linear(256, rank), "norm": nn.BatchNorm1d(rank)})
    model["base"].requires_grad_(False)
    return model


def state_of(model: nn.Module) -> RegisteredState:
    state = RegisteredState(trainable_only=True)
    state.add(model)
    state.add(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    return state


def test_the_state_of_a_model_with_an_adapter_is_the_adapters() -> None:
    model = adapted(1)
    sent = state_of(model).state()
    adapter = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert sum(array.nbytes for array in sent.values()) < 2 * adapter
    assert sum(array.nbytes for array in sent.values()) < 256 * 256  # a quarter of the base

    other = adapted(1)
    nn.init.zeros_(other["adapter"].weight)
    state_of(other).load_state(sent)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_what_rank_0_shares_is_waited_for_as_for_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long evaluation in rank 0 is no hang of the others."""
    script, activities = Script(), []
    session = join_job()
    share = LoneGroup.share

    def noted(group: LoneGroup, data: bytes | None, source: int = 0) -> bytes:
        activities.append(session.clock.read()[0])
        return share(group, data, source)

    monkeypatch.setattr(LoneGroup, "share", noted)
    controller = create_elastic_controller(BATCH, 1, state=script.state, session=session)
    for batch in controller.loader(dataset()):
        with controller.step():
            script.train(batch)
        controller.share(b"metrics")
    assert set(activities) == {Activity.COLLECTIVE}


def test_another_base_model_is_refused_in_words() -> None:
    with pytest.raises(CheckpointError, match="load the same pretrained weights in every worker"):
        state_of(adapted(2)).load_state(state_of(adapted(1)).state())


def test_another_adapter_is_refused_by_its_names() -> None:
    other = adapted(1)
    other["base"].bias.requires_grad_(True)
    with pytest.raises(CheckpointError, match=r"other parameters are trained here, among them base\.bias"):
        state_of(other).load_state(state_of(adapted(1)).state())


def test_a_worker_joins_others_that_have_frozen_more_since_their_start() -> None:
    model, other = adapted(1), adapted(1)
    state, others = state_of(model), state_of(other)
    state.state(), others.state()  # as at loader()
    model["norm"].requires_grad_(False)
    nn.init.zeros_(model["adapter"].weight)
    others.load_state(state.state())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    state.load_state(others.state())


@pytest.mark.parametrize("group", [1, 3])
def test_the_loss_of_a_step_is_the_mean_over_its_records(group: int) -> None:
    """A step of several minibatches, as with a fixed global batch, has the mean over all of them."""
    script = Script()
    options: dict[str, Any] = {"fixed_global_batch": BATCH * group} if group > 1 else {}
    controller = create_elastic_controller(BATCH, 1, state=script.state, **options)
    sums, records = 0.0, 0
    for batch in controller.loader(dataset()):
        with controller.step():
            script.optimizer.zero_grad()
            loss = loss_of(script.model, batch)
            sums, records = sums + float(loss.detach()) * len(batch[0]), records + len(batch[0])
            controller.add_loss(loss)
            loss.backward()
            assert float(controller.mean_loss) == pytest.approx(sums / records, rel=1e-5)
            script.optimizer.step()
            sums, records = 0.0, 0


@pytest.mark.parametrize(("group", "num_steps"), [(1, 14), (3, 6)])
def test_the_steps_that_are_left_are_known(group: int, num_steps: int) -> None:
    script = Script()
    options: dict[str, Any] = {"fixed_global_batch": BATCH * group} if group > 1 else {}
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state, **options)
    loader = controller.loader(dataset())
    left: list[Any] = [controller.num_steps_left]
    for _ in controller.epochs():
        for batch in loader:
            with controller.step():
                script.train(batch)
                assert controller.num_steps_left == left[-1] - 1, "without the one that is being made"
            left += [controller.num_steps_left] if not controller.num_minibatches_in_step else []
    assert left == list(range(num_steps, -1, -1))
    assert controller.epochs_trained == EPOCHS


def test_optimizers_may_be_registered_after_the_loader_and_models_may_not() -> None:
    script = Script()
    controller = create_elastic_controller(BATCH, 1, state=[script.bare])
    loader = controller.loader(dataset())
    with pytest.raises(JobError, match="register\\(\\) of a model comes too late"):
        controller.register(nn.Linear(2, 2))
    controller.register(script.optimizer)
    assert controller.state.optimizers == [script.optimizer]
    for batch in loader:
        with controller.step():
            script.train(batch)
        break
    with pytest.raises(JobError, match="training has begun"):
        controller.register(script.scheduler)


def test_what_contradicts_the_jobs_flags_is_refused() -> None:
    spec = JobSpec(num_epochs=5, minibatch_size=32)
    check_epochs(spec, 5, "num_train_epochs")
    check_minibatch_size(JobSpec(), 16, "per_device_train_batch_size")
    with pytest.raises(JobError, match="--num_epochs is 5, and the script trains for 3 epochs"):
        check_epochs(spec, 3, "num_train_epochs")
    with pytest.raises(JobError, match="--minibatch_size is 32, and the script's batches have 16"):
        check_minibatch_size(spec, 16, "per_device_train_batch_size")


def test_the_parts_of_a_minibatch_have_the_size_of_the_scripts_batches() -> None:
    assert CollateParts(sum, 8)(range(20)) == [(8, 28), (8, 92), (4, 70)]
