"""Scripts with several `backward()` for a batch: two models with an optimizer each (GANs), or several losses."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from noted_jobs import agreed_steps, noted_job
from pytorch_gan_script import Gan, images
from pytorch_loops import BATCH, EPOCHS, SIZE, Script, assert_equal, dataset, loop, loss_of, minibatches, plain_loop
from torch.utils.data import TensorDataset

from elasticdl.activities import ActivityClock
from elasticdl.api.pytorch import create_elastic_controller
from elasticdl.api.pytorch.gradients import ScriptGradients, StepPosition
from elasticdl.api.pytorch.pipeline import joined
from elasticdl.protocol import Role
from elasticdl_client.errors import ModelDefinitionError
from tests.chaos.job import LocalJob
from tests.chaos.scenarios import coverage_of

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = Path(__file__).with_name("pytorch_gan_script.py")
RECORDS = 400


def noise_of(real: torch.Tensor) -> torch.Tensor:
    return real[:, 0, :1, :].reshape(len(real), 8, 1, 1)


def plain_gan(group: int) -> dict[str, torch.Tensor]:
    gan, data = Gan(), images(SIZE)
    given = minibatches()
    while given:
        now = [m for m in given[:group] if m.epoch == given[0].epoch]
        given = given[len(now) :]
        real = data[[index for minibatch in now for index in minibatch.indices]]
        gan.train(real, noise_of(real))
    return values(gan)


def values(gan: Gan) -> dict[str, torch.Tensor]:
    return {f"{k}.{name}": value for k in range(2) for name, value in gan.state[k].state_dict().items()}


class Pair:
    """The group of a step with one more member, all of whose gradients are 1; both weigh by records."""

    def __init__(self, gradients: ScriptGradients) -> None:
        self._weights = gradients._counts[-2:]

    def begin_reduce(self, buffer: torch.Tensor) -> None:
        buffer.add_(1.0)

    def finish_reduce(self, reductions: list[None]) -> None:
        self._weights.copy_(torch.tensor([1.0, 0.0]))

    def continue_step(self) -> None:
        pass


def test_sums_of_sparse_gradients_are_sparse_after_each_backward_of_a_step() -> None:
    """SparseAdam takes no others."""
    table, words = torch.nn.Embedding(4, 2, sparse=True), torch.tensor([1, 3])
    gradients = ScriptGradients([table], ActivityClock())
    pair = cast(Any, Pair(gradients))
    for place in (StepPosition(1.0, True, True, is_own=True), StepPosition(0.5, True, True)):
        table.zero_grad()
        gradients.begin(place, pair)
        for factor in (1.0, 3.0):
            (factor * table(words)).sum().backward()
        gradients.end()
    found = table.weight.grad
    assert found is not None
    assert found.is_sparse
    assert found.to_dense().tolist() == [[2.0, 2.0], [4.0, 4.0]] * 2


def test_sums_of_sparse_gradients_of_the_other_members_alone_are_sparse() -> None:
    """As in the first step of a worker that joins, of whose gradients the rehearsal alone has shown the kind."""
    table, line = torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1)
    gradients = ScriptGradients([table, line], ActivityClock())
    line(table(torch.tensor([1]))).sum().backward()
    gradients.begin(StepPosition(0.5, True, True), cast(Any, Pair(gradients)))
    line(torch.ones(1, 2)).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse


def test_a_layer_that_is_frozen_while_backwards_are_counted_is_trained_later() -> None:
    """Each sum of this member, whose gradients weigh a half, is added to what is there."""
    body, head = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    gradients = ScriptGradients([body, head], ActivityClock())
    pair = cast(Any, Pair(gradients))
    found = []
    for is_trained, place in (
        (False, StepPosition(1.0, True, True, is_own=True)),
        (True, StepPosition(0.5, True, True)),
    ):
        body.requires_grad_(is_trained)
        for module in (body, head):
            module.zero_grad()
        gradients.begin(place, pair)
        for factor in (1.0, 3.0):
            (factor * (body(torch.ones(1)) + head(torch.ones(1)))).sum().backward()
        gradients.end()
        found.append([module.weight.grad for module in (body, head)])
    assert found == [[None, 4.0], [(1.0 / 2 + 1.0) + (3.0 / 2 + 1.0)] * 2]


@pytest.mark.parametrize("group", [1, 3])
def test_a_layer_may_be_frozen_after_the_loader_where_losses_are_several(group: int) -> None:
    script = Script(two_losses)
    controller = create_elastic_controller(
        BATCH, EPOCHS, state=script.state, fixed_global_batch=group * BATCH if group > 1 else 0
    )
    loader = controller.loader(DATA)
    other = Script(two_losses)
    for one in (script, other):
        one.bare[0].requires_grad_(False)
    for _ in controller.epochs():
        for batch in loader:
            with controller.step():
                script.train(batch)
    assert_equal(script.values(), plain_loop(other, group))


@pytest.mark.parametrize("group", [1, 3])
def test_a_gan_alone_is_a_plain_loop(group: int) -> None:
    gan = Gan()
    fixed = group * BATCH if group > 1 else 0
    controller = create_elastic_controller(BATCH, EPOCHS, state=gan.state, fixed_global_batch=fixed)
    loader = controller.loader(TensorDataset(images(SIZE)))
    for _ in controller.epochs():
        for (real,) in loader:
            with controller.step():
                gan.train(real, noise_of(real))
    assert controller.num_steps == EPOCHS * -(-7 // group)
    assert_equal(values(gan), plain_gan(group))


def two_losses(script: Script, batch: Any) -> None:
    script.optimizer.zero_grad()
    loss_of(script.model, batch).backward()
    script.model[3].weight.square().sum().backward()
    script.optimizer.step()


def test_batches_are_joined_by_columns_or_as_lists_of_samples() -> None:
    def columns(size: int) -> dict[str, Any]:
        return {"image": torch.zeros(size, 3), "parts": [torch.zeros(size), torch.zeros(size, 2)], "name": ["a"] * size}

    both = joined([columns(2), columns(2)], [2, 2])
    assert [len(both["image"]), len(both["name"]), *map(len, both["parts"])] == [4, 4, 4, 4]
    samples = joined([(torch.zeros(3, 8), torch.zeros(3, 9)), (torch.zeros(3, 8),)], [2, 1])
    assert [tuple(sample.shape) for sample in samples] == [(3, 8), (3, 9), (3, 8)]
    images, boxes = joined([([torch.zeros(3, 8)] * 2, [{"box": torch.zeros(4)}] * 2) for _ in range(2)], [2, 2])
    assert (len(images), len(boxes), len(images[0])) == (4, 4, 3)


def test_two_losses_add_up_in_one_update() -> None:
    script = Script(two_losses)
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)
    for _ in controller.epochs():
        loop(controller, DATA, script.train)
    assert_equal(script.values(), plain_loop(Script(two_losses)))


DATA = dataset()


def check(tmp_path: Path, job: LocalJob) -> list[list[str]]:
    """Every record was trained once, and all workers have the same models after each step; return those."""
    assert [(c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(RECORDS, 0, 0)] * 2, job.story()
    return agreed_steps(tmp_path)


def test_a_worker_is_killed_between_two_backwards_of_a_step(tmp_path: Path) -> None:
    """The survivor has updated the discriminator, and makes the step again."""
    job = noted_job(SCRIPT, tmp_path, "--hold-at 4", num_workers=2, min_workers=2).start()
    job.wait_until("worker 1 to hold", (tmp_path / "notes" / "held").exists, 90)
    os.kill(next(pod for pod in job.pods(Role.WORKER) if pod.index == 1).pid, signal.SIGKILL)
    assert job.wait(150) == 0, job.story()
    check(tmp_path, job)


def test_the_models_do_not_depend_on_workers_and_their_losses(tmp_path: Path) -> None:
    """Each step has four minibatches: two workers sum up those of each, and one is killed between two backwards."""
    found = []
    for number in (1, 2):
        directory = tmp_path / str(number)
        flags = {"num_workers": number, "min_workers": number, "fixed_global_batch": 32, "minibatch_size": 8}
        job = noted_job(SCRIPT, directory, "--plain --hold-at 4", **flags).start()
        if number == 2:
            job.wait_until("worker 1 to hold", (directory / "notes" / "held").exists, 90)
            os.kill(next(pod for pod in job.pods(Role.WORKER) if pod.index == 1).pid, signal.SIGKILL)
        assert job.wait(150) == 0, job.story()
        found.append(torch.tensor([float(weight) for _, weight in check(directory, job)]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("calls", "complaint"),
    [
        ("local, summed; local, summed, summed", "and the first batch had one backward()"),
        ("local, summed, summed; local", "controller.no_sync() stands in a batch that has several backward()"),
    ],
)
def test_what_cannot_be_summed_is_refused(calls: str, complaint: str) -> None:
    line = torch.nn.Linear(1, 1)
    gradients = ScriptGradients([line], ActivityClock())
    pair = cast(Any, Pair(gradients))

    def train(batch: str, place: StepPosition) -> None:
        gradients.begin(place, pair)
        line.zero_grad()
        for call in batch.split(", "):
            with gradients.no_sync() if call == "local" else nullcontext():
                line(torch.ones(1)).sum().backward()
        gradients.end()

    first, later = calls.split("; ")
    train(first, StepPosition(1.0, True, True, is_own=True))
    with pytest.raises(ModelDefinitionError) as refused:
        train(later, StepPosition(0.5, True, True))
    assert complaint in str(refused.value)


def test_what_cannot_be_summed_is_refused_at_once_with_the_scripts_line(tmp_path: Path) -> None:
    job = noted_job(SCRIPT, tmp_path, "--every 5", num_workers=2, min_workers=2).start()
    assert job.wait(120) == 1, job.story()
    output = "\n".join(job.output)
    assert "calls backward() once more in a step that worker" in output, job.story()
    assert f'File "{SCRIPT}", line ' in output
    assert not list((job.job_dir / "logs").glob("*worker-2*")), "it was tried again"
