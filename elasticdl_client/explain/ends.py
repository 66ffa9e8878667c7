"""Why pods ended: actions of the cluster, the kernel or the program itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from elasticdl_client.choices import Runtime
from elasticdl_client.explain.diagnosis import Diagnosis, Facts, Trouble, as_sentences, evidence, recovery
from elasticdl_client.job_events import EventKind, JobEvent

_BY_REASON = {
    "OOMKilled": (Trouble.OUT_OF_MEMORY, "ran out of memory and was killed"),
    "Evicted": (Trouble.EVICTED, "was evicted"),
    "Preempted": (Trouble.PREEMPTED, "was preempted"),
    "NodeLost": (Trouble.NODE_LOST, "was lost with its node"),
    "Killed": (Trouble.KILLED, "was killed from outside"),
    "Deleted": (Trouble.DELETED, "was deleted"),
    "Error": (Trouble.PROGRAM_FAILED, "ended by an error of its own program"),
    "Completed": (Trouble.PROGRAM_FAILED, "ended, although there was work left"),
}
_NO_RUNTIME = re.compile(
    r"No module named '?elasticdl|executable file not found|no such file or directory: unknown|exit code 127\b"
)
_AWAY = re.compile(r"does not answer|cannot be reached|connection refused|i/o timeout|handshake timeout", re.IGNORECASE)
_VERSIONS = re.compile(r"same version of elasticdl|another version of ElasticDL|speaks version \d+ of the wire")


def without_runtime(text: str) -> bool:
    """Return whether a container's end says that its image lacks Python or ElasticDL."""
    return _NO_RUNTIME.search(text) is not None


def other_version(text: str) -> bool:
    """Return whether an error says that two pods run different versions of ElasticDL."""
    return _VERSIONS.search(text) is not None


def server_is_away(text: str) -> bool:
    """Return whether an error says that the API server did not answer."""
    return _AWAY.search(text) is not None


def lost_pods(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose every pod that ended unexpectedly."""
    for event in facts.of(EventKind.POD_LOST):
        trouble, words = _why(facts, event)
        done, cost = recovery(facts, event)
        yield Diagnosis.of(
            event,
            trouble,
            f"{event.subject} {words}",
            evidence(facts, event),
            done,
            _advice(trouble, facts, event),
            cost=cost,
            is_fatal=facts.has_ended_by(event),
            key=_role(event),
        )


def _why(facts: Facts, event: JobEvent) -> tuple[Trouble, str]:
    runs_command = bool(facts.flag("job_command"))  # then the command may call a missing program
    if facts.job.runtime is Runtime.KUBERNETES and not runs_command and without_runtime(event.message):
        return Trouble.IMAGE_WITHOUT_RUNTIME, "found no ElasticDL in its image"
    if other_version(event.message):
        return Trouble.VERSIONS_DIFFER, "runs another version of ElasticDL than the rest of the job"
    found = _BY_REASON.get(str(event.details.get("reason", "")))
    return found or (Trouble.PROGRAM_FAILED, "ended")


def _role(event: JobEvent) -> str:
    return event.subject.partition("-")[0]


def _advice(trouble: Trouble, facts: Facts, event: JobEvent) -> str:
    role, name = _role(event), facts.job.name
    is_local = facts.job.runtime is Runtime.LOCAL
    log = f"`{facts.job.command('logs')} --pod={event.subject}` has its whole log"
    match trouble:
        case Trouble.OUT_OF_MEMORY if is_local:
            return "Start fewer workers (--num_workers) or take a smaller --minibatch_size: pods share this machine."
        case Trouble.OUT_OF_MEMORY:
            grown = " A successor gets 1.5 times the memory each time, up to 4 times."
            return f"Raise --{role}_resource_limit=memory=…, or lower --minibatch_size.{grown}"
        case Trouble.EVICTED:
            return (
                "If the node was short of memory or disk, request what the pods use "
                f"(--{role}_resource_request); an eviction by a node's drain needs nothing."
            )
        case Trouble.PREEMPTED if is_local:
            return "Nothing: the job continues with the slots that it has."
        case Trouble.PREEMPTED:
            return f"Nothing, or a higher priority: --{role}_pod_priority."
        case Trouble.NODE_LOST:
            return "Nothing for the job; `kubectl get nodes` shows the state of the nodes."
        case Trouble.KILLED:
            return (
                "Nothing, if that was meant. Otherwise look for what sends signals: a person, a batch system, or the "
                "kernel when memory runs out (its log, `dmesg`, says so)."
            )
        case Trouble.DELETED:
            return "Nothing, if that was meant: kubectl, a controller or the drain of a node deleted it."
        case Trouble.IMAGE_WITHOUT_RUNTIME:
            return "Build the image with `elasticdl zoo init` and `elasticdl zoo build`, or install elasticdl2 in it."
        case Trouble.VERSIONS_DIFFER:
            return "Let all pods run one version: the same tag in --image_name and --worker_image, pulled anew."
    return f"Mend the error that the last lines of its log show; {log} (job {name})."


def outages(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose times in which the master could not write its journal: no API server, or a full disk."""
    for event in facts.of(EventKind.JOURNAL_DELAYED):
        seconds = float(event.details.get("seconds", 0.0))
        is_away = facts.job.runtime is Runtime.KUBERNETES and server_is_away(event.message)
        yield Diagnosis.of(
            event,
            Trouble.API_SERVER_AWAY if is_away else Trouble.JOURNAL_NOT_WRITTEN,
            f"The API server did not answer for {seconds:.1f} s"
            if is_away
            else f"The journal could not be written for {seconds:.1f} s",
            (event.message,),
            "Workers trained on with the tasks that they had; pods, failures and the end of tasks were written down "
            "afterwards.",
            "Nothing for the job. `kubectl cluster-info` shows the server's state."
            if is_away
            else "Make room, or make the place writable; on Kubernetes see that the master may patch its ConfigMap.",
            subject="master",
        )


def master(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose every restart of the master."""
    for event in facts.of(EventKind.MASTER_RESTARTED):
        before = [one for one in facts.history.events if one.number < event.number]
        since = f"; the last event before it is {max(0.0, event.at - before[-1].at):.1f} s older" if before else ""
        pod = next((pod for pod in facts.job.status.pods if pod.role == "master"), None)
        seen = f"{pod.name}: {pod.message}" if pod is not None and pod.message else ""
        generation = int(event.details.get("generation", facts.job.status.generation))
        rejoined = [one for one in facts.consequences(event) if one.kind is EventKind.GROUP_FORMED]
        done = ["a new master read the journal; pods that ran were kept, and nothing was trained again"]
        done += ["the group formed again"] if rejoined else []
        yield Diagnosis.of(
            event,
            Trouble.MASTER_KILLED,
            "The master ended, and was started again",
            (f"the master runs in generation {generation}{since}", *([seen] if seen else [])),
            as_sentences(done),
            f"Nothing. {_log_of_ended_master(facts, event)}",
            subject="master",
        )


def _log_of_ended_master(facts: Facts, restarted: JobEvent) -> str:
    """Return where the log of the generation before a restart is: a pod has that of its last run but one."""
    logs = f"{facts.job.command('logs')} --role=master"
    is_newest = restarted is facts.of(EventKind.MASTER_RESTARTED, EventKind.JOB_RESUMED)[-1]
    if facts.job.runtime is Runtime.LOCAL:
        return f"Why it ended: `{logs}{' --previous' if is_newest else ''}`."
    pod = next((pod for pod in facts.job.status.pods if pod.role == "master"), None)
    if is_newest and pod is not None and pod.restarts:
        return f"Why it ended: `{logs} --previous`."
    return "The log of that run is gone; --log_file_path keeps logs on a volume."
