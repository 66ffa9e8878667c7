"""User code that misbehaves in one member of an AllReduce job: each with its message, and no member is left waiting."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl_client.explain.diagnosis import Trouble
from tests.chaos.jobs import DIGITS
from tests.chaos.scenarios import assert_exact, coverage_of
from tests.e2e.all_reduce_jobs import JOB, KERAS, TORCH, all_reduce_job, worker_logs
from tests.e2e.ugly_sevens import NOT_FINITE, RAISES, check_some_are_skipped
from tests.explain.explained import the_trouble

pytestmark = pytest.mark.timeout(240)

BOTH = pytest.mark.parametrize("framework", [KERAS, TORCH])
KERAS_FIRST = pytest.mark.parametrize("framework", [KERAS, pytest.param(TORCH, marks=pytest.mark.full)])
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
            return Moody(0.1)
        """,
    TORCH: """
        class Moody(torch.optim.SGD):
            def step(self, closure=None):
                sulk()
                return super().step(closure)

        def optimizer(model):
            return Moody(model.parameters(), lr=0.1)
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
    running = all_reduce_job(framework, tmp_path, digits, NOT_FINITE[framework]).start()
    assert running.wait(120) == 1, running.story()
    text = "\n".join(running.output)
    assert "Traceback" not in text, text
    assert "nan" in text.lower(), running.story()
    assert "minibatch" in text
    assert "--nan_policy" in text


@pytest.mark.parametrize(
    ("framework", "fixed"),
    [
        pytest.param(KERAS, 0, id="keras-free"),
        pytest.param(TORCH, 3 * JOB.minibatch_size, id="torch-fixed"),
        pytest.param(KERAS, 3 * JOB.minibatch_size, id="keras-fixed", marks=pytest.mark.full),
        pytest.param(TORCH, 0, id="torch-free", marks=pytest.mark.full),
    ],
)
def test_minibatches_that_are_not_finite_are_skipped_and_counted(
    framework: str, fixed: int, tmp_path: Path, digits: Path
) -> None:
    flags = {"fixed_global_batch": fixed} if fixed else {}
    running = all_reduce_job(framework, tmp_path, digits, NOT_FINITE[framework], nan_policy="skip", **flags).start()
    assert running.wait() == 0, running.story()
    check_some_are_skipped(running, JOB)


@TORCH_FIRST
def test_a_feed_that_raises_on_a_record_fails_the_job_after_the_retries(
    framework: str, tmp_path: Path, digits: Path
) -> None:
    running = all_reduce_job(framework, tmp_path, digits, RAISES[framework], max_task_failures=2).start()
    assert running.wait(120) == 1, running.story()
    text = "\n".join(running.output)
    assert "Traceback" not in text, text
    assert "an ugly seven" in text
    assert "silent for" not in running.master_log(), running.story()  # the others went on meanwhile


@TORCH_FIRST
def test_a_loss_that_raises_in_every_member_fails_the_job_after_the_retries(
    framework: str, tmp_path: Path, digits: Path
) -> None:
    flags = {"min_workers": JOB.num_workers, "max_task_failures": 2}
    running = all_reduce_job(framework, tmp_path, digits, LOSS_RAISES, **flags).start()
    assert running.wait(120) == 1, running.story()
    text = "\n".join(running.output)
    assert "an ugly loss" in text, text
    assert "failed 2 times" in text, text
    diagnosis = the_trouble(tmp_path / "job", Trouble.LOSS_RAISED)
    assert diagnosis.is_fatal
    assert "an ugly loss" in diagnosis.seen


@KERAS_FIRST
def test_bad_records_are_set_aside_and_counted(framework: str, tmp_path: Path, digits: Path) -> None:
    job = replace(JOB, num_epochs=2, num_workers=2)
    flags = {"validation_data": "", "max_bad_records": 20}
    running = all_reduce_job(framework, tmp_path, digits, RAISES[framework], job, **flags).start()
    assert running.wait(120) == 0, running.story()
    for epoch in coverage_of(running):
        assert epoch.quarantined > 0
        assert (epoch.committed, epoch.repeated, epoch.lost) == (1437 - epoch.quarantined, 0, 0)
    files = (tmp_path / "job" / "bad_records").iterdir()
    assert sum(len(file.read_text().splitlines()) for file in files) == coverage_of(running)[-1].quarantined


def test_an_update_that_raises_in_a_member_without_a_minibatch_is_reported_and_tried_again(
    tmp_path: Path, digits: Path
) -> None:
    """A step is one minibatch, of rank 0; it is worker 1 that cannot apply it."""
    job = replace(JOB, num_epochs=2)
    flags = {"min_workers": JOB.num_workers, "fixed_global_batch": JOB.minibatch_size}
    running = all_reduce_job(TORCH, tmp_path, digits, SULK + UPDATE_RAISES[TORCH], job, **flags)
    running.environment["SULK"] = str(tmp_path / "sulked")
    assert running.start().wait() == 0, running.story()
    assert_exact(running, job)
    assert "sulking on purpose" in worker_logs(running), running.story()
    assert "IndexError" not in worker_logs(running)


@BOTH
def test_an_update_that_raises_in_one_member_is_tried_again(framework: str, tmp_path: Path, digits: Path) -> None:
    code = SULK + UPDATE_RAISES[framework]
    job = replace(JOB, num_epochs=4)
    flags = {"min_workers": JOB.num_workers}  # worker 1 takes part in every step
    running = all_reduce_job(framework, tmp_path, digits, code, job, **flags)
    running.environment["SULK"] = str(tmp_path / "sulked")
    assert running.start().wait() == 0, running.story()
    assert_exact(running, job)
    assert "sulking on purpose" in worker_logs(running), running.story()


@pytest.mark.parametrize(("flags", "last"), [({"fixed_global_batch": 4 * 32}, 15), ({}, 58)])
def test_a_schedule_counts_the_steps_of_a_fixed_global_batch(
    tmp_path: Path, flags: dict[str, object], last: int
) -> None:
    """Else minibatches, whatever number of them is a step."""
    flags = {"max_step": 60, "validation_data": "", "num_workers": 1} | flags  # the 45th minibatch is a smaller one
    running = all_reduce_job(TORCH, tmp_path, JOB.make_data(tmp_path), NOTED_SCHEDULE, **flags).start()
    assert running.wait(200) == 0, running.story()
    asked = re.findall(r"The schedule is at (\d+)", worker_logs(running))
    assert max(map(int, asked)) == last
