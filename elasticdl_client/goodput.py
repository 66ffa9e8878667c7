"""Goodput: into what the time of a job's wanted pods is split, and how all surfaces show it.

The master's core measures (master/core/slot_time.py) and `JobStatus` carries the seconds by state; docs/goodput.md says
what each state means.  This module owns the names, the share and the words.  It never measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


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
    STOPPED = "stopped"  # it was told to end, or the job has ended
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
