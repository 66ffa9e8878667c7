"""How long training stands still for a checkpoint: a part of gpu.py.

An AllReduce worker alone trains a dense model of 100 M parameters with Adam on minibatches of 256 in memory, and writes
checkpoints in the background between two steps, as `elasticdl train` does with --checkpoint_dir.  Counted are the times
from the end of a step to that of the next one.  On the CPU the model has 1.6 M parameters.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.measured_job import ROOT, BenchmarkError
from elasticdl.activities import ActivityClock
from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Batch, Share
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.frameworks.torch.samples import TensorSamples
from elasticdl.model_def import load
from elasticdl.ps.applied import MinibatchName
from elasticdl.storage import versions
from elasticdl.storage.paths import path_of
from elasticdl.worker.allreduce.replica import CheckpointWriter, Replica
from elasticdl.worker.checkpoint import CheckpointKind, StateCheckpoints
from elasticdl.worker.ledger import Ledger
from elasticdl_client.choices import DistributionStrategy

BATCH = 256
FUNCTIONS = {"cpu": "small_model", "cuda": "custom_model"}
STATE_FILE = "model.npz"
WHEN_ASKED = 1 << 30  # minibatches between two checkpoints that nothing asks for
WARM_UP_STEPS = 10
QUIET_STEPS = 100
LONGEST_S = 30.0  # of a checkpoint


class Training:
    """The steps of one worker, and its checkpoints."""

    def __init__(self, device: str, directory: Path) -> None:
        definition = load(
            str(ROOT / "benchmarks"), f"zoo.torch_dense.{FUNCTIONS[device]}", None, {}, required=("loss",)
        )
        self._framework = TorchFramework(definition, BATCH, 0, Metadata())
        self._directory = path_of(str(directory))
        kind = CheckpointKind("stall", DistributionStrategy.ALL_REDUCE.value, STATE_FILE, {})
        self._checkpoints = StateCheckpoints(str(directory), kind, keep=1)
        self._writer = CheckpointWriter(
            Replica(self._framework, self._checkpoints, "", ActivityClock()), self._checkpoints, WHEN_ASKED
        )
        self._ledger = Ledger()
        shape = self._framework.report().variables[0].shape
        features, labels = torch.randn(BATCH, shape[1]), torch.randint(0, 10, (BATCH,))
        samples = TensorSamples(features, labels).on(self._framework.device)
        self._batch = Batch(1, 0, size=BATCH, data=samples)
        self._writer.begin(self._ledger)

    def step(self) -> float:
        """Make one, save what is due; return when that was done."""
        ledger = self._ledger
        gradient = self._framework.local_gradient([Share(self._batch, ledger.steps, 1.0, True)], lambda buffer: None)
        gradient.told()
        self._framework.apply_gradient(gradient, None)
        ledger.add(MinibatchName(0, 0, ledger.steps), BATCH)
        ledger.steps += 1
        ledger.num_records += BATCH
        self._writer.save_if_due(ledger)
        return time.perf_counter()

    def steps(self, number: int) -> list[float]:
        """Seconds of each."""
        ends = [self.step() for _ in range(number + 1)]
        return [end - begin for begin, end in pairwise(ends)]

    def steps_of_checkpoint(self) -> list[float]:
        """Seconds of each step until a checkpoint is written; the first one takes the state."""
        self._checkpoints.request()
        ends = [time.perf_counter()]
        number = self._ledger.steps + 1
        while not versions.is_complete(versions.directory_of(self._directory, number)):
            if ends[-1] - ends[0] > LONGEST_S:
                raise BenchmarkError(f"the checkpoint of {number} minibatches was not written in {LONGEST_S:.0f} s")
            ends.append(self.step())
        self._writer.wait()
        return [end - begin for begin, end in pairwise(ends)]


def measure(device: str, is_quick: bool, directory: Path) -> Iterator[dict[str, float]]:
    """Yield the longest gap between two steps against the median one, and the rate while checkpoints are written."""
    torch.set_flush_denormal(True)  # a model that has learnt its minibatch by heart would compute with them
    training = Training(device, directory)
    training.steps(WARM_UP_STEPS)
    quiet = training.steps(QUIET_STEPS)
    gaps, seconds, rates = [], [], []
    for _ in range(2 if is_quick else 4):
        found = training.steps_of_checkpoint()
        gaps.append(max(found))
        seconds.append(sum(found))
        rates.append(len(found) / sum(found))
        print(
            f"stall: {len(found)} steps in {seconds[-1]:.2f} s, longest {gaps[-1]:.4f} s", file=sys.stderr, flush=True
        )
    step_s = statistics.median(quiet)
    yield {
        "stall_step_ms": step_s * 1e3,
        "stall_longest_quiet_gap_ms": max(quiet) * 1e3,
        "stall_longest_gap_ms": max(gaps) * 1e3,
        "stall_median_gap_ms": statistics.median(gaps) * 1e3,
        "stall_steps_lost": max(gaps) / step_s - 1,
        "stall_checkpoint_s": statistics.median(seconds),
        "stall_rate_ratio_to_quiet": statistics.median(rates) / (len(quiet) / sum(quiet)),
    }
