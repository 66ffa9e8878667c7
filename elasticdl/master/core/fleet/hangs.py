"""Hangs: finds live workers that make no progress for too long, and has their threads' stacks reported.

The limit is by the worker's own history: `HISTORY` times its longest minibatch of the kind, at least `hang_timeout`, at
most `step_timeout`.  Only `step_timeout` applies before there is a history, and to work of unknown duration: compiling,
loading, exporting.  Time of saving, of waiting for others and of a script's own evaluation does not count.  Without a
task a worker hangs only before its first one, in the user's code: while it starts, or compiles on a sample of the data.
A worker without heartbeats is judged by its silence: `Liveness`.
heartbeats is judged by its silence: `Liveness`.

Long before the limit, and for work without one, the status shows what a worker has done without a change, and where.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elasticdl.activities import Activity
from elasticdl.master.core.events import HeartbeatReceived
from elasticdl.master.core.fleet.pods import PodRecord
from elasticdl.master.core.fleet.servers import Servers
from elasticdl.master.core.group.groups import WorkerGroups
from elasticdl.master.core.ledger.work import Work
from elasticdl.master.core.state import JobState
from elasticdl.master.core.values import Level, Position, Stacks, TaskType
from elasticdl.master.core.workers import Worker
from elasticdl.protocol import Role
from elasticdl_client.choices import Remedy
from elasticdl_client.job_events import EventKind
from elasticdl_client.job_status import StandingWorker

HISTORY = 20.0  # times the longest minibatch: garbage collection, a cold cache, a slow file all take less
LOOK_AHEAD = 10.0  # seconds before its limit at which a worker is asked for its stacks; py-spy takes some seconds
SILENCE = 3.0  # heartbeats: after a longer silence its progress is unknown
STANDS = 30.0  # seconds without a change after which users ask why; at most half of --step_timeout
USUAL = 3.0  # times its longest minibatch: less is not reported
MOST_LOOKED_AT = 16  # workers asked for stacks at once, and listed in the status: thousands that compile are alike
MAX_TEXT = 1900  # characters of the stacks in an event; the whole text is in the log
LOOK_BACK = 2.5  # seconds over which a main thread is observed: it may wait for input for one second at a time
_NO_STACKS = Stacks("", "")
# Activities of a minibatch; in the others the worker compiles, waits or saves.
OWN_WORK = frozenset({Activity.COMPUTE, Activity.REPEAT, Activity.INPUT, Activity.EVALUATE})
WAITING = frozenset({Activity.COLLECTIVE, Activity.JOIN})
STARTING = (Activity.START, Activity.COMPILE)
UNBOUNDED_WORK = frozenset({*STARTING, Activity.EXPORT, Activity.CHECKPOINT})  # does not predict the next minibatch
WITH_MINIBATCHES = frozenset({*OWN_WORK, *UNBOUNDED_WORK, Activity.IDLE})  # idle: the feed has the worker's records
WITHOUT_MINIBATCHES = frozenset({Activity.COMPILE, Activity.EVALUATE, Activity.EXPORT, Activity.CHECKPOINT})


@dataclass(slots=True)
class _Watch:
    """Progress of one process.

    Attributes:
        kind: Type of the task whose minibatch it computes; None without a task.
        longest: Seconds of its longest minibatch, by type of task.
        is_unbounded: Whether it has also compiled, exported, … during this minibatch.
        stacks: Its stacks during this minibatch; None if it has not sent any.
        waited: Total seconds of waiting for members and of work without a limit, as of its last move.
        unlimited_at: When it was last in an activity without a limit.
        history: (time, seconds by activity) of its heartbeats in the last `LOOK_BACK` seconds, and of one before.
        grown: Activities whose seconds grew in that time.
        behind_since: Since when it waits in a group that is over; None if it does not.
        hung: Its state when it was found hanging; None while it moves.
        is_silent: Whether an event was logged that it is silent.
        same_since: Since when its positions and its activity are unchanged.
        where: Where it was when it was last asked for stacks in that time; None if it was not.
        is_for_status: Its next stacks are only for the status, even if it has moved since.
    """

    incarnation: int
    same_since: float
    kind: TaskType | None = None
    longest: dict[TaskType, float] = field(default_factory=dict)
    is_unbounded: bool = False
    stacks: Stacks | None = None
    waited: float = 0.0
    unlimited_at: float = float("-inf")
    history: deque[tuple[float, Mapping[str, float]]] = field(default_factory=deque)
    grown: frozenset[str] = frozenset()
    behind_since: float | None = None
    hung: _Hung | None = None
    is_silent: bool = False
    where: str | None = None
    is_for_status: bool = False


@dataclass(frozen=True, slots=True)
class _Hung:
    """State of a worker when it was found hanging.

    Attributes:
        activity: The only activity of its main thread; empty for several: then another thread hangs, such as a feed's.
        seconds: Seconds by activity.
    """

    activity: str
    seconds: Mapping[str, float]


class Hangs:
    """Finds workers that hang, and takes their leases back if that is enabled."""

    def __init__(self, state: JobState, groups: WorkerGroups, work: Work) -> None:
        self._settings, self._workers, self._out = state.settings, state.workers, state.out
        self._work = work
        self._groups = groups
        # Slow storage is never a hang, nor is a script's own evaluation; the evaluation of a module has minibatches.
        self._without_limit = {Activity.CHECKPOINT} | ({Activity.EVALUATE} if self._settings.runs_command else set())
        self._watches: dict[int, _Watch] = {}
        self._asked_for_status: set[int] = set()  # ids of workers

    # Heartbeats --------------------------------------------------------------------------------------------------

    def on_heartbeat(self, worker: Worker, event: HeartbeatReceived, clock: float) -> bool:
        """Handle a heartbeat, before the worker's record is updated.

        Returns:
            Whether the worker is to send its stacks.
        """
        watch = self._watch(worker)
        if (event.activity, event.positions) != (worker.activity, worker.positions):
            watch.same_since, watch.where = clock, None
            self._asked_for_status.discard(worker.id)
        before, now = _front(worker.positions), _front(event.positions)
        if now != before:
            if watch.kind is not None and not watch.is_unbounded and worker.stuck_since is None:
                seconds = self._seconds_in_minibatch(worker, event.seconds, clock)
                watch.longest[watch.kind] = max(watch.longest.get(watch.kind, 0.0), seconds)
            lease = None if now is None else self._work.leases.get(now.lease, worker.id)
            watch.kind = None if lease is None else lease.type
            watch.is_unbounded, watch.stacks = False, None
        if event.positions != worker.positions:
            watch.waited = self._waited(event.seconds)
        if event.activity != worker.activity and self._is_starting(worker):
            worker.moved_at, watch.stacks = clock, None
        if event.activity in self._without_limit:
            watch.unlimited_at = clock
        watch.history.append((clock, event.seconds))
        while len(watch.history) > 2 and clock - watch.history[1][0] >= LOOK_BACK:
            watch.history.popleft()
        watch.grown = _grown(watch.history[0][1], event.seconds)
        if worker.stuck_since is not None and watch.hung is None and worker.seconds:  # found by an earlier master
            watch.hung = _Hung(_the_only(watch.grown), event.seconds)
        watch.is_silent = False
        watch.is_unbounded |= event.activity in UNBOUNDED_WORK | self._without_limit
        if event.stacks is not None and watch.is_for_status:
            watch.is_for_status = False
            self._log_standing(worker, watch, event, clock)
        else:
            watch.stacks = event.stacks or watch.stacks
        if watch.hung is not None and _moves(watch.hung, event):
            self._moves_again(worker, watch)
        is_known = watch.stacks is not None and (bool(watch.stacks.where) or not self._is_starting(worker))
        if not is_known and watch.hung is None and self._is_suspect(worker, event, clock):
            watch.is_for_status = False
            return True
        if watch.where is not None or not self._is_standing(worker, event.activity, event.positions, clock):
            return False
        if worker.id not in self._asked_for_status and len(self._asked_for_status) >= MOST_LOOKED_AT:
            return False
        self._asked_for_status.add(worker.id)
        watch.is_for_status = True
        return True

    def _log_standing(self, worker: Worker, watch: _Watch, event: HeartbeatReceived, clock: float) -> None:
        """Log where a worker is that has not changed for long, by the stacks that it has sent."""
        if event.stacks is not None and self._is_standing(worker, event.activity, event.positions, clock):
            watch.where = event.stacks.where
            at = f", at {watch.where}" if watch.where else ""
            text = f"has done the same for {clock - watch.same_since:.0f} s ({event.activity}){at}"
            self._out.log(f"Worker {self._settings.name_of(worker.id)} {text}")

    def _is_standing(self, worker: Worker, activity: str, positions: Sequence[Position], clock: float) -> bool:
        """Return whether a worker has not changed, and not waited, for longer than users expect."""
        watch = self._watch(worker)
        usual = min(STANDS, self._settings.step_timeout / 2)
        if watch.hung is not None or clock - watch.same_since <= usual:
            return False
        if positions:
            may_stand = activity in WITH_MINIBATCHES
        else:
            may_stand = activity in WITHOUT_MINIBATCHES or (
                activity == Activity.START and not self._settings.runs_command  # a whole script may run as its start
            )
        longest = watch.longest.get(watch.kind, 0.0) if watch.kind is not None else 0.0
        return may_stand and clock - watch.same_since > USUAL * longest

    def standing(self, clock: float) -> tuple[tuple[StandingWorker, ...], int]:
        """Return the workers unchanged for longest that are not known to hang, and the number of all such workers.

        Workers whose stacks were requested come first.
        """
        found = [
            worker
            for worker in self._workers.all()
            if clock - worker.heard_at <= SILENCE
            and self._is_standing(worker, worker.activity, worker.positions, clock)
        ]
        found.sort(key=lambda worker: (not self._watch(worker).where, self._watch(worker).same_since, worker.id))
        shown = (
            StandingWorker(
                self._settings.pod_of(worker.id),
                round(clock - self._watch(worker).same_since, 1),
                worker.activity,
                self._watch(worker).where or "",
                self._settings.number_in_pod(worker.id),
            )
            for worker in found[:MOST_LOOKED_AT]
        )
        return tuple(shown), len(found)

    def _is_suspect(self, worker: Worker, event: HeartbeatReceived, clock: float) -> bool:
        threshold = self._threshold(worker, event.activity)
        soon = threshold - min(LOOK_AHEAD, threshold / 2)
        if event.positions != worker.positions:
            return False
        has_work = bool(event.positions) or (event.activity in STARTING and self._is_starting(worker))
        if has_work and self._seconds_in_minibatch(worker, event.seconds, clock) > soon:
            return True
        may_be_held_up = self._may_be_held_up(worker, soon, clock)
        if may_be_held_up and self._seconds_held_up(worker, self._seconds_waited_for(), clock) > soon:
            return True
        return self._seconds_behind(worker, clock) > self._patience / 2

    def _seconds_in_minibatch(self, worker: Worker, seconds: Mapping[str, float], clock: float) -> float:
        """Return the seconds of a worker in one minibatch, without waits for other members and checkpoints."""
        return clock - worker.moved_at - max(0.0, self._waited(seconds) - self._watch(worker).waited)

    def _waited(self, seconds: Mapping[str, float]) -> float:
        return sum(seconds.get(activity, 0.0) for activity in WAITING | self._without_limit)

    def _is_starting(self, worker: Worker) -> bool:
        """Return whether it loads, makes and tries the user's model; the start of a script is the script's own work."""
        return worker.activity in STARTING and not worker.positions and not self._settings.runs_command

    def _may_be_held_up(self, worker: Worker, seconds: float, clock: float) -> bool:
        """Return whether a worker may have delayed the others for more than `seconds`: it neither moved nor waited."""
        return not worker.collective_seconds and (not worker.positions or clock - worker.moved_at > seconds)

    def _seconds_held_up(self, worker: Worker, waited_for: Mapping[int, float], clock: float) -> float:
        """Return the seconds for which a worker has not moved and all other members of its group have waited for it."""
        seconds = min(waited_for.get(worker.id, 0.0), clock - self._watch(worker).unlimited_at)
        return min(seconds, clock - worker.moved_at) if worker.positions else seconds

    def _seconds_behind(self, worker: Worker, clock: float) -> float:
        """Return the seconds for which a worker has waited in a group that is over and that the others have left."""
        watch, newest = self._watch(worker), self._groups.newest_version
        if worker.activity != Activity.COLLECTIVE or not 0 < worker.group_version < newest:
            watch.behind_since = None
        elif watch.behind_since is None:
            watch.behind_since = clock
        return 0.0 if watch.behind_since is None else clock - watch.behind_since

    @property
    def _patience(self) -> float:
        """Seconds after which a worker that waits in a group that is over hangs."""
        return min(self._settings.hang_timeout, self._settings.step_timeout)

    def _moves_again(self, worker: Worker, watch: _Watch) -> None:
        watch.hung = worker.stuck_since = None
        self._out.log(f"Worker {self._settings.name_of(worker.id)} moves again")

    def on_report(self, worker_id: int, incarnation: int, lease_id: int) -> None:
        """Handle a call about a lease in force: a worker that moves makes such calls.

        Other calls prove nothing: a member of a broken group reports its last step while its feed hangs.
        """
        worker = self._workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation or self._work.leases.get(lease_id, worker_id) is None:
            return
        watch = self._watch(worker)
        if watch.hung is not None:
            self._moves_again(worker, watch)

    def _watch(self, worker: Worker) -> _Watch:
        watch = self._watches.get(worker.id)
        if watch is None or watch.incarnation != worker.incarnation:
            watch = self._watches[worker.id] = _Watch(worker.incarnation, worker.heard_at)
            self._asked_for_status.discard(worker.id)
        return watch

    # Judging --------------------------------------------------------------------------------------------------------

    def find(self, clock: float, are_servers_complete: bool) -> None:
        """Look for workers that hang by now.

        Args:
            are_servers_complete: Otherwise a minibatch may last as long as a PS is away.
        """
        known = {worker.id for worker in self._workers.all()}
        self._watches = {worker_id: watch for worker_id, watch in self._watches.items() if worker_id in known}
        self._asked_for_status &= known
        waited_for = self._seconds_waited_for()
        for worker in self._workers.all():
            has_task = self._work.leases.num_of_worker(worker.id) > 0
            if not are_servers_complete or not (has_task or self._is_starting(worker)):
                worker.moved_at, self._watch(worker).waited = clock, self._waited(worker.seconds)
            if self._watch(worker).hung is not None or clock - worker.heard_at > SILENCE:
                continue
            threshold = self._threshold(worker, worker.activity)
            stood = self._seconds_in_minibatch(worker, worker.seconds, clock)
            if stood > threshold and has_task:
                self._hangs(worker, stood, threshold, "in one minibatch", clock)
            elif stood > threshold and (self._watch(worker).stacks or _NO_STACKS).where:
                self._hangs(worker, stood, threshold, "starting", clock)
            elif (held_up := self._seconds_held_up(worker, waited_for, clock)) > threshold:
                self._hangs(worker, held_up, threshold, "all others wait for it", clock)
            elif (behind := self._seconds_behind(worker, clock)) > self._patience:
                self._hangs(worker, behind, self._patience, "in a collective of a group that is over", clock)

    def _threshold(self, worker: Worker, activity: str) -> float:
        """Return the seconds without a move after which a worker hangs."""
        watch = self._watch(worker)
        longest = None if watch.kind is None else watch.longest.get(watch.kind)
        if longest is None or watch.is_unbounded or activity not in OWN_WORK:
            return self._settings.step_timeout
        return min(self._settings.step_timeout, max(self._settings.hang_timeout, HISTORY * longest))

    def _seconds_waited_for(self) -> dict[int, float]:
        """Return by worker how long all other members of the formed group have waited for it; empty if for none."""
        seconds = self._groups.collective_seconds()
        least = min((one for one in seconds.values() if one > 0), default=0.0)
        return {worker_id: least for worker_id, one in seconds.items() if not one and least}

    def _hangs(self, worker: Worker, seconds: float, threshold: float, how: str, clock: float) -> None:
        watch = self._watch(worker)
        watch.hung = _Hung(_the_only(watch.grown), dict(worker.seconds))
        stacks = watch.stacks or _NO_STACKS
        replaces = self._settings.hang_action is Remedy.REPLACE
        at = f", at {stacks.where}" if stacks.where else ""
        text = f"{how} for {seconds:.0f} s ({worker.activity or 'activity unknown'}){at}"
        self._add(worker, text, seconds, threshold, stacks)
        then = "its leases go back" if replaces else "--hang_action=report leaves it alone"
        self._out.log(f"Worker {self._settings.name_of(worker.id)} is stuck: {text}; {then}", Level.WARNING)
        if stacks.text:
            self._out.log(f"Threads of worker {self._settings.name_of(worker.id)}:\n{stacks.text}", Level.WARNING)
        if replaces:
            worker.stuck_since = clock
            self._work.lose_worker(worker.id)

    def is_silent(self, worker_id: int, state: str, clock: float) -> None:
        """Log once that a worker is silent, unless it was found hanging before.

        Args:
            state: State of its process by its pod's runtime; empty if unknown.
        """
        worker = self._workers.get(worker_id)
        if worker is None or self._watch(worker).hung is not None or self._watch(worker).is_silent:
            return
        self._watch(worker).is_silent = True
        why = state or "stopped, without processor time, cut off, or in native code that keeps Python's lock"
        seconds = clock - worker.heard_at
        text = f"silent for {seconds:.0f} s: {why}; so there are no stacks"
        self._add(worker, text, seconds, self._settings.lease_timeout, state=state)

    def _add(
        self,
        worker: Worker,
        text: str,
        seconds: float,
        threshold: float,
        stacks: Stacks = _NO_STACKS,
        state: str = "",
    ) -> None:
        process = self._settings.process_of(worker.id)
        self._out.events.add(
            EventKind.WORKER_HUNG,
            self._settings.subject_of(worker.id),
            f"{process}: {text}" if process else text,
            0,
            seconds=round(seconds, 1),
            threshold=round(threshold, 1),
            activity=worker.activity,
            where=stacks.where,
            stacks=_shortened(stacks.text),
            state=state,
            action=self._settings.hang_action.value,
        )
        self._out.persist()


class Liveness:
    """Decides which pods are given up: a process is silent, has never registered, or is stuck.

    One such process is enough.  A process that has reported its end may be silent, unless it is the last of its pod.
    """

    def __init__(self, state: JobState, servers: Servers, work: Work) -> None:
        self._settings, self._workers = state.settings, state.workers
        self._servers = servers
        self._work = work

    def why_given_up(self, record: PodRecord, clock: float) -> str:
        """Return why a pod must be replaced, as the end of a sentence; empty if it need not be."""
        if record.role is Role.PS:
            server = self._servers.get(record.index)
            is_known = server is not None and not server.is_lost and server.incarnation
            why = self._why_not_counted(record, server.heard_at if server is not None and is_known else None, clock)
            return why and f"it {why}"
        processes = {worker_id: self._workers.get(worker_id) for worker_id in self._settings.ids_in(record.index)}
        heard = {n: one for n, one in processes.items() if one and not self.is_silent(one.heard_at, clock)}
        if heard and self._settings.runs_command and self._work.is_covered:
            processes = {**heard}  # an ended script is silent while another one saves the model
        ended = {n: one.heard_at for n, one in processes.items() if one is not None and one.has_ended}
        staying = processes.keys() - ended.keys() or {max(ended, key=ended.__getitem__)}  # the last must end its pod
        processes = {n: one for n, one in processes.items() if n in staying}
        for worker_id, worker in processes.items():
            why = self._why_not_counted(record, None if worker is None else worker.heard_at, clock)
            if not why and worker is not None and worker.stuck_since is not None:
                grace = min(self._settings.silence_timeout, self._settings.step_timeout)
                why = "is stuck" if clock - worker.stuck_since > grace else ""
            if why:
                return f"{self._settings.process_of(worker_id) or 'it'} {why}"
        return ""

    def _why_not_counted(self, record: PodRecord, heard_at: float | None, clock: float) -> str:
        """Return why a process no longer counts; empty if it does.

        Args:
            heard_at: Time of its newest heartbeat; None if it has sent none.
        """
        settings = self._settings
        if heard_at is not None:
            return f"has been silent for {clock - heard_at:.0f} s" if self.is_silent(heard_at, clock) else ""
        since = None if settings.runs_command else record.running_since  # a command need not register at all
        is_late = since is not None and clock - since > settings.start_timeout
        return f"has run for {clock - (since or 0.0):.0f} s and never registered" if is_late else ""

    def is_silent(self, heard_at: float, clock: float) -> bool:
        """Return whether a process is given up that sent its newest heartbeat at `heard_at`."""
        return clock - heard_at > self._settings.lease_timeout + self._settings.silence_timeout


def _front(positions: Sequence[Position]) -> Position | None:
    """Return the position at which a worker works: in its oldest lease; others are prefetched."""
    return min(positions, key=lambda position: position.lease, default=None)


def _grown(before: Mapping[str, float], now: Mapping[str, float]) -> frozenset[str]:
    """Return the main thread's activities between two moments; idle counts as waiting for input."""
    grown = {activity for activity, seconds in now.items() if seconds > before.get(activity, 0.0)}
    return frozenset(Activity.INPUT if activity == Activity.IDLE else activity for activity in grown)


def _the_only(activities: frozenset[str]) -> str:
    return "".join(activities) if len(activities) == 1 else ""


def _moves(hung: _Hung, event: HeartbeatReceived) -> bool:
    """Return whether the main thread, if that was what hung, has done something else since."""
    return bool(hung.activity) and bool(_grown(hung.seconds, event.seconds) - {hung.activity})


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT].rpartition("\n")[0] + "\n…"
