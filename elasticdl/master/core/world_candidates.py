"""Candidates: the processes that a world can be made of, and the calls by which they wait for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Candidate:
    """A process that has said where it can be reached.

    Attributes:
        ready_at: since when it stands outside of every world; None: it has not said so.
        told: version of the world with it that was sent to it since then; 0: none, so it still waits.
    """

    id: int
    incarnation: int
    address: str
    ready_at: float | None = None
    told: int = 0

    @property
    def is_ready(self) -> bool:
        return self.ready_at is not None and not self.told


@dataclass(frozen=True, slots=True)
class Watch:
    """A call of a worker that waits for a world newer than one."""

    call: int
    since: float
    known_version: int


def together(ready: list[Candidate], joiners: list[Candidate]) -> list[Candidate]:
    """Both, each process once."""
    names = {one.id for one in ready}
    return ready + [one for one in joiners if one.id not in names]
