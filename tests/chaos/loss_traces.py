"""The loss of every step of AllReduce jobs with --fixed_global_batch, whose workers come and go."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos.job import LocalJob
from tests.chaos.jobs import DIGITS
from tests.chaos.kills import Fault
from tests.chaos.scenarios import assert_exact
from tests.e2e.all_reduce_jobs import KERAS, TORCH, all_reduce_job, worker_logs

FRAMEWORKS = (KERAS, TORCH)
JOB = replace(DIGITS, num_epochs=17, num_ps_pods=0)
MINIBATCHES = 4  # of a step
NUM_STEPS = 204  # twelve an epoch
BOUND = 1e-4  # of the difference of two losses of one step, relative: by the order of sums, over 200 steps
KERAS_NORMALIZED = """
    def custom_model():
        pixels = keras.Input((64,))
        x = keras.layers.Conv2D(8, 3, use_bias=False)(keras.layers.Reshape((8, 8, 1))(pixels))
        x = keras.layers.Activation("relu")(keras.layers.BatchNormalization(momentum=0.9)(x))
        x = keras.layers.Dropout(0.3)(keras.layers.Flatten()(x))
        return keras.Model(pixels, keras.layers.Dense(10)(x))
"""
_PACE = "pace"  # a file beside the zoo: seconds that reading a task takes
_PACED = """
    import threading
    from pathlib import Path

    feed_at_once = feed

    def wait(share=1.0):
        threading.Event().wait(share * float(Path({path!r}).read_text()))
"""
_PACED_FEED = {
    KERAS: """
    def late(label):
        wait(1 / 128)  # the records of a task
        return label

    def feed(dataset, mode, metadata):
        dataset = feed_at_once(dataset, mode, metadata)
        if mode != "training":
            return dataset

        def paced(image, label):
            return image, tf.ensure_shape(tf.numpy_function(late, [label], tf.int64), label.shape)

        return dataset.map(paced)
""",
    TORCH: """
    def feed(records, mode, metadata):
        if mode == "training":
            wait()
        return feed_at_once(records, mode, metadata)
""",
}
_WALK_S, _CREEP_S = 0.05, 2.0
_LONGEST_S = 900.0


@dataclass(frozen=True, slots=True)
class Resize:
    """There is room for this number of workers from `at_version` on; the job creeps until their group has formed."""

    num_workers: int
    at_version: int

    def strike(self, job: LocalJob) -> int:
        formed = len(sizes_of_groups(job))
        pace = job.job_dir.parent / _PACE
        _write(pace, _CREEP_S)
        job.cluster().set_slots(self.num_workers)
        wait_for_group(job, self.num_workers, formed)
        _write(pace, _WALK_S)
        return 0


UP_AND_DOWN = (Resize(2, 200), Resize(3, 400), Resize(1, 600))
"""Of a job of four workers: 4, 2, 3, 1."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole job.

    Attributes:
        losses: of the steps, in order.
        groups: number of the first step of each group of another size than the one before, and that size.
    """

    losses: tuple[float, ...]
    groups: tuple[tuple[int, int], ...]

    def differences(self, other: Trace) -> list[float]:
        """Relative, by step."""
        return [abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True)]


def _write(pace: Path, seconds: float) -> None:
    """At once: it may be read at any time."""
    new = pace.with_suffix(".new")
    new.write_text(str(seconds))
    new.replace(pace)


def wait_for_group(job: LocalJob, size: int, after: int = 0) -> None:
    """Wait until there has been one of that size after a number of others."""
    job.wait_until(f"a group of {size}", lambda: size in sizes_of_groups(job)[after:], _LONGEST_S)


def sizes_of_groups(job: LocalJob) -> list[int]:
    return [int(size) for size in re.findall(r"Group \d+ of (\d+) worker", job.master_log())]


def trace(framework: str, directory: Path, data: Path, num_workers: int, life: Sequence[Fault] = ()) -> Trace:
    """Runs a job of a number of workers, with a life, to its end; all members must agree on the loss of each step."""
    directory.mkdir()
    pace = directory / _PACE
    _write(pace, _CREEP_S if life else 0)
    code = (KERAS_NORMALIZED if framework == KERAS else "") + _PACED.format(path=str(pace)) + _PACED_FEED[framework]
    job = replace(JOB, num_workers=num_workers)
    flags: dict[str, object] = {
        "fixed_global_batch": MINIBATCHES * job.minibatch_size,
        "local_slots": num_workers,
        "min_workers": 1 if life else num_workers,
        "seed": 7,
        "envs": "OMP_NUM_THREADS=1",  # four share the cores of one machine
    }
    running = all_reduce_job(framework, directory, data, code, job, **flags).start()
    try:
        if life:
            wait_for_group(running, num_workers)
            _write(pace, _WALK_S)
        for fault in life:
            running.wait_for_version(fault.at_version, _LONGEST_S)
            fault.strike(running)
        assert running.wait(_LONGEST_S) == 0, running.story()
    finally:
        running.end()
    assert_exact(running, job)
    return _read(running)


def _read(running: LocalJob) -> Trace:
    losses: dict[int, set[str]] = {}
    for step, loss in re.findall(r"Step (\d+): loss (\S+)", worker_logs(running)):
        losses.setdefault(int(step), set()).add(loss)
    assert all(len(seen) == 1 for seen in losses.values()), "members disagree on the loss of a step"
    assert sorted(losses) == list(range(1, NUM_STEPS + 1)), running.story()
    members = _members_by_step(running)
    changes = [step for step in members if members[step] != members.get(step - 1)]
    return Trace(
        tuple(float(next(iter(losses[step]))) for step in sorted(losses)),
        tuple((step, members[step]) for step in sorted(changes)),
    )


def _members_by_step(running: LocalJob) -> dict[int, int]:
    """How many workers have done each step."""
    counts: dict[int, int] = {}
    for path in (running.job_dir / "logs").glob("*worker*.log"):
        for step in {int(step) for step in re.findall(r"Step (\d+): loss", path.read_text())}:
            counts[step] = counts.get(step, 0) + 1
    return counts
