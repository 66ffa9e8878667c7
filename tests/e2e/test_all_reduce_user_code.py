"""User code that misbehaves in one member of an AllReduce job: each with its message, and no member is left waiting."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from elasticdl_client.explain.diagnosis import Trouble
from tests.chaos.job import LocalJob
from tests.chaos.jobs import DIGITS, RealJob
from tests.chaos.scenarios import assert_exact, coverage_of
from tests.e2e.all_reduce_jobs import JOB, KERAS, TORCH, all_reduce_job, worker_logs
from tests.e2e.ugly_sevens import NOT_FINITE, RAISES, check_some_are_skipped, records_set_aside
from tests.explain.explained import the_trouble

pytestmark = pytest.mark.timeout(240)

TWO = replace(JOB, num_workers=2)
TORCH_FIRST = pytest.mark.parametrize("framework", [TORCH, pytest.param(KERAS, marks=pytest.mark.full)])
# An update of the second worker after its twentieth call, once in the job's life.
UPDATE_RAISES = {
    KERAS: """
        import os
        from pathlib import Path

        class Moody(keras.optimizers.SGD):
            calls = 0

            def apply(self, grads, trainable_variables=None):
                return super().apply(grads, trainable_variables)

            def update_step(self, gradient, variable, learning_rate):
                tf.py_function(sulk, [], [])
                super().update_step(gradient, variable, learning_rate)

        def optimizer():
            return Moody(0.1, momentum=0.9)
        """,
    TORCH: """
        class Moody(torch.optim.SGD):
            def step(self, closure=None):
                sulk()
                return super().step(closure)

        def optimizer(model):
            return Moody(model.parameters(), lr=0.1, momentum=0.9)
        """,
}
NOTED_SCHEDULE = """
        def noted(step):
            print("The schedule is at", step, flush=True)
            return 1.0

        def lr_scheduler(optimizer):
            return torch.optim.lr_scheduler.LambdaLR(optimizer, noted)
        """
LOSS_RAISES = """
        def loss(labels, predictions):
            raise ValueError("an ugly loss")
        """
SULK = """
        import os
        from pathlib import Path

        counted = [0]

        def sulk():
            counted[0] += 1
            once = Path(os.environ["SULK"])
            if counted[0] > 20 and os.environ["WORKER_ID"] == "1" and not once.exists():
                once.touch()
                raise RuntimeError("sulking on purpose")
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DIGITS.make_data(tmp_path_factory.mktemp("data"))


@TORCH_FIRST
def test_gradients_that_are_not_finite_fail_the_job_and_say_where(framework: str, tmp_path: Path, digits: Path) -> None:
    running = all_reduce_job(framework, tmp_path, digits, NOT_FINITE[framework], TWO).start()
    assert running.wait(120) == 1, running.story()
    text = "\n".join(running.output)
    assert "Traceback" not in text, text
    assert "nan" in text.lower(), running.story()
    assert "minibatch" in text
    assert "--nan_policy" in text


@TORCH_FIRST
def test_a_feed_that_raises_on_a_record_fails_the_job_after_the_retries(
    framework: str, tmp_path: Path, digits: Path
) -> None:
    running = all_reduce_job(framework, tmp_path, digits, RAISES[framework], TWO, max_task_failures=2).start()
    assert running.wait(120) == 1, running.story()
    text = "\n".join(running.output)
    assert "Traceback" not in text, text
    assert "an ugly seven" in text
    assert "silent for" not in running.master_log(), running.story()  # the others went on meanwhile


@TORCH_FIRST
def test_a_loss_that_raises_in_every_member_fails_the_job_after_the_retries(
    framework: str, tmp_path: Path, digits: Path
) -> None:
    flags = {"min_workers": TWO.num_workers, "max_task_failures": 2}
    running = all_reduce_job(framework, tmp_path, digits, LOSS_RAISES, TWO, **flags).start()
    assert running.wait(120) == 1, running.story()
    text = "\n".join(running.output)
    assert "an ugly loss" in text, text
    assert "failed 2 times" in text, text
    diagnosis = the_trouble(tmp_path / "job", Trouble.LOSS_RAISED)
    assert diagnosis.is_fatal
    assert "an ugly loss" in diagnosis.seen


def test_an_update_that_raises_in_a_member_without_a_minibatch_is_reported_and_tried_again(
    tmp_path: Path, digits: Path
) -> None:
    """A step is one minibatch, of rank 0; it is worker 1 that cannot apply it."""
    job = replace(TWO, num_epochs=2)
    flags = {"min_workers": TWO.num_workers, "fixed_global_batch": TWO.minibatch_size}
    running = all_reduce_job(TORCH, tmp_path, digits, SULK + UPDATE_RAISES[TORCH], job, **flags)
    running.environment["SULK"] = str(tmp_path / "sulked")
    assert running.start().wait() == 0, running.story()
    assert_exact(running, job)
    assert "sulking on purpose" in worker_logs(running), running.story()
    assert "IndexError" not in worker_logs(running)


class Life(NamedTuple):
    """A job that lives through three troubles of its user's code."""

    running: LocalJob
    job: RealJob


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((KERAS, TWO, False), id="keras-free"),
        pytest.param((TORCH, JOB, True), id="torch-fixed"),
        pytest.param((KERAS, TWO, True), id="keras-fixed", marks=pytest.mark.full),
        pytest.param((TORCH, JOB, False), id="torch-free", marks=pytest.mark.full),
    ],
)
def survivor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Life:
    """A job, at its end, with records that `feed` does not take, others of no finite number, and a failed update."""
    framework, job, is_fixed = request.param
    directory = tmp_path_factory.mktemp(framework)
    job = replace(job, num_epochs=4)
    flags: dict[str, object] = {"nan_policy": "skip", "max_bad_records": 20}
    flags["min_workers"] = job.num_workers  # worker 1 takes part in every step
    if is_fixed:
        flags["fixed_global_batch"] = job.num_workers * job.minibatch_size
    code = "\n".join(map(textwrap.dedent, (NOT_FINITE[framework], RAISES[framework], SULK, UPDATE_RAISES[framework])))
    running = all_reduce_job(framework, directory, digits, code, job, **flags)
    running.environment["SULK"] = str(directory / "sulked")
    assert running.start().wait(200) == 0, running.story()
    return Life(running, job)


def test_minibatches_that_are_not_finite_are_skipped_and_counted(survivor: Life) -> None:
    check_some_are_skipped(survivor.running, survivor.job)


def test_bad_records_are_set_aside_and_counted(survivor: Life) -> None:
    assert records_set_aside(survivor.running, survivor.job)


def test_an_update_that_raises_in_one_member_is_tried_again(survivor: Life) -> None:
    running = survivor.running
    assert "sulking on purpose" in worker_logs(running), running.story()
    for epoch in coverage_of(running):
        assert (epoch.committed + epoch.skipped + epoch.quarantined, epoch.repeated, epoch.lost) == (1437, 0, 0)


@pytest.mark.parametrize(("flags", "last"), [({"fixed_global_batch": 4 * 32}, 15), ({}, 58)])
def test_a_schedule_counts_the_steps_of_a_fixed_global_batch(
    tmp_path: Path, digits: Path, flags: dict[str, object], last: int
) -> None:
    """Else minibatches, whatever number of them is a step."""
    flags = {"max_step": 60, "validation_data": "", "num_workers": 1} | flags  # the 45th minibatch is a smaller one
    running = all_reduce_job(TORCH, tmp_path, digits, NOTED_SCHEDULE, **flags).start()
    assert running.wait(200) == 0, running.story()
    asked = re.findall(r"The schedule is at (\d+)", worker_logs(running))
    assert max(map(int, asked)) == last
