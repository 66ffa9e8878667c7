"""The shell: one loop, in one thread, that owns the core.

Event → core → commands, executed in order.  It keeps the journal and the status file, hands slow work to `Effects`,
and wakes the core twice a second.  It decides nothing about the job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, assert_never

from elasticdl.cluster.cluster import Cluster
from elasticdl.master.core import commands, events
from elasticdl.master.core.values import Level, Phase
from elasticdl.master.effects import Crashed, Effects, Listing, pod_changed, pods_listed
from elasticdl.master.inbox import Inbox
from elasticdl.master.journal import Journal, JournalWriteError
from elasticdl.master.status import StatusFile
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.job_status import JobStatus

TICK_S = 0.5
JOURNAL_INTERVAL_S = 1.0
RELIST_S = 60.0
_MAX_RETRY_S = 5.0
_WATCH_RETRY_S = 1.0
_LAST_PODS_S = 15.0
_LOG_LINES = 30

logger = logging.getLogger("elasticdl.master")
_LEVELS = {Level.INFO: logging.INFO, Level.WARNING: logging.WARNING, Level.ERROR: logging.ERROR}


class Core(Protocol):
    """What the shell sees of `core.Job`."""

    def handle(self, event: events.Event, now: float) -> list[commands.Command]: ...

    def snapshot(self) -> dict[str, Any]: ...


class Shell:
    """One life of the master.

    Args:
        core: owned from here on by the thread that calls `run`.
        inbox: where everybody else puts events.
        effects: executes what is slow.
        journal: of this job.
        status_file: for the client.
        cluster: where the job's pods are.
        shell_state: what the shell itself keeps in the journal; `snapshot` adds the core's to it.
        status: says how the job stands.
    """

    def __init__(
        self,
        core: Core,
        inbox: Inbox,
        effects: Effects,
        journal: Journal,
        status_file: StatusFile,
        cluster: Cluster,
        shell_state: dict[str, Any],
        status: Callable[[], JobStatus],
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._effects = effects
        self._journal = journal
        self._status_file = status_file
        self._cluster = cluster
        self._state = shell_state
        self._state_lock = threading.Lock()
        self._status = status
        self._stop = threading.Event()
        self._is_dirty = False
        self._journalled_at = time.monotonic()
        self._ticked_at = float("-inf")
        self._listed_at = time.monotonic()
        self._tick_is_queued = False
        self._phases: dict[str, tuple[str, Phase]] = {}
        self._outcome: commands.EndJob | None = None

    def request_stop(self, reason: str) -> None:
        """Ends the job in order; may be called from a signal handler."""
        self._stop.set()
        self._inbox.post(events.StopRequested(reason))

    def keep_model_layout(self, layout: dict[str, object]) -> None:
        """Keeps the first description of the model for manifests; from any thread."""
        with self._state_lock:
            if not self._state.get("model"):
                self._state["model"] = layout

    def run(self) -> commands.EndJob:
        """Runs the job to its end.

        Returns:
            How it ended.

        Raises:
            Superseded: another master has the job.
            ElasticDLError: the cluster or the journal cannot be used.
        """
        self._handle(pods_listed(self._cluster.list()))
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        while self._outcome is None:
            item = self._inbox.next(self._until_tick_s())
            if item is not None:
                self._take(item)
            self._keep_time()
        self._wait_for_pods()
        self._write_journal()
        return self._outcome

    # Events ------------------------------------------------------------------------------------------------------

    def _take(self, item: Any) -> None:
        match item:
            case Crashed(error):
                raise error
            case Listing(pods, num_creations):
                # A pod whose creation was asked for after the listing is not missing, so such a list says nothing.
                if num_creations == self._effects.num_creations:
                    self._handle(pods)
                else:
                    self._effects.list_pods()
            case events.Tick():
                self._tick_is_queued = False
                self._handle(item)
            case _:
                self._handle(item)

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.PodChanged):
            self._say_phase(event)
        todo = self._core.handle(event, time.monotonic())
        self._is_dirty = True
        if isinstance(event, events.ModelReported | events.ShardsListed):
            self._persist()  # said once in the life of a job
        for command in todo:
            self._execute(command)

    def _keep_time(self) -> None:
        """Queues a tick behind everything that has come in before it, so that late heartbeats are heard first."""
        moment = time.monotonic()
        if moment - self._ticked_at >= TICK_S and not self._tick_is_queued:
            self._ticked_at = moment
            self._tick_is_queued = True
            self._inbox.post(events.Tick())
        if moment - self._listed_at >= RELIST_S:
            self._listed_at = moment
            self._effects.list_pods()
        if self._is_dirty and moment - self._journalled_at >= JOURNAL_INTERVAL_S:
            self._write_journal()
        if self._status_file.is_due:
            self._status_file.write(self._status())

    def _until_tick_s(self) -> float:
        return 0.0 if self._tick_is_queued else self._ticked_at + TICK_S - time.monotonic()

    # Commands ----------------------------------------------------------------------------------------------------

    def _execute(self, command: commands.Command) -> None:
        match command:
            case commands.Reply(call, answer):
                self._inbox.answer(call, answer)
            case commands.Persist():
                self._persist()
            case commands.CreatePod():
                self._effects.create_pod(command)
            case commands.DeletePod():
                self._effects.delete_pod(command)
            case commands.ListShards(kind):
                self._effects.list_shards(kind)
            case commands.ReadAppliedSets():
                self._effects.read_applied_sets(command)
            case commands.SaveCheckpoint():
                with self._state_lock:
                    layout = dict(self._state.get("model") or {})
                self._effects.save_checkpoint(command, layout)
            case commands.Log(level, text):
                logger.log(_LEVELS[level], "%s", text)
            case commands.EndJob():
                self._outcome = command
            case _:
                assert_never(command)

    def snapshot(self) -> dict[str, Any]:
        """Everything that the next life of the master must know."""
        with self._state_lock:
            return {**self._state, "core": self._core.snapshot()}

    def _persist(self) -> None:
        """Writes the journal before anything else happens, however long a full disk takes to be mended."""
        delay_s = 0.1
        while True:
            try:
                self._save()
            except JournalWriteError as error:
                logger.error("%s", error)
                if self._stop.wait(delay_s):
                    raise
                delay_s = min(_MAX_RETRY_S, 2 * delay_s)
            else:
                return

    def _write_journal(self) -> None:
        """Writes what may as well be written later."""
        try:
            self._save()
        except JournalWriteError as error:
            self._journalled_at = time.monotonic()
            logger.warning("%s", error)

    def _save(self) -> None:
        self._journal.save(self.snapshot())
        self._is_dirty = False
        self._journalled_at = time.monotonic()

    # Pods --------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Puts every change of a pod into the inbox; runs in a thread of its own."""
        while self._outcome is None:
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
            if self._stop.wait(_WATCH_RETRY_S):
                return
            self._effects.list_pods()  # for what was missed

    def _say_phase(self, event: events.PodChanged) -> None:
        before = self._phases.get(event.name)
        if before == (event.uid, event.phase):
            return
        self._phases[event.name] = (event.uid, event.phase)
        old = before[1] if before is not None and before[0] == event.uid else "new"
        details = [event.reason] if event.reason else []
        if event.exit_code is not None:
            details.append(f"exit code {event.exit_code}")
        if event.message and event.phase in (Phase.PENDING, Phase.FAILED):
            details.append(event.message.strip().splitlines()[-1])
        said = f" ({', '.join(details)})" if details else ""
        logger.info("Pod %s: %s -> %s%s", event.name, old, event.phase, said)

    def _wait_for_pods(self) -> None:
        """Gives pods that were told to leave the time to do so; calls are still answered."""
        deadline = time.monotonic() + _LAST_PODS_S
        gone = {Phase.SUCCEEDED, Phase.FAILED, Phase.DELETED}
        while time.monotonic() < deadline and any(phase not in gone for _, phase in self._phases.values()):
            item = self._inbox.next(TICK_S)
            if isinstance(item, Crashed):
                logger.error("While the job ended: %r", item.error)
            elif item is not None and not isinstance(item, Listing):
                self._handle_last(item)

    def _handle_last(self, event: events.Event) -> None:
        """After the end only calls are answered and pods deleted."""
        if isinstance(event, events.PodChanged):
            self._say_phase(event)
        for command in self._core.handle(event, time.monotonic()):
            if isinstance(command, commands.Reply | commands.DeletePod):
                self._execute(command)


def end_of_log(cluster: Cluster, pod: str) -> str:
    """The last lines of a pod's log, for the message that a job ends with; empty if there are none."""
    if not pod:
        return ""
    try:
        lines = cluster.logs(pod).rstrip().splitlines()[-_LOG_LINES:]
    except ElasticDLError as error:
        logger.warning("The log of %s cannot be read: %s", pod, error.what)
        return ""
    return "\n".join(lines)
