"""What every process of a job calls by the same name: roles of pods, ranges of records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a pod does; a pod has one role."""

    MASTER = "master"
    PS = "ps"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Records ``start`` (inclusive) to ``end`` (exclusive) of the part of a source called ``name``."""

    name: str
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start
