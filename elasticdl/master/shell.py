"""The shell: it owns the core, which one thread at a time uses.

Events → core → journal → commands, executed in order: in the thread of a call if no other works, else in the loop's.
The loop keeps the journal and the status, and wakes the core twice a second.  Slow work is for `Effects`.  The shell
decides nothing about the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from elasticdl.cluster.cluster import Cluster
from elasticdl.master.core import commands, events
from elasticdl.master.core.values import Level
from elasticdl.master.effects import Crashed, Effects, Listing, pod_changed, pods_listed
from elasticdl.master.journal import Journal, JournalWriteError, save_patiently
from elasticdl.master.pod_specs import PodView, to_job_status
from elasticdl.master.tensorboard import NullWatcher, Watcher
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_status import JobPhase, JobStatus

TICK_S = 0.5
JOURNAL_INTERVAL_S = 1.0
RELIST_S = 60.0
MAX_BATCH = 256  # most events per write of the journal
_CLUSTER_RETRY_S = 1.0
_LAST_PODS_S = 15.0
_LOG_LINES = 30

logger = logging.getLogger("elasticdl.master")
_LEVELS = {Level.INFO: logging.INFO, Level.WARNING: logging.WARNING, Level.ERROR: logging.ERROR}


@dataclass(frozen=True, slots=True)
class Leave:
    """Note of the shell to itself: this generation of the master ends, the job continues."""


class Core(Protocol):
    """The part of `core.Job` that the shell uses."""

    def handle(self, event: events.Event, now: float) -> list[commands.Command]: ...

    def snapshot(self) -> dict[str, Any]: ...

    @property
    def events(self) -> EventHistory: ...

    def status(self, now: float | None = None) -> JobStatus: ...


class Shell:
    """One generation of the master.

    Args:
        core: Used from here on only by the thread whose turn it is (see `Inbox`).
        effects: Executes slow commands in its cluster; its inbox takes the events of all other threads.
        journal: Journal of this job.
        shell_state: The shell's own part of the journal; `snapshot` adds the core's to it.
        patience_s: How long the cluster may be unreachable at the start, and the journal at the end.
        watcher: Receives the job's progress.
    """

    def __init__(
        self,
        core: Core,
        effects: Effects,
        journal: Journal,
        shell_state: dict[str, Any],
        patience_s: float = 0.0,
        watcher: Watcher | None = None,
    ) -> None:
        self._core = core
        self._effects = effects
        self._inbox, self._cluster = effects.inbox, effects.cluster
        self._journal = journal
        self._state = shell_state
        self._state_lock = threading.Lock()
        self._patience_s = patience_s
        self._watcher = watcher or NullWatcher()
        self._stop = threading.Event()
        self._has_run = threading.Event()
        self._journalled_at = float("-inf")
        self._ticked_at = float("-inf")
        self._wake_at = float("inf")  # requested by the core, before the next regular tick
        self._listed_at = time.monotonic()
        self._tick_is_queued = False
        self._pods = PodView()
        self._outcome: commands.EndJob | None = None
        self._is_leaving = False
        self._failure: BaseException | None = None  # ends the generation
        self._todo: list[commands.Command] = []  # left to the loop; no other commands are executed before these
        self._history = core.events

    def request_stop(self, reason: str) -> None:
        """End the job in order; thread-safe."""
        self._stop.set()
        self._inbox.post(events.StopRequested(reason))

    def request_checkpoint(self) -> None:
        """Request a checkpoint as soon as one can be written; thread-safe."""
        self._inbox.post(events.CheckpointRequested())

    def request_leave(self) -> None:
        """End this generation of the master and leave the job to the next; thread-safe."""
        self._stop.set()
        self._inbox.post(Leave())

    def request_pause(self) -> None:
        """End this generation once the journal is written, unless the job ends first; thread-safe."""
        self._inbox.post(Leave())

    @property
    def history(self) -> EventHistory:
        """The job's events as of the last second; thread-safe."""
        return self._history

    def keep_model_layout(self, layout: dict[str, object]) -> None:
        """Keep the first description of the model for manifests; thread-safe."""
        with self._state_lock:
            if not self._state.get("model"):
                self._state["model"] = layout

    def run(self) -> commands.EndJob | None:
        """Run the job to its end.

        Returns:
            The end of the job; None if it has not ended and this generation is terminating.

        Raises:
            Superseded: Another master owns the job.
            ElasticDLError: The cluster or the journal cannot be used.
        """
        try:
            self._begin()
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
            return self._run()
        finally:
            self._has_run.set()

    def _run(self) -> commands.EndJob | None:
        self._inbox.begin(self._work)
        try:
            while not self._is_over:
                self._inbox.in_turn(self._take_turn)
                if not self._is_over:
                    self._inbox.wait(self._until_tick_s())
        finally:
            self._inbox.end()
        if self._failure is not None:
            raise self._failure
        self._carry_out(self._todo)  # before `Leave` is handled
        if self._outcome is not None:
            self._wait_for_pods()
        elif self._stop.is_set():
            self._save_once()
        else:
            self._persist()
        return self._outcome

    def status(self) -> JobStatus:
        """Return the status; the phase stays that of a running job until `write_end` writes the end."""
        with self._state_lock:
            started_at = self._state["started_at"]
        core = self._core.status(time.monotonic())
        found = to_job_status(core, started_at, self._pods.statuses(), self._pods.lost())
        if found.phase not in (JobPhase.SUCCEEDED, JobPhase.FAILED):
            return found
        return dataclasses.replace(found, phase=JobPhase.RUNNING, message="")

    def write_end(self, status: JobStatus) -> None:
        """Write the last status, and to the journal that the job has ended."""
        with self._state_lock:
            self._state["ended"] = [status.exit_code, status.message, status.updated_at]
        try:
            save_patiently(self._journal, self.snapshot(), status, self._patience_s, self._stop)
        except JournalWriteError as error:
            logger.error("The end of the job could not be written: %s", error)
            self._journal.write_status(status)

    # Events ------------------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._outcome is not None or self._is_leaving or self._failure is not None

    def _take_turn(self) -> None:
        """Take the loop's turn: commands left by a call, due work, and a batch of the queue."""
        todo, self._todo = self._todo, []
        self._carry_out(todo)
        if not self._is_over:
            self._keep_time()
        if not self._is_over and (item := self._inbox.next(0.0)) is not None:
            self._carry_out(self._take_batch(item))

    def _work(self) -> None:
        """Process one batch in the thread of a call, which must not wait for the journal: that is left to the loop."""
        if self._is_over or self._todo or (item := self._inbox.next(0.0)) is None:
            return
        try:
            todo = self._take_batch(item)
            if any(isinstance(command, commands.Persist) for command in todo):
                self._todo = todo
                self._inbox.wake()
            else:
                self._carry_out(todo)
        except BaseException as error:  # noqa: BLE001  raised by `run`
            self._failure = error
        if self._is_over:
            self._inbox.wake()

    def _take_batch(self, item: Any) -> list[commands.Command]:
        """Handle an item and those queued behind it.

        Returns:
            The commands for all of them, so that the journal is written once.
        """
        todo: list[commands.Command] = []
        for _ in range(MAX_BATCH):
            if isinstance(item, Listing):  # pods missing in it are known only after all earlier commands
                self._carry_out(todo)
                todo = []
            todo += self._take(item)
            if self._is_leaving or any(isinstance(command, commands.EndJob) for command in todo):
                break
            item = self._inbox.next(0.0)
            if item is None:
                break
        return todo

    def _take(self, item: Any) -> list[commands.Command]:
        match item:
            case Crashed(error):
                raise error
            case Leave():
                self._is_leaving = True
                return []
            case Listing(pods, num_creations):
                # A list taken before a creation was done may lack that pod: it does not prove that the pod is gone.
                if num_creations == self._effects.num_creations:
                    return self._handle(pods)
                self._effects.list_pods()
                return []
            case events.Tick():
                self._tick_is_queued = False
                return self._handle(item)
            case _:
                return self._handle(item)

    def _handle(self, event: events.Event) -> list[commands.Command]:
        match event:
            case events.PodChanged():
                self._pods.changed(event)
            case events.PodsListed():
                self._pods.listed(event)
        todo = self._core.handle(event, time.monotonic())
        if isinstance(event, events.ModelReported | events.ShardsListed):  # once in a job
            return [commands.Persist(), *todo]
        return todo

    def _keep_time(self) -> None:
        """Queue a tick behind everything that has arrived, so that late heartbeats count first."""
        moment = time.monotonic()
        if moment >= min(self._ticked_at + TICK_S, self._wake_at) and not self._tick_is_queued:
            self._ticked_at, self._wake_at = moment, float("inf")
            self._tick_is_queued = True
            self._inbox.post(events.Tick(time.time() - moment))
        if moment - self._listed_at >= RELIST_S:
            self._listed_at = moment
            self._effects.list_pods()
        if moment - self._journalled_at >= JOURNAL_INTERVAL_S:
            self._journalled_at = moment
            for outage in self._journal.take_outages():
                self._carry_out(self._handle(events.JournalDelayed(outage.message, outage.seconds)))
            self._journal.save_later(self.snapshot(), self.status())
            self._watcher.on_status(self._core.status())
            self._history = self._core.events

    def _until_tick_s(self) -> float:
        """Return the seconds until the next tick; a queued tick is processed by another thread."""
        return TICK_S if self._tick_is_queued else min(self._ticked_at + TICK_S, self._wake_at) - time.monotonic()

    # Commands ----------------------------------------------------------------------------------------------------

    def _carry_out(self, todo: list[commands.Command]) -> None:
        """Execute commands in order; the first `Persist` among them covers the others, too."""
        is_saved = False
        for command in todo:
            if not isinstance(command, commands.Persist):
                self._execute(command)
            elif not is_saved:
                self._persist()
                is_saved = True

    def _execute(self, command: commands.Command) -> None:
        match command:
            case commands.Reply(call, answer):
                self._inbox.answer(call, answer)
            case commands.CreatePod():
                self._effects.create_pod(command)
            case commands.ResizePod():
                self._effects.resize_pod(command)
            case commands.DeletePod():
                self._effects.delete_pod(command)
            case commands.ListShards(kind):
                self._effects.list_shards(kind)
            case commands.ReadAppliedSets():
                self._effects.read_applied_sets(command)
            case commands.SaveCheckpoint():
                with self._state_lock:
                    layout = dict(self._state.get("model") or {})
                self._effects.save_checkpoint(command, layout, self._check_owner)
            case commands.Wake(after_s):
                self._wake_at = min(self._wake_at, time.monotonic() + after_s)
                self._inbox.wake()
            case commands.Log(level, text):
                logger.log(_LEVELS[level], "%s", text)
            case commands.Measured(step, metrics):
                self._watcher.on_evaluation(step, metrics)
            case commands.EndJob():
                self._outcome = command
                self._history = self._core.events
                self._watcher.on_status(self._core.status())
            case commands.Persist():
                raise AssertionError("carried out by `_carry_out`")
            case _:
                assert_never(command)

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the next generation of the master must know."""
        with self._state_lock:
            return {**self._state, "core": self._core.snapshot()}

    def _persist(self) -> None:
        """Write the journal before anything else happens, however long a full disk takes to be fixed."""
        save_patiently(self._journal, self.snapshot(), None, float("inf"), self._stop)

    def _check_owner(self) -> None:
        """Raise `Superseded` if another master owns the job; checkpoints continue while the journal is unreachable."""
        with contextlib.suppress(JournalWriteError):
            self._journal.check_owner()

    def _save_once(self) -> None:
        try:
            self._journal.save(self.snapshot(), self.status())
        except JournalWriteError as error:
            logger.warning("%s", error)

    # Pods --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Report the existing pods to the core."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                pods = self._cluster.list()
            except ElasticDLError as error:
                if time.monotonic() >= deadline or self._stop.wait(_CLUSTER_RETRY_S):
                    raise
                logger.warning("Pods cannot be listed: %s", error.what)
            else:
                self._carry_out(self._handle(pods_listed(pods)))
                return

    def _watch(self) -> None:
        """Put every change of a pod into the inbox, until the last pod's end; runs in a thread of its own."""
        while True:
            try:
                for event in self._cluster.watch():
                    changed = pod_changed(event)
                    if changed is not None:
                        self._inbox.post(changed)
            except ElasticDLError as error:
                logger.warning("The watch of pods has ended: %s", error.what)
            except Exception as error:  # noqa: BLE001  a bug: the loop ends the master with it
                self._inbox.post(Crashed(error))
                return
            if self._has_run.wait(_CLUSTER_RETRY_S):
                return
            self._effects.list_pods()  # for missed changes

    def _wait_for_pods(self) -> None:
        """Wait for terminating pods, then delete the rest without grace; calls are still answered."""
        deadline = time.monotonic() + _LAST_PODS_S
        while time.monotonic() < deadline and self._pods.living():
            item = self._inbox.next(TICK_S)
            if isinstance(item, Leave):
                if self._stop.is_set():
                    return
            elif isinstance(item, Crashed):
                logger.error("While the job ended: %r", item.error)
            elif item is not None and not isinstance(item, Listing):
                self._handle_last(item)
        for name in self._pods.living():
            self._effects.delete_pod(commands.DeletePod(name))

    def _handle_last(self, event: events.Event) -> None:
        """Handle an event after the end: only answer calls and delete pods."""
        if isinstance(event, events.PodChanged):
            self._pods.changed(event)
        for command in self._core.handle(event, time.monotonic()):
            if isinstance(command, commands.Reply | commands.DeletePod):
                self._execute(command)


def end_of_log(cluster: Cluster, pod: str) -> str:
    """Return the last lines of a pod's log for the message of the job's end; empty if there are none."""
    if not pod:
        return ""
    try:
        lines = cluster.logs(pod).rstrip().splitlines()[-_LOG_LINES:]
    except ElasticDLError as error:
        logger.warning("The log of %s cannot be read: %s", pod, error.what)
        return ""
    return "\n".join(lines)
