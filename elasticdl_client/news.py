"""News: the events of a job that are worth a permanent line, in their order; each once.

Losses, joins, restarts, changes of the group and evaluations come from the job's events, complete epochs from its
status; without events the newest evaluation comes from the status, too.  A line names an event, its cause, and its
immediate consequences.  Lines that a long job would print by the hundred are thinned out: all of them are in the events
and in the status's JSON.  It never reads, waits or prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticdl_client.job_events import EventHistory, EventKind, JobEvent, describe, since
from elasticdl_client.job_status import EpochCoverage, JobPhase, JobStatus

MAX_UNTHINNED = 10  # lines of a kind in a job of no more epochs
_QUIET_S = 900.0  # after which a line comes even where they are thinned out
_MAX_NAMES = 4  # of workers that join at once
_ROOTS = frozenset(
    {
        EventKind.POD_LOST,
        EventKind.POD_GIVEN_UP,
        EventKind.POD_DRAINING,
        EventKind.WORKER_REGISTERED,
        EventKind.JOB_RESUMED,
        EventKind.MASTER_RESTARTED,
    }
)
_LOSSES = frozenset({EventKind.POD_LOST, EventKind.POD_GIVEN_UP})
_JOINS = frozenset({EventKind.WORKER_REGISTERED, EventKind.PS_READY})
_REPEATING = frozenset(
    {EventKind.TASK_FAILED, EventKind.RECORDS_EXCLUDED, EventKind.LOSS_NOT_FINITE, EventKind.LEASE_LOST}
)
_TEXTS: Mapping[EventKind, str] = {
    EventKind.JOB_SCALED: "scaled: {what}",
    EventKind.SCALE_REFUSED: "not scaled: {what}",
    EventKind.POD_GIVEN_UP: "{subject} given up: {what}",
    EventKind.POD_DRAINING: "{subject} {what}",
    EventKind.POD_NOT_CREATED: "{subject} cannot be created: {what}",
    EventKind.POD_BLOCKED: "{subject} cannot start: {what}",
    EventKind.POD_RESIZED: "{subject} {what}",
    EventKind.POD_NOT_RESIZED: "{subject} is near its memory limit, which cannot be raised: {what}",
    EventKind.JOB_RESUMED: "{subject} {what}",
    EventKind.MASTER_RESTARTED: "{what}",
    EventKind.PS_READY: "{subject} {what}",
    EventKind.WORKER_HUNG: "{subject} hangs: {what}",
    EventKind.WORKER_SLOW: "{subject} is slow: {what}",
    EventKind.LEASE_LOST: "{subject}: {what}",
    EventKind.TASK_FAILED: "{subject} failed: {what}",
    EventKind.RECORDS_EXCLUDED: "{subject} leaves out bad records: {what}",
    EventKind.LOSS_NOT_FINITE: "{subject}: {what}",
    EventKind.CHECKPOINT_FAILED: "{subject} failed: {what}",
    EventKind.CHECKPOINT_UNREADABLE: "{subject} cannot read a checkpoint: {what}",
    EventKind.TRAINING_STOPPED: "training stopped: {what}",
    EventKind.MODEL_NOT_EXPORTED: "{what}",
}
_LOST: Mapping[str, str] = {"Preempted": "preempted", "Evicted": "evicted", "OOMKilled": "ran out of memory"}


@dataclass(frozen=True, slots=True)
class Headline:
    """A line, and whether it reports a trouble."""

    text: str
    is_trouble: bool = False


class News:
    """The news since the previous call.

    Args:
        status: the present one, of a job that is resumed or watched from its middle on.
        history: its events, likewise.
    """

    def __init__(self, status: JobStatus | None = None, history: EventHistory | None = None) -> None:
        self._status = status
        self._newest = max((event.number for event in history.events), default=0) if history is not None else 0
        self._counts: Counter[EventKind] = Counter()
        self._failures: set[str] = set()
        self._num_evaluations = 0
        self._shown_at: dict[str, float] = {}  # when the newest coverage and evaluation were shown

    def lines(self, status: JobStatus, history: EventHistory | None = None) -> list[Headline]:
        """Return what has happened, and remember it."""
        if history is not None:
            lines = self._of_events(history, status)
        else:
            lines = [Headline(text) for text in self._newest_evaluation(self._status, status)]
        lines += [Headline(text) for text in self._of_status(self._status, status)]
        self._status = status
        return lines

    # The status -----------------------------------------------------------------------------------------------------

    def _of_status(self, before: JobStatus | None, now: JobStatus) -> list[str]:
        lines = []
        if now.message and now.phase is not JobPhase.FAILED and (before is None or now.message != before.message):
            lines.append(now.message)
        if now.exit_code is not None:  # the report at the end has them
            return lines
        known = set() if before is None else {(coverage.epoch, str(coverage)) for coverage in before.coverage}
        for coverage in now.coverage:
            is_new = not coverage.since and (coverage.epoch, str(coverage)) not in known
            if is_new and coverage.lost == 0 and coverage.records and self._is_shown_epoch(coverage, now):
                lines.append(f"{coverage.title}: {coverage}")
        return lines

    def _newest_evaluation(self, before: JobStatus | None, now: JobStatus) -> list[str]:
        if not now.metrics or (before is not None and _evaluation(now) == _evaluation(before)):
            return []
        return self._of_evaluation(str(now.metrics_step), metrics_text(now), now)

    def _of_evaluation(self, step: str, metrics: str, now: JobStatus) -> list[str]:
        self._num_evaluations += 1
        few = self._num_evaluations <= MAX_UNTHINNED and 0 < now.num_epochs <= MAX_UNTHINNED
        is_shown = self._is_shown("evaluation", now, few or is_round(self._num_evaluations))
        return [f"evaluation at step {step}: {metrics}"] if is_shown else []

    def _is_shown_epoch(self, coverage: EpochCoverage, now: JobStatus) -> bool:
        few = 0 < now.num_epochs <= MAX_UNTHINNED
        return self._is_shown("coverage", now, few or is_round(coverage.epoch))

    def _is_shown(self, what: str, now: JobStatus, is_chosen: bool) -> bool:
        """Return whether to show a line: it is a permanent one, or the previous line is old enough."""
        if is_chosen or now.updated_at - self._shown_at.setdefault(what, now.updated_at) >= _QUIET_S:
            self._shown_at[what] = now.updated_at
            return True
        return False

    # Events ---------------------------------------------------------------------------------------------------------

    def _of_events(self, history: EventHistory, now: JobStatus) -> list[Headline]:
        new = since(history.events, self._newest)
        if not new:
            return []
        self._newest = new[-1].number
        partial = {event.number for event in new if _is_partial(event, history, now.processes_per_worker)}
        followed = _Consequences(history, [event for event in new if event.number not in partial])
        lines: list[Headline] = []
        joined: list[JobEvent] = []
        reopened = [event for event in new if event.kind is EventKind.EPOCH_REOPENED]
        fatal = {event.cause for event in new if event.kind is EventKind.JOB_FAILED}
        for event in new:
            if event.number in fatal and event.kind is not EventKind.POD_LOST:
                continue  # the error at the end of the job says it
            if event.kind is EventKind.GROUP_FORMED:
                if not followed.is_told(event):
                    lines.append(Headline(followed.group_text(event)))
            elif event.number in partial or (event.kind in _JOINS and not _is_later(event, history)):
                continue  # as many as were wanted at first: the bar counts them
            elif event.kind is EventKind.WORKER_REGISTERED:
                joined.append(event)
            elif event.kind is EventKind.EPOCH_REOPENED:
                lines += [_reopened_line(reopened)] if event is reopened[0] else []
            elif event.kind is EventKind.POD_LOST:
                lines.append(Headline(lost_text(event) + followed.text(event), True))
            elif event.kind is EventKind.EVALUATION_FINISHED:
                step = event.subject.removeprefix("evaluation-")
                lines += [Headline(text) for text in self._of_evaluation(step, describe(event), now)]
            elif event.kind in _TEXTS and self._is_told_again(event):
                lines.append(Headline(self._line(event) + followed.text(event), event.is_trouble))
        return lines + _join_lines(joined, history, followed)

    def _line(self, event: JobEvent) -> str:
        """Return the line of an event; a failure that a task repeats is printed in full once."""
        text = _text(event)
        if event.kind is EventKind.TASK_FAILED:
            if text in self._failures:
                return f"{text.partition(':')[0]} again in the same way"
            self._failures.add(text)
        return text

    def _is_told_again(self, event: JobEvent) -> bool:
        self._counts[event.kind] += 1
        count = self._counts[event.kind]
        return event.kind not in _REPEATING or count <= MAX_UNTHINNED or is_round(count)


class _Consequences:
    """Direct consequences of events, for the end of the same line.

    Args:
        history: Events of the job.
        new: The events that are printed now.
    """

    def __init__(self, history: EventHistory, new: Sequence[JobEvent]) -> None:
        self._roots: dict[int, JobEvent] = {}
        self._texts: dict[int, list[str]] = {}
        self._told: set[int] = set()
        numbers = {event.number for event in new if event.kind in _ROOTS}
        for event in new:
            root = next((one for one in history.chain(event) if one.kind in _ROOTS), None)
            if event.kind is EventKind.GROUP_FORMED:
                root = _cause_of_group(event, root, history)
            if root is None:
                continue
            self._roots[event.number] = root
            is_first = event.kind is EventKind.GROUP_FORMED and not event.details.get("before")
            shown = root.kind is not EventKind.WORKER_REGISTERED or _is_later(root, history)
            if root.number not in numbers or is_first or not shown:
                continue
            if event.kind is EventKind.GROUP_FORMED:
                self._texts.setdefault(root.number, []).append(f"group {_group_change(event)}")
                self._told.add(event.number)
            elif event.kind is EventKind.POD_CREATED and event.subject != root.subject and event.cause == root.number:
                self._texts.setdefault(root.number, []).append(f"successor {event.subject}")

    def is_told(self, event: JobEvent) -> bool:
        """Return whether the line of the event's cause already contains it."""
        return event.number in self._told

    def text(self, *events: JobEvent) -> str:
        """Return the text of the consequences."""
        return "".join(f" · {text}" for event in events for text in self._texts.get(event.number, ()))

    def group_text(self, event: JobEvent) -> str:
        """Return the line of a group whose cause was printed before, or is not to be printed."""
        if not event.details.get("before"):
            members = "processes" if "processes" in event.details else "workers"
            return f"group of {event.details.get('after', '?')} {members} formed"
        root = self._roots.get(event.number)
        return f"group {_group_change(event)}" + (f" ({_brief(root)})" if root is not None else "")


def _cause_of_group(formed: JobEvent, root: JobEvent | None, history: EventHistory) -> JobEvent | None:
    """Return the cause of a group, by its root in the chain of events.

    A group that broke for a member of which nothing but its registration is known has that as its root, and not as its
    cause: the member was silent, or missed by others.
    """
    broken = next((one for one in history.chain(formed) if one.kind is EventKind.GROUP_BROKEN), None)
    if root is not None and (broken is None or root.kind is not EventKind.WORKER_REGISTERED):
        return root
    by_members = _cause_by_members(formed, history)
    is_join = by_members is not None and by_members.kind is EventKind.WORKER_REGISTERED
    return broken if broken is not None and (by_members is None or is_join) else by_members


def _cause_by_members(formed: JobEvent, history: EventHistory) -> JobEvent | None:
    """Return the loss or join of the member by which a group differs from the one before it.

    Members may miss another one before the cluster shows that it is lost: then no event of the group follows from that.
    """
    before = [one for one in history.events if one.kind is EventKind.GROUP_FORMED and one.number < formed.number]
    if not before:
        return None
    old, new = (set(str(one.details.get("workers", "")).split()) for one in (before[-1], formed))
    changed = {f"worker-{worker}" for worker in (old - new or new - old)}
    causes = [one for one in history.events if one.kind in _ROOTS and one.subject in changed]
    return causes[-1] if causes and causes[-1].number < formed.number else None


def is_round(number: int) -> bool:
    """Return whether a number is 1, 2 or 5 times a power of 10."""
    return str(number).rstrip("0") in ("1", "2", "5")


def _evaluation(status: JobStatus) -> tuple[int, str]:
    """Return the newest evaluation; as a text, since NaN is not equal to itself."""
    return status.metrics_step, metrics_text(status)


def metrics_text(status: JobStatus) -> str:
    """Return the newest evaluation's metrics."""
    return ", ".join(f"{name} {value:.4g}" for name, value in status.metrics.items())


def _is_later(event: JobEvent, history: EventHistory) -> bool:
    """Return whether a pod has joined a job that trains already, or in the place of another."""
    if EventKind.EPOCH_STARTED.value in history.summed_up:
        return True
    begun = next((one.number for one in history.events if one.kind is EventKind.EPOCH_STARTED), event.number)
    return begun < event.number or any(one.kind in _LOSSES for one in history.chain(event))


def _is_partial(event: JobEvent, history: EventHistory, num_processes: int) -> bool:
    """Return whether a process has registered before the last of its worker."""
    if event.kind is not EventKind.WORKER_REGISTERED or num_processes == 1:
        return False
    about = (one for one in history.events if one.kind is event.kind and one.subject == event.subject)
    return sum(one.number <= event.number for one in about) % num_processes != 0


def _join_lines(joined: Sequence[JobEvent], history: EventHistory, followed: _Consequences) -> list[Headline]:
    if not joined:
        return []
    names = [_joined_name(event, history) for event in joined]
    if len(names) > _MAX_NAMES:
        names[_MAX_NAMES:] = [f"{len(names) - _MAX_NAMES} more"]
    return [Headline(f"{', '.join(names)} joined{followed.text(*joined)}")]


def _joined_name(event: JobEvent, history: EventHistory) -> str:
    lost = next((one.subject for one in history.chain(event) if one.kind in _LOSSES), event.subject)
    return event.subject if lost == event.subject else f"{event.subject} (for {lost})"


def _reopened_line(reopened: Sequence[JobEvent]) -> Headline:
    first, last = (event.subject.removeprefix("epoch-") for event in (reopened[0], reopened[-1]))
    epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    if not all("records" in event.details for event in reopened):  # by a version that counted tasks alone
        num_tasks = sum(int(event.details.get("tasks", 0)) for event in reopened)
        are = "is" if first == last else "are"
        return Headline(f"{epochs} {are} open again: the model has lost parts of {num_tasks} tasks", True)
    num_records = sum(int(event.details["records"]) for event in reopened)
    return Headline(f"{epochs}: the model has lost {num_records:,} records, which are computed again", True)


def _text(event: JobEvent) -> str:
    role, _, number = event.subject.partition("-")
    subject = event.subject if role in ("worker", "ps") else f"{role} {number}".rstrip()
    return _TEXTS[event.kind].format(subject=subject, what=describe(event))


def lost_text(event: JobEvent) -> str:
    """Return which pod was lost, where and why, of a `POD_LOST` or a `POD_GIVEN_UP`."""
    if event.kind is EventKind.POD_GIVEN_UP:
        return _text(event)
    reason, node = str(event.details.get("reason", "")), event.details.get("node")
    where = f" (node {node})" if node else ""
    if event.message.startswith(
        "exit code"
    ):  # with the program's error: if that fails the job, the job's error says it
        return f"{event.subject} lost{where}: {reason}, exit code {event.details.get('exit_code', '?')}"
    if reason in _LOST:
        first = event.message.partition("\n")[0]
        return f"{event.subject} {_LOST[reason]}{where}" + (f": {first}" if first else "")
    return f"{event.subject} lost{where}: {describe(event)}"


def _brief(event: JobEvent) -> str:
    match event.kind:
        case EventKind.POD_LOST:
            return f"{event.subject} {_LOST.get(str(event.details.get('reason')), 'lost')}"
        case EventKind.WORKER_REGISTERED:
            return f"{event.subject} joined"
        case EventKind.POD_DRAINING:
            return f"{event.subject} leaves"
        case EventKind.POD_GIVEN_UP:
            return f"{event.subject} given up"
        case EventKind.GROUP_BROKEN:
            return event.message
        case EventKind.JOB_RESUMED:
            return "job resumed"
        case _:
            return "master restarted"


def _group_change(event: JobEvent) -> str:
    seconds = float(event.details.get("seconds", 0.0))
    return f"{event.details.get('before')} → {event.details.get('after')} in {seconds:.2f} s"
