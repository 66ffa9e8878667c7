"""Goodput: into what the time of a job's wanted pods is split, and how all surfaces show it.

`PodTimes` says how the time of each worker pod was split, over its run, in a bounded number of cells.

The master's core fills them (master/core/slot_time.py), the journal keeps them, and the dashboard draws them in the
lane of each pod.  All cells are equally long and begin at multiples of their length, counted from the job's beginning.
When there would be too many, each two become one: an old job has coarse cells, and all of its run is in them.  This
module has no clock.

The master's core measures (master/core/slot_time.py) and `JobStatus` carries the seconds by state; docs/goodput.md says
what each state means.  This module owns the names, the share and the words.  It never measures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class SlotState(StrEnum):
    """The use of a wanted worker's time."""

    UNSCHEDULED = "unscheduled"  # no pod yet, or one that does not run
    STARTING = "starting"  # from the pod's first process to the first minibatch: imports, model, compilation
    USEFUL = "useful"  # computing minibatches that stayed in the model
    REPEATED = "repeated"  # computing minibatches that were lost, and are computed again
    INPUT = "input"  # waiting for records and the user's feed
    WAITING_PS = "waiting_ps"
    WAITING_GROUP = "waiting_group"
    RECOVERING = "recovering"  # after a loss, until a successor is created or the group stands again
    EVALUATING = "evaluating"
    SAVING = "saving"  # checkpoints, export
    IDLE = "idle"  # no task
    STOPPED = "stopped"  # it was asked to end, or the job has ended
    MASTER_AWAY = "master_away"
    UNKNOWN = "unknown"


class PsState(StrEnum):
    """The use of a wanted parameter server's time."""

    ABSENT = "absent"  # no process yet, or it is lost
    RESTORING = "restoring"
    BUSY = "busy"  # in calls of workers
    SAVING = "saving"
    IDLE = "idle"


_LABELS: dict[str, str] = {
    SlotState.WAITING_PS: "waiting for PS",
    SlotState.WAITING_GROUP: "waiting for the group",
    SlotState.MASTER_AWAY: "master away",
}
_SHOWN_SHARE = 0.005  # less would be shown as 0 %


def goodput(seconds: Mapping[str, float]) -> float:
    """Return the useful share of all time, from 0 to 1; 0 while there is none.

    Args:
        seconds: `JobStatus.worker_seconds`.
    """
    whole = sum(seconds.values())
    return seconds.get(SlotState.USEFUL, 0.0) / whole if whole > 0 else 0.0


def label(state: str) -> str:
    """Return the name of a state as people read it."""
    return _LABELS.get(state, state)


def shares(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return (state, share of all time), of `SlotState` or `PsState`: useful first, then the largest."""
    whole = sum(seconds.values())
    if whole <= 0:
        return []
    order = sorted(seconds.items(), key=lambda item: (item[0] != SlotState.USEFUL, -item[1], item[0]))
    return [(state, one / whole) for state, one in order]


def summary(seconds: Mapping[str, float]) -> str:
    """Return one line for people, ``81 % useful, 9 % starting, 6 % waiting for PS``; empty while there is no time.

    States of less than half a percent are left out, `useful` never is.
    """
    shown = [(state, share) for state, share in shares(seconds) if share >= _SHOWN_SHARE or state == SlotState.USEFUL]
    return ", ".join(f"{100 * share:.0f} % {label(state)}" for state, share in shown)


MAX_CELLS = 4800  # about 40 kB of the journal, 10 kB compressed: 600 of each of 8 pods, 12 of each of 400
FIRST_LENGTH_US = 1_000_000  # heartbeats come once a second
_MIN_CELLS = 4  # of a pod, on average; of more pods than that leaves room for, the oldest go
_CELL = re.compile(r"(?:[a-z]\d+)*")
_PART = re.compile(r"([a-z])(\d+)")
_STATES = [state.value for state in SlotState]
_LETTERS = {state: chr(ord("a") + number) for number, state in enumerate(SlotState)}

Cell = dict[SlotState, int]  # microseconds; their sum is less than the length where the pod has begun or ended


@dataclass(slots=True)
class _Pod:
    """The cells of a pod from number `first` on, and each as it is in the journal; empty: it has changed since."""

    first: int
    cells: list[Cell] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def cell(self, number: int) -> Cell:
        """Return a cell to be changed; create it, and those before it, if they are missing."""
        while len(self.cells) <= number - self.first:
            self.cells.append({})
            self.texts.append("")
        self.texts[number - self.first] = ""
        return self.cells[number - self.first]


class PodTimes:
    """The cells of all pods, by the number of the worker.

    Args:
        limit: Maximum number of cells of all pods together; at least 8.
    """

    def __init__(self, limit: int = MAX_CELLS) -> None:
        self._limit = limit
        self._length = FIRST_LENGTH_US
        self._pods: dict[int, _Pod] = {}  # in the order of their last time
        self._num_cells = 0

    @property
    def length_us(self) -> int:
        """The length of a cell in microseconds."""
        return self._length

    def cells(self, worker_id: int) -> dict[int, Cell]:
        """Return the cells of a pod that have any time, by number."""
        pod = self._pods.get(worker_id)
        return {} if pod is None else {pod.first + i: dict(cell) for i, cell in enumerate(pod.cells) if cell}

    def add(self, worker_id: int, begin: int, end: int, parts: Mapping[SlotState, int]) -> None:
        """Add the time that a pod has spent.

        Args:
            begin, end: Microseconds since the start of the job.
            parts: Microseconds by state; they add up to the whole time, and are spread evenly over it.
        """
        if end <= begin:
            return
        self._make_room(worker_id, begin, end)
        first, last = begin // self._length, (end - 1) // self._length
        pod = self._pods.pop(worker_id) if worker_id in self._pods else _Pod(first)
        self._pods[worker_id] = pod
        before = len(pod.cells)
        for state, us in parts.items():
            spread = 0
            for number in range(first, last + 1):
                until = min(end, (number + 1) * self._length) - begin
                share = us * until // (end - begin) - spread
                spread += share
                if share:
                    cell = pod.cell(number)
                    cell[state] = cell.get(state, 0) + share
        self._num_cells += len(pod.cells) - before

    def lose(self, worker_id: int, us: int) -> None:
        """Mark the last `us` of a pod's computation as lost: no model has it."""
        if (pod := self._pods.get(worker_id)) is None:
            return
        for number in range(pod.first + len(pod.cells) - 1, pod.first - 1, -1):
            if us <= 0:
                return
            us -= self._repeat(worker_id, number, us)

    def fall_back(self, us: int) -> None:
        """Mark the last `us` of all pods' computation, in sum, as lost from the model."""
        present = sorted({pod.first + i for pod in self._pods.values() for i in range(len(pod.cells))}, reverse=True)
        for number in present:
            if us <= 0:
                return
            useful = {worker_id: self._useful(worker_id, number) for worker_id in self._pods}
            whole = sum(useful.values())
            wanted = min(us, whole)
            for worker_id, part in useful.items():
                self._repeat(worker_id, number, part * wanted // whole if part else 0)
            us -= wanted

    def _useful(self, worker_id: int, number: int) -> int:
        pod = self._pods[worker_id]
        inside = 0 <= number - pod.first < len(pod.cells)
        return pod.cells[number - pod.first].get(SlotState.USEFUL, 0) if inside else 0

    def _repeat(self, worker_id: int, number: int, us: int) -> int:
        """Turn at most so much of a cell's useful time into repeated time; return how much."""
        moved = min(us, self._useful(worker_id, number))
        if moved:
            cell = self._pods[worker_id].cell(number)
            cell[SlotState.USEFUL] -= moved
            cell[SlotState.REPEATED] = cell.get(SlotState.REPEATED, 0) + moved
        return moved

    # The bound ------------------------------------------------------------------------------------------------------

    def _make_room(self, worker_id: int, begin: int, end: int) -> None:
        """For the cells of a pod between two moments."""
        while len(self._pods) > self._limit // _MIN_CELLS:
            oldest = next(iter(self._pods))
            self._num_cells -= len(self._pods.pop(oldest).cells)
        while self._num_cells + self._num_missing(worker_id, begin, end) > self._limit:
            self._halve()

    def _num_missing(self, worker_id: int, begin: int, end: int) -> int:
        pod = self._pods.get(worker_id)
        following = begin // self._length if pod is None else pod.first + len(pod.cells)
        return max(0, (end - 1) // self._length + 1 - following)

    def _halve(self) -> None:
        self._length *= 2
        for worker_id, old in self._pods.items():
            pod = _Pod(old.first // 2)
            for number, cell in enumerate(old.cells, old.first):
                merged = pod.cell(number // 2)
                for state, us in cell.items():
                    merged[state] = merged.get(state, 0) + us
            self._pods[worker_id] = pod
        self._num_cells = sum(len(pod.cells) for pod in self._pods.values())

    # The journal ----------------------------------------------------------------------------------------------------

    def to_journal(self) -> dict[str, Any]:
        """The cells as the master's core keeps them: ``a87f13`` is a cell that is spent to 87 % in the first state."""
        return {
            "length_s": self._length / 1e6,
            "states": list(_STATES),
            "pods": {str(worker_id): [pod.first, self._text(pod)] for worker_id, pod in self._pods.items()},
        }

    def _text(self, pod: _Pod) -> str:
        for number, text in enumerate(pod.texts):
            if not text:
                percents = {state: round(100 * us / self._length) for state, us in pod.cells[number].items()}
                pod.texts[number] = "".join(f"{_LETTERS[state]}{n}" for state, n in percents.items() if n)
        return " ".join(pod.texts)

    @classmethod
    def from_journal(cls, saved: Mapping[str, Any], limit: int = MAX_CELLS) -> PodTimes:
        """Read the output of `to_journal`; times are exact to the percent.

        Raises:
            ValueError: it is not such a thing.
        """
        try:
            times = cls(limit)
            times._length = round(float(saved["length_s"]) * 1e6)
            states = {chr(ord("a") + number): SlotState(state) for number, state in enumerate(saved["states"])}
            for worker_id, (first, text) in saved["pods"].items():
                pod = times._pods[int(worker_id)] = _Pod(int(first))
                for cell in text.split(" ") if text else ():
                    if not _CELL.fullmatch(cell):
                        raise ValueError(f"not a cell: {cell!r}")
                    percents = _PART.findall(cell)
                    pod.cells.append({states[letter]: int(n) * times._length // 100 for letter, n in percents})
                    pod.texts.append(cell)
            times._num_cells = sum(len(pod.cells) for pod in times._pods.values())
            return times
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not the times of pods: {error!r}") from error
