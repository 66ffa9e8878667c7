"""The cost of goodput in a worker: noting what the main thread does, of the processor time of a step.

``python -m benchmarks.goodput [--quick] [--json]``: a difference of microseconds drowns in a step of milliseconds, so
both are measured apart, in processor time: one note (`ActivityClock.during`) by itself, and a step of a real loop
(the Local strategy, a small Keras model on the digits, minibatches of 32), whose notes are counted.  The loops of the
other strategies take more notes for a step, `NOTES`, and more time besides: their share is given for the same step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from elasticdl.activities import Activity, ActivityClock
from elasticdl.frameworks.framework import Batch, Framework, Mode, TaskRecords
from elasticdl.model_def import load_model_definition
from elasticdl.protocol import Shard
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.checkpoint import StateCheckpoints
from elasticdl.worker.factories import Readers, load_framework
from elasticdl.worker.local import STATE_FILE, LocalStrategy
from elasticdl.worker.tasks import HeldLease, TaskBatches
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.job_spec import JobSpec

NOTES = {"parameter_servers": 3, "all_reduce": 6}  # input, compute, PS; input, header, compute, sums, update, save
MINIBATCH = 32
HEARTBEATS_PER_S = 1.0
LEASE = 7


class CountingClock(ActivityClock):
    """Counts its notes; a block is two, its beginning and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.num_switches = 0

    def switch(self, activity: Activity) -> Activity:
        self.num_switches += 1
        return super().switch(activity)


def seconds_of_note(rounds: int) -> float:
    """Processor time of an empty block; the best of five."""
    clock = ActivityClock()
    best = float("inf")
    for _ in range(5):
        begun = time.process_time()
        for _ in range(rounds):
            with clock.during(Activity.COMPUTE):
                pass
        best = min(best, (time.process_time() - begun) / rounds)
    return best


def seconds_of_reading(rounds: int) -> float:
    """Processor time of what a heartbeat adds: reading the clock, and the map in its message."""
    clock = ActivityClock()
    for activity in Activity:
        clock.switch(activity)
    begun = time.process_time()
    for _ in range(rounds):
        activity, seconds = clock.read()
        pb.HeartbeatRequest(activity=activity, seconds=seconds).SerializeToString()
    return (time.process_time() - begun) / rounds


def epochs(framework: Framework, records: list[bytes], number: int) -> Iterator[Batch]:
    """Yield the minibatches of a number of tasks, one of which is all records."""
    yield from framework.batches(Mode.TRAINING, (TaskRecords(LEASE, 1, records) for _ in range(number)))


def steps(num_epochs: int, directory: Path) -> tuple[float, float]:
    """Processor time of a step, and its notes."""
    command = [sys.executable, "scripts/gen_dataset.py", "digits", "--output", str(directory)]
    subprocess.run(command, check=True, capture_output=True)
    spec = JobSpec(
        job_name="goodput",
        model_zoo="model_zoo",
        model_def="digits.digits_functional.custom_model",
        training_data=str(directory / "train"),
        minibatch_size=MINIBATCH,
        distribution_strategy=DistributionStrategy.LOCAL,
    )
    definition = load_model_definition(spec)
    readers = Readers(spec, definition)
    framework = load_framework(spec, definition, readers)
    framework.begin_training()
    reader = readers.of(pb.TRAINING)
    records = [record for shard in reader.shards() for record in reader.read(Shard(shard.name, shard.start, shard.end))]
    clock = CountingClock()
    strategy = LocalStrategy(framework, StateCheckpoints.of_module(spec, STATE_FILE), 0, 1, clock)
    batches = epochs(framework, records, num_epochs + 1)
    begun, before, num_steps = 0.0, 0, 0
    for number in range(num_epochs + 1):
        held = HeldLease(pb.Lease(id=LEASE, type=pb.TRAINING, epoch=number))
        taken = TaskBatches(held, next(batches), batches, clock)
        committed: list[int] = []
        strategy.train_task(held, taken, lambda n, loss, committed=committed: committed.append(n))  # type: ignore[misc]
        if number == 0:  # compiled
            begun, before = time.process_time(), clock.num_switches
        else:
            num_steps += len(committed)
    return (time.process_time() - begun) / num_steps, (clock.num_switches - before) / 2 / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rounds, num_epochs = (20_000, 2) if arguments.quick else (500_000, 20)
    note, reading = seconds_of_note(rounds), seconds_of_reading(rounds // 10)
    with TemporaryDirectory() as directory:
        step, notes = steps(num_epochs, Path(directory))
    heartbeat = reading * HEARTBEATS_PER_S * step  # of the heartbeats in the time of a step
    found = {"note_us": 1e6 * note, "reading_us": 1e6 * reading, "step_ms": 1e3 * step}
    for name, count in {"local": notes, **NOTES}.items():
        found |= {f"{name}_notes": count, f"{name}_share": (count * note + heartbeat) / step}
    for name, value in found.items():
        print(f"{name:<26} {value:10.3%}" if name.endswith("share") else f"{name:<26} {value:10.3f}")
    if arguments.json:
        print(json.dumps({name: round(value, 6) for name, value in found.items()}))


if __name__ == "__main__":
    main()
