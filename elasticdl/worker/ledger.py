"""The ledger of an AllReduce model: minibatches by name and their samples, and counts of steps."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from elasticdl.ps.applied import AppliedSet, MinibatchName, TaskNumbers
from elasticdl.rpc import elasticdl_pb2 as pb

AppliedRow = tuple[int, int, list[int], int, int]  # epoch, task, extras, watermark, samples; see AppliedTask
UNKNOWN = -1  # samples of a task: some of them were not counted
_COUNTS = struct.Struct("<qq")  # steps, records


@dataclass(slots=True)
class Ledger:
    """The minibatches in a model.

    Attributes:
        applied: names of minibatches.
        steps: updates of the model.
        num_records: seen by the model, over all steps.
        num_samples: in the minibatches of each task, or `UNKNOWN`.
    """

    applied: AppliedSet = field(default_factory=AppliedSet)
    steps: int = 0
    num_records: int = 0
    num_samples: TaskNumbers = field(default_factory=TaskNumbers)

    def add(self, name: MinibatchName, num_samples: int) -> None:
        """A minibatch is in the model now."""
        key = (name.epoch, name.task)
        self.applied.add(name)
        self.applied.num_applies += 1
        known = self.num_samples[key]
        self.num_samples[key] = UNKNOWN if known == UNKNOWN else known + num_samples

    def copy(self) -> Ledger:
        return Ledger(self.applied.copy(), self.steps, self.num_records, self.num_samples.copy())

    def to_message(self) -> pb.AppliedSet:
        """Names and samples."""
        message = self.applied.to_message()
        for task in message.tasks:
            task.num_samples = self.num_samples[task.epoch, task.task]
        return message

    def rows(self) -> Iterator[AppliedRow]:
        """Yield names and samples, as checkpoints hold them."""
        for epoch, task in self.applied.tasks():
            known = self.applied.of_task(epoch, task)
            yield epoch, task, list(known.extras), known.watermark, self.num_samples[epoch, task]

    @classmethod
    def of(cls, message: pb.AppliedSet, steps: int, num_records: int) -> Ledger:
        ledger = cls(AppliedSet.from_message(message), steps, num_records)
        for task in message.tasks:
            ledger.num_samples[task.epoch, task.task] = task.num_samples
        return ledger


@dataclass(frozen=True, slots=True)
class RestoredModel:
    """The state from which a model continues where no living member holds it.

    Attributes:
        directory: of the checkpoint; empty: initial values.
    """

    ledger: Ledger
    directory: str = ""


def packed(ledger: Ledger) -> bytes:
    """A ledger as it travels from the source of a model to other members."""
    return _COUNTS.pack(ledger.steps, ledger.num_records) + ledger.to_message().SerializeToString()


def unpacked(data: bytes) -> Ledger:
    """The inverse of `packed`."""
    steps, num_records = _COUNTS.unpack_from(data)
    message = pb.AppliedSet()
    message.ParseFromString(data[_COUNTS.size :])
    return Ledger.of(message, steps, num_records)
