"""--wait: follows a job on the cluster to its end, as the local runtime does; the job does not need it.

Reads the master's pod and status once a second.  Nothing here changes the job.
"""

from __future__ import annotations

import sys
import threading
import time

from elasticdl_client import progress
from elasticdl_client.errors import JobError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_series import JobJournal
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import Ended, JobPhase, JobStatus
from elasticdl_client.jobs import cluster_objects
from elasticdl_client.jobs.cluster_logs import PodLogs
from elasticdl_client.jobs.cluster_objects import Object
from elasticdl_client.kubernetes import api, events, names
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.api_client import object_path
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
    """Follow a job; return the exit code for the shell: the job's, or 130 after Ctrl-C.

    Args:
        connection: Connection to the cluster.
        spec: The job.
        shown: the part of its workers' output that is shown.

    Raises:
        ClusterError: The cluster refuses a request; the job keeps running.
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
        connection: Connection to the cluster.
        spec: The job.
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
        """Follow the job until it has ended.

        Raises:
            JobError: it has not, and will not without intervention.
            ClusterError: The cluster refuses a request.
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

    def _ended(self, master: Object | None) -> Ended | None:
        status = self._status
        if status is not None and status.exit_code is not None:
            failed = status.phase is JobPhase.FAILED
            return Ended(status.exit_code or int(failed), status.message, status)
        if master is None:
            raise self._stopped("has no master: its pod was deleted")
        phase = _phase(master)
        if phase == "Succeeded":
            return Ended(0, "", status)
        if phase == "Failed" and not cluster_objects.is_going(master):
            if (master["metadata"].get("labels") or {}).get(names.STATUS_LABEL) == names.STOPPED:
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

    def _say_news(self, master: Object) -> None:
        """Print why the master does not run, when the reason changes; raise if it will not run by itself."""
        found = cluster_objects.container(master)
        self._count_restarts(found)
        waiting = _state(found, "waiting")
        if waiting.get("reason") in BLOCKED and not found.get("restartCount") and self._status is None:
            reason = f"{waiting['reason']}: {waiting.get('message') or ''}".rstrip(": ")
            raise self._never_starts(f"its master's container cannot start: {reason}.")
        if cluster_objects.is_going(master):
            self._say(self._how_it_leaves(master["metadata"], master["spec"].get("nodeName")))
        elif master["status"].get("phase") == "Pending":
            self._say(f"The master's pod is pending{self._why_pending(master)}")
        else:
            self._said = ""

    def _why_pending(self, pod: Object) -> str:
        """After "pending": its queue or gates, or the message of the scheduler or, in Events while it makes the
        container, of the kubelet."""
        if gated := why_gated(pod):
            return f": {gated}"
        for condition in pod["status"].get("conditions") or []:
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f": {condition.get('reason')}: {condition.get('message')}"
        for container in pod["status"].get("containerStatuses") or []:
            waiting = _state(container, "waiting")
            if waiting.get("reason") not in (None, *cluster_objects.IN_THE_MAKING):
                return f": {waiting['reason']}: {waiting.get('message') or ''}".rstrip(": ")
        node, uid = pod["spec"].get("nodeName"), pod["metadata"]["uid"]
        if not node:
            return "."
        told = events.newest(self._connection, self._spec.namespace, [uid])
        return f": {told.get(uid, f'its container is made on {node}.')}"

    def _how_it_leaves(self, master: Object, node: str | None) -> str:
        """Return how a master is being deleted; by this machine's clock, which may differ from the cluster's."""
        now = time.monotonic()
        if self._leaving[0] != master["uid"]:
            self._leaving = (master["uid"], now)
        if now - self._leaving[1] <= (master.get("deletionGracePeriodSeconds") or 0) + self._overdue_s:
            return "The master's pod is being deleted."
        overdue = f"The master's pod should have been gone {self._overdue_s:g} s ago, and is still being deleted:"
        if finalizers := master.get("finalizers"):
            return f"{overdue} it is kept by {', '.join(finalizers)}, until the owner of that removes it."
        take_away = api.kubectl_command(f"delete pod {master['name']} --grace-period=0 --force", self._spec)
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

    def _count_restarts(self, container: Object) -> None:
        count = container.get("restartCount", 0)
        if count <= self._restarts:
            return
        self._idle_restarts += count - self._restarts
        self._restarts = count
        last = (container.get("lastState") or {}).get("terminated") or {}
        said = (last.get("message") or "").strip()
        why = f" ({last.get('reason')}, exit code {last.get('exitCode')})" if last else ""
        self._display.say(f"The master has ended{why} and is started again (restart {self._restarts}).")
        if said and self._restarts == 1:
            self._display.say(said.splitlines()[-1])
        if self._idle_restarts >= _MAX_IDLE_RESTARTS:
            raise self._never_starts(f"its master has ended {self._restarts} times; its last lines:\n{said}")

    def _read_master(self) -> Object | None:
        name = names.pod_name(self._spec.job_name, "master", 0)
        return self._read(f"the pod {name}", "pods", name)

    def _read_status(self) -> None:
        name = names.state_object(self._spec.job_name)
        found = self._read(f"the ConfigMap {name}", "configmaps", name)
        self._lacks_state = found is None
        text = ((found or {}).get("data") or {}).get(names.STATUS_KEY)
        if found is None or not text:
            return
        try:
            status = JobStatus.from_json(text)
        except (ValueError, TypeError):  # the master writes the next
            return
        has_news = self._read_events((found.get("binaryData") or {}).get(names.JOURNAL_KEY, ""))
        if has_news or status != self._status:
            if self._status is not None and status.records_done > self._status.records_done:
                self._idle_restarts = 0
            self._status = status
            self._display.update(status, self.history)

    def _read_events(self, journal: str) -> bool:
        """Read the events if the journal has changed; return whether it has."""
        if journal == self._journal:
            return False
        self._journal = journal
        try:
            self.history = JobJournal.unpack(journal).history
        except ValueError:  # the job is shown without them
            return False
        return True

    def _require_job(self) -> None:
        """Raise if the job was deleted."""
        name = names.job_object(self._spec.job_name)
        if self._read(f"the ConfigMap {name}", "configmaps", name) is None:
            raise JobError(f"The job {self._spec.job_name} was deleted.", "")

    def _read(self, what: str, resource: str, name: str) -> Object | None:
        """Return an object of the job's namespace; None if there is none."""
        try:
            with self._connection.doing(f"read {what} in the namespace {self._spec.namespace}"):
                found: Object = self._connection.get(object_path(resource, name, self._spec.namespace))
                return found
        except ClusterError as error:
            if error.status == 404:
                return None
            raise


def _state(container: Object, kind: str) -> Object:
    """Return the state of a container if it is of that kind, such as `waiting`; else empty."""
    found: Object = (container.get("state") or {}).get(kind) or {}
    return found


def _phase(pod: Object) -> str:
    """Return the phase of a pod; that of its own container's end where another container runs on."""
    ended, phase = _state(cluster_objects.container(pod), "terminated"), str(pod["status"].get("phase"))
    is_over = ended and (not ended["exitCode"] or pod["spec"].get("restartPolicy") == "Never")
    if phase != "Running" or not is_over:
        return phase
    return "Failed" if ended["exitCode"] else "Succeeded"


def _end_of(pod: Object) -> str:
    """Return why a pod has failed, in one line, and the end of its log."""
    ended, status = _state(cluster_objects.container(pod), "terminated"), pod["status"]
    if status.get("reason"):
        return f"{status['reason']}: {status.get('message') or ''}".rstrip(". :")
    if not ended:
        return "its pod has failed"
    said = (ended.get("message") or "").strip()
    return f"exit code {ended['exitCode']}" + (f"; its last lines:\n{said}\n" if said else "")
