"""The ledger of a model in a worker: minibatches by name and their samples, and counts of steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticdl.ps.applied import AppliedSet, MinibatchName
from elasticdl.task_numbers import TaskNumbers

UNKNOWN = -1  # samples of a task: some of them were not counted
_MOST_TASKS = 1 << 31  # of an epoch


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

    def add(self, name: MinibatchName, num_samples: int, is_skipped: bool = False) -> None:
        """A minibatch is in the model now, or, where it is skipped, its name alone."""
        key = (name.epoch, name.task)
        self.applied.add(name, is_skipped)
        self.applied.num_applies += 1
        known = self.num_samples[key]
        self.num_samples[key] = UNKNOWN if known == UNKNOWN else known + num_samples

    def surplus_of(self, epoch: int, task: int, num_records: int) -> int:
        """Return how many more samples the model holds of a task than it has records; 0: as many, or not known."""
        num_samples = self.num_samples.get((epoch, task), 0)
        return 0 if num_samples == UNKNOWN else num_samples - num_records

    def copy(self) -> Ledger:
        return Ledger(self.applied.copy(), self.steps, self.num_records, self.num_samples.copy())

    def to_manifest(self) -> dict[str, Any]:
        """Return all of it in types of JSON; successive tasks of an epoch that are alike take one entry."""
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
        """The inverse of `to_manifest`; earlier versions wrote a row of each task: `applied`.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it is none.
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
        """Return all of it, as it travels from the source of a model to other members."""
        return json.dumps(self.to_manifest()).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        """The inverse of `to_bytes`."""
        return cls.from_manifest(json.loads(data))


@dataclass(frozen=True, slots=True)
class RestoredModel:
    """The state from which a model continues where no living member holds it.

    Attributes:
        directory: of the checkpoint; empty: initial values.
    """

    ledger: Ledger
    directory: str = ""
