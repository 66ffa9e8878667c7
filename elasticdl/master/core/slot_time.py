"""SlotTimes: splits all the time of every wanted worker into states; no decision depends on it.

A slot is the place of one process of a wanted worker, whatever pod fills it.  Its time is *settled* up to a moment, in
whole microseconds, so that sums are exact: after every event, the settled time of all slots equals the sum over all
states.

* While no process reports, the slot's `SlotUse` determines the state.
* Each heartbeat of a process reports how its time since its start was split; the time since the previous report is
  split in that proportion.  Until the next report, the newest time is shown with the last proportions.
* Computing time is *pending* until its steps are committed (`committed`: useful) or given up (`lost`: repeated).
  A model that falls back to an older one moves the average time of its lost minibatches from useful to repeated.
* Time without a master is filled in by the first report after it, or else counted as `master_away`.

docs/goodput.md explains this for users.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elasticdl.activities import Activity
from elasticdl.protocol import pod_and_process
from elasticdl_client.goodput import PodTimes, SlotState

SECOND = 1_000_000  # microseconds
_MOST_SECONDS = 1e10  # upper bound for a process's report, so that a wrong one does no harm
_SILENCE = (
    2 * SECOND
)  # of a lost worker, for which it counts as doing what it did: heartbeats come every one or two seconds

_STATES: Mapping[str, SlotState] = {
    Activity.START: SlotState.STARTING,
    Activity.COMPILE: SlotState.STARTING,
    Activity.COMPUTE: SlotState.USEFUL,
    Activity.REPEAT: SlotState.REPEATED,
    Activity.PS: SlotState.WAITING_PS,
    Activity.COLLECTIVE: SlotState.WAITING_GROUP,
    Activity.JOIN: SlotState.WAITING_GROUP,
    Activity.INPUT: SlotState.INPUT,
    Activity.EVALUATE: SlotState.EVALUATING,
    Activity.EXPORT: SlotState.SAVING,
    Activity.CHECKPOINT: SlotState.SAVING,
    Activity.IDLE: SlotState.IDLE,
}


class SlotUse(StrEnum):
    """The content of a slot; each but `LIVE` determines the state of its time."""

    UNSCHEDULED = "unscheduled"  # no pod, or one without a node
    LIVE = "live"  # a pod with a node
    RECOVERING = "recovering"  # a pod was lost and its successor is not created yet
    STOPPED = "stopped"  # the pod is terminating, or the job is decided
    DONE = "done"  # its command has succeeded: the slot accumulates no more time


_NAMES = {state: state.value for state in SlotState}
_NO_TIME = dict.fromkeys(SlotState, 0)

_UNREPORTED = {
    SlotUse.UNSCHEDULED: SlotState.UNSCHEDULED,
    SlotUse.RECOVERING: SlotState.RECOVERING,
    SlotUse.STOPPED: SlotState.STOPPED,
}


@dataclass(slots=True)
class _Slot:
    """State of a slot; all times are in microseconds.

    Attributes:
        began: When the slot was first wanted.
        settled: The sums contain the slot's time up to here.
        worker_id: Id of the live pod's process; -1 if none is live.
        has_lost: Whether a live pod filled the slot before.
        incarnation: Incarnation of the process that reported last; 0 if none of this pod has reported.
        reported: Its last report: cumulative time by activity.
        mix: How the time before its last report was split.
        pending: Computing time that is neither committed nor lost yet.
        useful_until, repeated_until: Computing time up to the later of the two moments is useful or repeated.
        away_until: Unsettled time before this moment passed without a master.
    """

    began: int = 0
    settled: int = 0
    use: SlotUse = SlotUse.UNSCHEDULED
    worker_id: int = -1
    has_lost: bool = False
    incarnation: int = 0
    pending: int = 0
    useful_until: int = 0
    repeated_until: int = 0
    away_until: int = 0
    reported: dict[str, int] = field(default_factory=dict)
    mix: dict[SlotState, int] = field(default_factory=dict)


class SlotTimes:
    """Time of all worker slots of a job, by slot number.

    Args:
        num_slots: Initial number of wanted workers.
        evaluates: Whether evaluation is the purpose of the job, so that it counts as computing.
        processes_per_worker: Number of processes of each pod; the first one's time stands for the pod's.

    Attributes:
        now: Microseconds since the job's beginning, set by the owner before each event; never decreases.
        pods: The same time by pod, without the time that was settled when there was none; only for the status.
    """

    def __init__(self, num_slots: int, evaluates: bool = False, processes_per_worker: int = 1) -> None:
        self.now = 0
        self._processes_per_worker = processes_per_worker
        self.pods = PodTimes()
        self._evaluates = evaluates
        self._slots = {number: _Slot() for number in range(num_slots)}
        self._by_worker: dict[int, _Slot] = {}
        self._sums = dict(_NO_TIME)
        self._dropped = 0  # time of slots that are no longer wanted
        self._is_complete = False
        self._servers_missed_at = -1
        self._group_broken_at = -1
        self._pause = (0, 0)  # start and end of the newest pause of the job

    def want(self, numbers: Set[int]) -> None:
        """Set the wanted slots."""
        for number in self._slots.keys() - numbers:
            self._drop(self._slots.pop(number))
        for number in numbers - self._slots.keys():
            self._slots[number] = _Slot(began=self.now, settled=self.now)

    def _drop(self, slot: _Slot) -> None:
        if slot.use is SlotUse.LIVE:
            self._add(slot, self._guess(slot, self.now), self.now)
            del self._by_worker[slot.worker_id]
        else:
            self._settle_unreported(slot)
        self._sums[SlotState.USEFUL] += slot.pending
        self._dropped += slot.settled - slot.began

    # Content of a slot ----------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def content(self, number: int) -> tuple[SlotUse, int]:
        """Return the last values given to `is_at`."""
        slot = self._slots[number]
        return slot.use, slot.worker_id

    def has_lost(self, number: int) -> bool:
        """Return whether a pod was live in this slot; if none is now, it was lost."""
        return self._slots[number].has_lost or self._slots[number].use is SlotUse.LIVE

    def is_at(self, number: int, use: SlotUse, worker_id: int = -1) -> None:
        """Set a slot's content from now on; no effect if unchanged.

        Args:
            worker_id: Id of the process of a live pod.
        """
        slot = self._slots[number]
        if slot.use is use and slot.worker_id == worker_id:
            return
        if slot.use is SlotUse.LIVE:
            self._end_pod(slot, use)
        else:
            self._settle_unreported(slot)
        slot.use, slot.worker_id = use, worker_id
        if use is SlotUse.LIVE:
            self._by_worker[worker_id] = slot

    def _end_pod(self, slot: _Slot, use: SlotUse) -> None:
        """Settle time that the process of a slot has not reported, by its last activity."""
        is_well = self._is_complete or use is SlotUse.DONE
        if is_well:
            self._commit(slot)
        else:
            self._lose(slot)
        if use is SlotUse.DONE and not slot.incarnation:  # a command that never called the master
            self._add(slot, {SlotState.USEFUL: self.now - slot.settled}, self.now)
        known = self.now
        if not is_well and slot.incarnation:
            known = min(self.now, max(slot.settled, slot.away_until) + _SILENCE)
        self._add(slot, self._guess(slot, known), known)
        self._add(slot, {SlotState.RECOVERING: self.now - known}, self.now)
        if is_well:
            self._sums[SlotState.USEFUL] += slot.pending
        else:
            self._repeat(slot)
        del self._by_worker[slot.worker_id]
        slot.has_lost = use is not SlotUse.DONE
        slot.incarnation = slot.pending = slot.useful_until = slot.repeated_until = slot.away_until = 0
        slot.reported, slot.mix = {}, {}

    def _settle_unreported(self, slot: _Slot) -> None:
        if slot.use is not SlotUse.DONE:
            self._sums[_UNREPORTED[slot.use]] += self.now - slot.settled
            slot.settled = self.now

    # Events of the job ----------------------------------------------------------------------------------------------

    def miss_servers(self) -> None:
        """Note that parameter servers are missing from now on: workers without a task wait for them."""
        self._servers_missed_at = self.now

    def miss_group(self) -> None:
        """Note that the group has broken and the next has not formed: workers without a group recover."""
        self._group_broken_at = self.now

    # Reports of processes -------------------------------------------------------------------------------------------

    def report(self, worker_id: int, incarnation: int, seconds: Mapping[str, float]) -> None:
        """Settle time by a process's report.

        Args:
            seconds: Cumulative seconds since its start by activity; empty if unknown.
        """
        slot = self._by_worker.get(worker_id)
        if slot is None or not seconds:
            return
        microseconds = {activity: _microseconds(value) for activity, value in seconds.items()}
        is_first = incarnation != slot.incarnation
        before = {} if is_first else slot.reported
        weights = self._weights(slot, {name: us - before.get(name, 0) for name, us in microseconds.items()})
        length = self.now - slot.settled
        covered = sum(weights.values())
        if is_first and covered > length:  # the process's first time is settled already
            known = min(covered - length, weights.get(SlotState.STARTING, 0))
            weights[SlotState.STARTING] = weights.get(SlotState.STARTING, 0) - known
            covered -= known
        parts = dict(_NO_TIME)
        unseen = max(0, min(self.now, slot.away_until) - slot.settled)
        absence = self._absence(slot, min(unseen, max(0, length - covered)))
        away = sum(absence.values())
        idle = min(unseen - away, weights.get(SlotState.IDLE, 0))  # without a master there was no task to request
        weights[SlotState.IDLE] = weights.get(SlotState.IDLE, 0) - idle
        weights[SlotState.MASTER_AWAY] = weights.get(SlotState.MASTER_AWAY, 0) + idle
        for state, us in absence.items():
            parts[state] += us
        if is_first and length - away > covered:
            begun = SlotState.RECOVERING if slot.incarnation else SlotState.STARTING
            parts[begun] += length - away - covered
        rest = length - sum(parts.values())
        for state, share in _spread(rest, weights if covered else {SlotState.UNKNOWN: 1}).items():
            parts[state] += share
        self._add(slot, parts, self.now)
        slot.incarnation, slot.reported = incarnation, microseconds
        if covered:
            slot.mix = {state: us for state, us in weights.items() if us}

    def _weights(self, slot: _Slot, by_activity: Mapping[str, int]) -> dict[SlotState, int]:
        weights: dict[SlotState, int] = {}
        for activity, us in by_activity.items():
            state = _STATES.get(activity, SlotState.UNKNOWN)
            if activity == Activity.IDLE and self._servers_missed_at >= slot.settled:
                state = SlotState.WAITING_PS
            elif activity == Activity.JOIN and self._group_broken_at >= slot.settled:
                state = SlotState.RECOVERING
            elif activity == Activity.EVALUATE and self._evaluates:
                state = SlotState.USEFUL
            weights[state] = weights.get(state, 0) + max(0, us)
        return weights

    # Fate of computed time ------------------------------------------------------------------------------------------

    def committed(self, worker_id: int) -> None:
        """Count all pending time of a worker as useful: the model contains its steps."""
        if (slot := self._by_worker.get(worker_id)) is not None:
            self._commit(slot)

    def lost(self, worker_id: int) -> None:
        """Count the pending time of a worker as repeated: no model contains its steps since its last commit."""
        if (slot := self._by_worker.get(worker_id)) is not None:
            self._lose(slot)

    def complete(self) -> None:
        """Count all pending time as useful: the job's result contains it."""
        self._is_complete = True
        for slot in self._slots.values():
            self._commit(slot)

    def fell_back(self, num_lost: int, num_before: int) -> None:
        """Move time from useful to repeated, because the model is an older one.

        Args:
            num_lost: Number of minibatches that the model has lost.
            num_before: Number of minibatches that it contained before.
        """
        if 0 < num_lost <= num_before:
            moved = self._sums[SlotState.USEFUL] * num_lost // num_before
            self._sums[SlotState.USEFUL] -= moved
            self._sums[SlotState.REPEATED] += moved
            self.pods.fall_back(moved // self._processes_per_worker)

    def _commit(self, slot: _Slot) -> None:
        self._sums[SlotState.USEFUL] += slot.pending
        slot.pending, slot.useful_until = 0, self.now

    def _lose(self, slot: _Slot) -> None:
        if self._is_complete:
            self._commit(slot)
        elif slot.useful_until < self.now:
            self._repeat(slot)
            slot.pending, slot.repeated_until = 0, self.now

    def _repeat(self, slot: _Slot) -> None:
        """Count pending time as repeated."""
        self._sums[SlotState.REPEATED] += slot.pending
        pod, process = pod_and_process(slot.worker_id, self._processes_per_worker)
        if not process:
            self.pods.lose(pod, slot.pending)

    # Sums -----------------------------------------------------------------------------------------------------------

    def seconds(self, now: int | None = None) -> dict[str, float]:
        """Return the seconds by state up to a moment, over all slots since each was first wanted.

        Computing that is neither committed nor lost is shown as useful.
        """
        now = self.now if now is None else max(now, self.now)
        sums = dict(self._sums)
        for slot in self._slots.values():
            sums[SlotState.USEFUL] += slot.pending
            for state, us in self._guess(slot, now).items():
                sums[state] += us
        return {_NAMES[state]: us / SECOND for state, us in sums.items()}

    def _guess(self, slot: _Slot, until: int) -> dict[SlotState, int]:
        """Return the probable split of a slot's unsettled time."""
        length = until - slot.settled
        if slot.use is SlotUse.DONE:
            return {}
        if slot.use is not SlotUse.LIVE:
            return {_UNREPORTED[slot.use]: length}
        away = max(0, min(until, slot.away_until) - slot.settled)
        parts = _spread(length - away, slot.mix or {SlotState.STARTING: 1})
        for state, us in self._absence(slot, away).items():
            parts[state] = parts.get(state, 0) + us
        return parts

    def _absence(self, slot: _Slot, us: int) -> dict[SlotState, int]:
        """Return the split of time without a master that no report explains: the job was stopped or it was not."""
        begin, end = self._pause
        stopped = min(us, max(0, end - max(begin, slot.settled)))
        return {SlotState.STOPPED: stopped, SlotState.MASTER_AWAY: us - stopped}

    def _add(self, slot: _Slot, parts: Mapping[SlotState, int], until: int) -> None:
        """Settle a slot's time up to a moment, as the sum of the parts."""
        of_pod = dict(parts)
        for state, us in parts.items():
            if state is SlotState.USEFUL:
                repeated = self._add_computing(slot, us, until)
                of_pod[SlotState.USEFUL] = us - repeated
                of_pod[SlotState.REPEATED] = of_pod.get(SlotState.REPEATED, 0) + repeated
            else:
                self._sums[state] += us
        pod, process = pod_and_process(slot.worker_id, self._processes_per_worker)
        if slot.use is SlotUse.LIVE and not process:
            self.pods.add(pod, slot.settled, until, of_pod)
        slot.settled = until

    def _add_computing(self, slot: _Slot, us: int, until: int) -> int:
        """Add computing time, evenly over the time since `settled`, as useful, repeated or pending.

        Returns:
            The repeated part of it.
        """
        length = until - slot.settled
        if self._is_complete or not length:
            self._sums[SlotState.USEFUL] += us
            return 0
        useful = us * _within(slot.useful_until, slot.settled, until) // length
        repeated = us * _within(slot.repeated_until, slot.settled, until) // length
        if slot.repeated_until > slot.useful_until:
            repeated -= useful
        else:
            useful -= repeated
        self._sums[SlotState.USEFUL] += useful
        self._sums[SlotState.REPEATED] += repeated
        slot.pending += us - useful - repeated
        return repeated

    # The journal ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return {
            "now": self.now,
            "sums": {_NAMES[state]: us for state, us in self._sums.items() if us},
            "dropped": self._dropped,
            "pause": list(self._pause),
            "slots": [
                [
                    *(slot.began, slot.settled, slot.use.value, slot.worker_id, slot.has_lost, slot.incarnation),
                    *(slot.pending, slot.useful_until, slot.repeated_until, slot.away_until),
                    slot.reported,
                    {_NAMES[state]: us for state, us in slot.mix.items()},
                ]
                for slot in self._slots.values()
            ],
            "numbers": list(self._slots),
        }

    def restore(self, saved: Mapping[str, Any], pause: tuple[int, int] | None = None) -> None:
        """Restore an earlier generation's slots and times; `now` must be set before.

        Args:
            saved: A result of `snapshot`.
            pause: Start and end of the job's last pause; None if it was not stopped.
        """
        self._sums = {state: saved["sums"].get(state.value, 0) for state in SlotState}
        self._dropped = saved["dropped"]
        begin, end = saved.get("pause", (0, 0))
        self._pause = (begin, end) if pause is None else pause
        slots = [_restored(values) for values in saved["slots"]]
        for slot in slots:
            slot.away_until = self.now
            if slot.use not in (SlotUse.LIVE, SlotUse.DONE):  # no report for it will come
                written_at: int = saved["now"]
                self._add(slot, {_UNREPORTED[slot.use]: written_at - slot.settled}, written_at)
                self._add(slot, self._absence(slot, self.now - written_at), self.now)
        self._slots = dict(zip(saved.get("numbers", range(len(slots))), slots, strict=True))
        self._by_worker = {slot.worker_id: slot for slot in slots if slot.use is SlotUse.LIVE}

    def validate(self) -> None:
        """Check that every microsecond of every slot is in exactly one state.

        Raises:
            AssertionError: A microsecond is in none or in two.
        """
        assert min(self._sums.values()) >= 0, self._sums
        assert all(0 <= slot.began <= slot.settled <= self.now and slot.pending >= 0 for slot in self._slots.values())
        settled = self._dropped + sum(slot.settled - slot.began for slot in self._slots.values())
        assert sum(self._sums.values()) + sum(slot.pending for slot in self._slots.values()) == settled
        live = {id(slot) for slot in self._slots.values() if slot.use is SlotUse.LIVE}
        assert set(map(id, self._by_worker.values())) == live


def _restored(values: Iterable[Any]) -> _Slot:
    began, settled, use, worker_id, has_lost, incarnation, pending, useful, repeated, away, reported, mix = values
    return _Slot(
        *(began, settled, SlotUse(use), worker_id, has_lost, incarnation, pending, useful, repeated, away),
        dict(reported),
        {SlotState(state): us for state, us in mix.items()},
    )


def _microseconds(seconds: float) -> int:
    return int(min(seconds, _MOST_SECONDS) * SECOND) if seconds > 0 else 0


def _within(moment: int, start: int, end: int) -> int:
    """Return the length of the part of an interval that is before a moment."""
    return max(0, min(moment, end) - start)


def _spread(total: int, weights: Mapping[SlotState, int]) -> dict[SlotState, int]:
    """Split a total exactly in proportion to the weights, not all 0; the largest part gets the remainder."""
    whole = sum(weights.values())
    parts = {state: total * weight // whole for state, weight in weights.items() if weight}
    parts[max(parts, key=lambda state: weights[state])] += total - sum(parts.values())
    return parts
