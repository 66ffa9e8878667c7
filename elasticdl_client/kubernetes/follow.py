"""--wait: follows a job on the cluster to its end, as the local runtime does; the job does not need it.

Reads the master's pod and status once a second.  Nothing here changes the job.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from elasticdl_client import progress
from elasticdl_client.errors import JobError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_series import JobJournal
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import Ended, JobPhase, JobStatus
from elasticdl_client.jobs.cluster_logs import PodLogs
from elasticdl_client.kubernetes import api, events, names
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.resources import why_gated
from elasticdl_client.progress import Display
from elasticdl_client.report import print_end
from elasticdl_client.script_output import ScriptOutput, Shown

BLOCKED = frozenset(
    {"ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError", "RegistryUnavailable"}
)
"""Reasons for which a container does not start without intervention."""

_LOOK_S = 1.0
_MAX_IDLE_RESTARTS = 4  # of the master in a row without a committed record; the last of them takes the kubelet 80 s
_INTERRUPTED = 130
_OVERDUE_S = 30.0  # after its grace period; kubelets of the servers that we know take up to 90 s where they are slow


def wait(connection: Connection, spec: JobSpec, shown: Shown = Shown.GLANCE) -> int:
    """Follows a job; the exit code for the shell: the job's, or 130 after Ctrl-C.

    Args:
        connection: to the cluster.
        spec: of the job.
        shown: the part of its workers' output that is shown.

    Raises:
        ClusterError: the cluster refuses to tell; the job keeps running.
    """
    job = spec.job_name
    logs = api.elasticdl_command("logs -f", spec)
    display = progress.open_display(sys.stdout)
    try:
        follower = ClusterFollower(connection, spec, display, shown)
        ended = follower.follow()
    except KeyboardInterrupt:
        display.close()
        print(f"The job {job} keeps running. To follow it: {logs}", file=sys.stderr)
        print(f"To end it: {api.elasticdl_command('delete', spec)}", file=sys.stderr)
        return _INTERRUPTED
    except JobError as error:
        display.close()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ClusterError as error:
        hint = f"The job {job} keeps running; to follow it: {logs}. {error.hint}"
        raise ClusterError(error.what, hint, error.status) from error
    finally:
        display.close()
    hint = f"`{api.elasticdl_command('logs', spec)}` shows the master's log, with --all those of all pods."
    print_end(spec, ended, follower.history, logs=api.elasticdl_command("logs", spec), hint=hint)
    return ended.exit_code


class ClusterFollower:
    """Looks at a job's master and status until they say that the job has ended, or cannot continue as it is.

    Args:
        connection: to the cluster.
        spec: of the job.
        display: shows the job.
        shown: the part of its workers' output that is shown, too.
        overdue_s: a deleted master is called overdue when it is there for so long after its grace period.

    Attributes:
        history: the events of the job, as far as they could be read.
    """

    def __init__(
        self,
        connection: Connection,
        spec: JobSpec,
        display: Display,
        shown: Shown = Shown.GLANCE,
        overdue_s: float = _OVERDUE_S,
    ) -> None:
        self._connection = connection
        self._spec = spec
        self._display = display
        self._overdue_s = overdue_s
        self._leaving = ("", 0.0)  # the uid of a master that is being deleted, and since when that is known
        self._status: JobStatus | None = None
        self.history: EventHistory | None = None
        self._journal = ""
        self._lacks_state = False
        self._said = ""
        self._restarts = 0
        self._idle_restarts = 0
        self._outage = False
        prefix = names.pod_name(spec.job_name, "master", 0).removesuffix("master")
        self._script = ScriptOutput(
            PodLogs(connection, spec.namespace, prefix), prefix, max(spec.num_workers, spec.max_workers), shown
        )

    def follow(self) -> Ended:
        """Returns when the job has ended.

        Raises:
            JobError: it has not, and will not without intervention.
            ClusterError: the cluster refuses to tell.
        """
        pause = threading.Event()
        while True:
            ended = self._look()
            if self._status is not None:
                for line in self._script.lines(self._status, last=ended is not None):
                    self._display.say(line)
            if ended is not None:
                return ended
            pause.wait(_LOOK_S)

    def _look(self) -> Ended | None:
        try:
            master = self._read_master()
            self._read_status()
            if master is None and not self._has_ended():
                self._require_job()
        except ClusterError as error:
            if not error.unreachable:
                raise
            if not self._outage:
                self._display.say(f"{error.what} Retrying; the job keeps running.")
            self._outage = True
            return None
        if self._outage:
            self._display.say("The cluster answers again.")
            self._outage = False
        return self._ended(master)

    def _ended(self, master: Any) -> Ended | None:
        status = self._status
        if status is not None and status.exit_code is not None:
            failed = status.phase is JobPhase.FAILED
            return Ended(status.exit_code or int(failed), status.message, status)
        if master is None:
            raise self._stopped("has no master: its pod was deleted")
        phase = _phase(master)
        if phase == "Succeeded":
            return Ended(0, "", status)
        if phase == "Failed" and master.metadata.deletion_timestamp is None:
            if (master.metadata.labels or {}).get(names.STATUS_LABEL) == names.STOPPED:
                raise JobError(
                    f"The job {self._spec.job_name} was stopped by `elasticdl stop`.",
                    f"`{api.elasticdl_command('resume', self._spec)}` continues it.",
                )
            raise self._stopped(f"has lost its master: {_end_of(master)}")
        self._say_news(master)
        return None

    def _has_ended(self) -> bool:
        return self._status is not None and self._status.exit_code is not None

    def _stopped(self, why: str) -> JobError:
        job = self._spec.job_name
        if self._lacks_state:
            return JobError(*api.without_state(job, api.elasticdl_command("delete", self._spec), self._spec))
        return JobError(
            f"The job {job} {why}. Its workers and parameter servers wait {self._spec.master_timeout:g} s for another.",
            f"`{api.elasticdl_command('resume', self._spec)}` makes one, which continues where this one stopped; "
            f"`{api.elasticdl_command('delete', self._spec)}` ends the job.",
        )

    def _say_news(self, master: Any) -> None:
        """Says why the master does not run, when that changes; raises if it will not by itself."""
        found = _own_container(master)
        self._count_restarts(found)
        waiting = found.state.waiting if found is not None and found.state is not None else None
        if waiting is not None and waiting.reason in BLOCKED and not found.restart_count and self._status is None:
            reason = f"{waiting.reason}: {waiting.message or ''}".rstrip(": ")
            raise self._never_starts(f"its master's container cannot start: {reason}.")
        if master.metadata.deletion_timestamp is not None:
            self._say(self._how_it_leaves(master.metadata, master.spec.node_name))
        elif master.status.phase == "Pending":
            self._say(f"The master's pod is pending{self._why_pending(master)}")
        else:
            self._said = ""

    def _why_pending(self, pod: Any) -> str:
        """After "pending": its queue or gates, or the message of the scheduler or, in Events while it makes the
        container, of the kubelet."""
        if gated := why_gated(self._connection.client.sanitize_for_serialization(pod)):
            return f": {gated}"
        for condition in pod.status.conditions or []:
            if condition.type == "PodScheduled" and condition.status == "False":
                return f": {condition.reason}: {condition.message}"
        for container in pod.status.container_statuses or []:
            waiting = container.state.waiting if container.state is not None else None
            if waiting is not None and waiting.reason not in (None, "ContainerCreating", "PodInitializing"):
                return f": {waiting.reason}: {waiting.message or ''}".rstrip(": ")
        if not pod.spec.node_name:
            return "."
        told = events.newest(self._connection, self._spec.namespace, [pod.metadata.uid])
        return f": {told.get(pod.metadata.uid, f'its container is made on {pod.spec.node_name}.')}"

    def _how_it_leaves(self, master: Any, node: str | None) -> str:
        """Of a master that is being deleted; by this machine's clock, which need not agree with the cluster's."""
        now = time.monotonic()
        if self._leaving[0] != master.uid:
            self._leaving = (master.uid, now)
        if now - self._leaving[1] <= (master.deletion_grace_period_seconds or 0) + self._overdue_s:
            return "The master's pod is being deleted."
        overdue = f"The master's pod should have been gone {self._overdue_s:g} s ago, and is still being deleted:"
        if master.finalizers:
            return f"{overdue} it is kept by {', '.join(master.finalizers)}, until the owner of that removes it."
        take_away = api.kubectl_command(f"delete pod {master.name} --grace-period=0 --force", self._spec)
        return (
            f"{overdue} its node {node} has not reported the end of its container. If the node is lost, "
            f"`{take_away}` takes the pod away, and `{api.elasticdl_command('resume', self._spec)}` makes another."
        )

    def _never_starts(self, why: str) -> JobError:
        job = self._spec.job_name
        return JobError(
            f"The job {job} does not {'start' if self._status is None else 'continue'}; {why}",
            f"The job is left as it is: `{api.elasticdl_command('delete', self._spec)}` deletes it.",
        )

    def _say(self, line: str) -> None:
        if line != self._said:
            self._display.say(line)
        self._said = line

    def _count_restarts(self, container: Any) -> None:
        if container is None or container.restart_count <= self._restarts:
            return
        self._idle_restarts += container.restart_count - self._restarts
        self._restarts = container.restart_count
        last = container.last_state.terminated if container.last_state is not None else None
        said = (last.message or "").strip() if last is not None else ""
        why = f" ({last.reason}, exit code {last.exit_code})" if last is not None else ""
        self._display.say(f"The master has ended{why} and is started again (restart {self._restarts}).")
        if said and self._restarts == 1:
            self._display.say(said.splitlines()[-1])
        if self._idle_restarts >= _MAX_IDLE_RESTARTS:
            raise self._never_starts(f"its master has ended {self._restarts} times; its last lines:\n{said}")

    def _read_master(self) -> Any:
        name = names.pod_name(self._spec.job_name, "master", 0)
        return self._read(f"the pod {name}", self._connection.core.read_namespaced_pod, name)

    def _read_status(self) -> None:
        name = names.state_object(self._spec.job_name)
        found = self._read(f"the ConfigMap {name}", self._connection.core.read_namespaced_config_map, name)
        self._lacks_state = found is None
        text = ((found.data if found is not None else None) or {}).get(names.STATUS_KEY)
        if not text:
            return
        try:
            status = JobStatus.from_json(text)
        except (ValueError, TypeError):  # the master writes the next
            return
        has_news = self._read_events((found.binary_data or {}).get(names.JOURNAL_KEY, ""))
        if has_news or status != self._status:
            if self._status is not None and status.records_done > self._status.records_done:
                self._idle_restarts = 0
            self._status = status
            self._display.update(status, self.history)

    def _read_events(self, journal: str) -> bool:
        """Reads the events if the journal is another one; whether it was."""
        if journal == self._journal:
            return False
        self._journal = journal
        try:
            self.history = JobJournal.unpack(journal).history
        except ValueError:  # the job is shown without them
            return False
        return True

    def _require_job(self) -> None:
        """Raises if the job was deleted."""
        name = names.job_object(self._spec.job_name)
        if self._read(f"the ConfigMap {name}", self._connection.core.read_namespaced_config_map, name) is None:
            raise JobError(f"The job {self._spec.job_name} was deleted.", "")

    def _read(self, what: str, read: Any, name: str) -> Any:
        """An object of the job's namespace; None if there is none."""
        try:
            with self._connection.doing(f"read {what} in the namespace {self._spec.namespace}"):
                return read(name, self._spec.namespace)
        except ClusterError as error:
            if error.status == 404:
                return None
            raise


def _own_container(pod: Any) -> Any:
    """Return the status of the container that does the work; None while there is none."""
    own = names.own_container(pod.metadata.name, [container.name for container in pod.spec.containers])
    return next((status for status in pod.status.container_statuses or () if status.name == own), None)


def _phase(pod: Any) -> str:
    """Return the phase of a pod; that of its own container's end where another container runs on."""
    found = _own_container(pod)
    ended = found.state.terminated if found is not None and found.state is not None else None
    if pod.status.phase != "Running" or ended is None or (ended.exit_code and pod.spec.restart_policy != "Never"):
        return str(pod.status.phase)
    return "Failed" if ended.exit_code else "Succeeded"


def _end_of(pod: Any) -> str:
    """Return why a pod has failed, in one line, and the end of its log."""
    found = _own_container(pod)
    ended = found.state.terminated if found is not None and found.state is not None else None
    if pod.status.reason:
        return f"{pod.status.reason}: {pod.status.message or ''}".rstrip(". :")
    if ended is None:
        return "its pod has failed"
    said = (ended.message or "").strip()
    return f"exit code {ended.exit_code}" + (f"; its last lines:\n{said}\n" if said else "")
