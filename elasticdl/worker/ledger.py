"""The ledger of a model in a worker: the names and numbers of samples of its minibatches, and counts of steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticdl.ps.applied import AppliedSet, MinibatchName
from elasticdl.task_numbers import TaskNumbers

UNKNOWN = -1  # number of samples of a task, if some were not counted
_MOST_TASKS = 1 << 31  # in an epoch


@dataclass(slots=True)
class Ledger:
    """The minibatches in a model.

    Attributes:
        applied: Names of the minibatches.
        steps: Updates of the model.
        num_records: Records in all steps.
        num_samples: Samples in the minibatches of each task, by (epoch, task), or `UNKNOWN`.
    """

    applied: AppliedSet = field(default_factory=AppliedSet)
    steps: int = 0
    num_records: int = 0
    num_samples: TaskNumbers = field(default_factory=TaskNumbers)

    def add(self, name: MinibatchName, num_samples: int, is_skipped: bool = False) -> None:
        """Record that a minibatch is in the model; if it is skipped, only its name is."""
        key = (name.epoch, name.task)
        self.applied.add(name, is_skipped)
        self.applied.num_applies += 1
        known = self.num_samples[key]
        self.num_samples[key] = UNKNOWN if known == UNKNOWN else known + num_samples

    def surplus_of(self, epoch: int, task: int, num_records: int) -> int:
        """Return how many more samples than records the model has of a task; 0 for none, or if it is not known."""
        num_samples = self.num_samples.get((epoch, task), 0)
        return 0 if num_samples == UNKNOWN else num_samples - num_records

    def copy(self) -> Ledger:
        return Ledger(self.applied.copy(), self.steps, self.num_records, self.num_samples.copy())

    def to_manifest(self) -> dict[str, Any]:
        """Return the ledger in types of JSON; successive tasks of an epoch with equal values take one entry."""
        extras, skipped = self.applied.extras, self.applied.skipped
        return {
            "steps": self.steps,
            "num_records": self.num_records,
            "num_applies": self.applied.num_applies,
            "applied_runs": [list(run) for run in TaskNumbers.runs(self.applied.watermarks, self.num_samples)],
            "applied_extras": [[*task, sorted(extras[task])] for task in sorted(extras)],
            "skipped": [[*task, sorted(skipped[task])] for task in sorted(skipped)],
        }

    @classmethod
    def from_manifest(cls, values: Mapping[str, Any]) -> Ledger:
        """Parse the result of `to_manifest`, or a manifest of an earlier version, which has a row per task (`applied`).

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it is not a ledger.
        """
        ledger = cls(steps=values["steps"], num_records=values.get("num_records", 0))
        if "applied_runs" in values:
            runs, extras = values["applied_runs"], values["applied_extras"]
        else:
            rows = values["applied"]
            runs = [(e, t, 1, rest[0] if rest else 0, rest[1] if rest[1:] else UNKNOWN) for e, t, _, *rest in rows]
            extras = [row[:3] for row in rows]
        for epoch, first, count, watermark, num_samples in runs:
            if not 0 <= count <= _MOST_TASKS:
                raise ValueError(f"{count} tasks")
            ledger.applied.fill(epoch, first, count, watermark)
            ledger.num_samples.fill(epoch, first, count, num_samples)
        for epoch, task, minibatches in extras:
            for n in minibatches:
                ledger.applied.add(MinibatchName(epoch, task, n))
        for epoch, task, minibatches in values.get("skipped", ()):
            ledger.applied.skipped[epoch, task] = {int(n) for n in minibatches}
        ledger.applied.num_applies = values.get("num_applies", ledger.steps)
        return ledger

    def to_bytes(self) -> bytes:
        """Return the ledger as bytes, to be sent from the source of a model to other members."""
        return json.dumps(self.to_manifest()).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        """Parse the result of `to_bytes`."""
        return cls.from_manifest(json.loads(data))


@dataclass(frozen=True, slots=True)
class RestoredModel:
    """The state from which a model continues when no living member holds it.

    Attributes:
        directory: Directory of the checkpoint; empty: initial values.
    """

    ledger: Ledger
    directory: str = ""
