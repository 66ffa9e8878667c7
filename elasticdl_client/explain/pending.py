"""Why pods do not start: the messages of scheduler, kubelet and API server as troubles.

The messages are those of Kubernetes 1.20 to 1.34; their common parts are matched, never a whole sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from elasticdl_client.explain.diagnosis import Cost, Diagnosis, Facts, Trouble, stated
from elasticdl_client.explain.ends import server_is_away, without_runtime
from elasticdl_client.job_events import Detail, EventKind, JobEvent
from elasticdl_client.job_status import RUNS_AGAIN

_COUNTED = re.compile(
    r"(?P<count>\d+) (?P<reason>Insufficient \S+?|Too many pods|node\(s\) [^,]*?(?:\{[^}]*\}[^,]*)?)(?=, |\. |\.?$)"
)
_NODES = re.compile(r"0/(\d+) nodes are available")
_GPU = re.compile(r"gpu|nvidia|amd\.com|habana|tpu", re.IGNORECASE)
_CONTROL_PLANE = re.compile(r"node-role\.kubernetes\.io/(control-plane|master)$")  # no place for a job in any cluster
_TAINT = re.compile(r"taint\w* \{(?P<key>[^:}]+)")
_CLAIM = re.compile(
    r"unbound immediate PersistentVolumeClaims|persistentvolumeclaim \"?[\w.-]+\"? not found"
    r"|volume node affinity conflict|FailedMount|FailedAttachVolume|Unable to attach or mount volumes",
    re.IGNORECASE,
)
_MISSING = re.compile(r"(secret|configmap) \"?[\w./-]+\"? not found|references non-existent (secret|config) key", re.I)
_NEVER_RAN = re.compile(r"before: (StartError|ContainerCannotRun)")  # of containerd, of Docker
_PULL_SECRET = re.compile(
    r"FailedToRetrieveImagePullSecret|Unable to retrieve some image pull secrets|401 Unauthorized"
    r"|unauthorized|authentication required|no basic auth credentials|pull access denied|insufficient_scope"
    r"|denied: |403 Forbidden",
    re.IGNORECASE,
)
_PULL = re.compile(r"ErrImagePull|ImagePullBackOff|Back-off pulling|Failed to pull image")
_LIMITED = re.compile(r"toomanyrequests|Too Many Requests", re.IGNORECASE)
_NO_REGISTRY = re.compile(
    r"no such host|i/o timeout|connection re(?:fused|set)|handshake timeout|deadline exceeded|Client\.Timeout|x509: "
    r"|no route to host|network is unreachable|server misbehaving|Bad Gateway|Service Unavailable",
    re.IGNORECASE,
)
_NO_IMAGE = re.compile(r"ErrImageNeverPull|InvalidImageName|ImageInspectError|InspectFailed")
_RANGE = re.compile(r" per (Container|Pod) is|must be less than or equal to \w+ limit")
_GATE = re.compile(r"waiting (in queue (?P<queue>\S+)|for its scheduling gates: (?P<gates>.+))")
_RIGHT = re.compile(r"has no right to|cannot \w+ resource|serviceaccount \"?[\w.-]+\"? not found", re.IGNORECASE)
_IMAGE = re.compile(r"[Ii]mage \\?\"(?P<image>[^\"\\]+)\\?\"")
_ENDS = (EventKind.POD_LOST, EventKind.POD_GIVEN_UP, EventKind.POD_COMPLETED, EventKind.POD_STOPPED)
_MIN_GATED_SECONDS = 10.0  # every pod of a queue is gated at first, until it is admitted


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a pod does not start.

    Attributes:
        seen: the text after the name of the pod.
        evidence: values read from the message, by name.
    """

    trouble: Trouble
    seen: str
    advice: str
    evidence: dict[str, Detail] = field(default_factory=dict)


_RIGHT_MISSING = Wait(
    Trouble.RIGHT_MISSING,
    "cannot be created: the job's service account lacks a right",
    "`elasticdl rbac --print | kubectl apply -f -` grants what a job needs; --service_account names another.",
)
_WITHOUT_RUNTIME = Wait(
    Trouble.IMAGE_WITHOUT_RUNTIME,
    "cannot start: its image has no Python with ElasticDL",
    "Build the image with `elasticdl zoo init` and `elasticdl zoo build`, or install elasticdl2 in it.",
)


_NOT_CREATED = Wait(
    Trouble.CONTAINER_NOT_CREATED,
    "cannot start: its container cannot be made",
    "The message names what is missing, such as a Secret or ConfigMap of --volume, --envs or --cluster_spec.",
)


_CRASHING = Wait(
    Trouble.PROGRAM_FAILED,
    "ends by an error and is started again",
    "Mend the error at the end of its log.",
)
_WORKERS_CAME_FIRST = (
    "Where workers have taken the place of a lost server, `elasticdl scale` with a lower --num_workers gives it back; "
    "with a --ps_pod_priority above theirs the scheduler does so itself."
)


def why_waiting(message: str, role: str = "worker") -> Wait | None:
    """Return what a message of a pod that does not start means; None if it means no trouble.

    Args:
        message: Message of its status, of an Event, or of the refusal of its creation.
        role: Role of the pod, for the flags in the advice.
    """
    if "exceeded quota" in message or re.search(r"exceeds? .*quota|must specify .*limits", message):
        return _quota(message)
    if _RIGHT.search(message):
        return _RIGHT_MISSING
    if (gate := _GATE.match(message)) is not None:
        return _gated(gate["queue"] or "", gate["gates"] or "")
    if _NODES.search(message) or "Insufficient" in message:
        return _unscheduled(message, role)
    if _MISSING.search(message):
        return _NOT_CREATED
    if _CLAIM.search(message):
        return _claim(message)
    if _PULL.search(message) or _NO_IMAGE.search(message) or "image pull secret" in message.lower():
        return _image(message)
    if without_runtime(message):
        return _WITHOUT_RUNTIME
    if message.startswith("CrashLoopBackOff") and not _NEVER_RAN.search(message):
        return _out_of_memory(role) if "before: OOMKilled" in message else _CRASHING
    has_failed = message.startswith(("CreateContainer", "RunContainerError", "CrashLoopBackOff"))
    return _NOT_CREATED if has_failed else None


def why_crashing(log: str) -> Wait:
    """Return why a master ends again and again, by the end of its log."""
    if without_runtime(log):
        return _WITHOUT_RUNTIME
    if _RIGHT.search(log) or "lacks rights" in log:
        return _RIGHT_MISSING
    return replace(_CRASHING, evidence={"log": log})


def _out_of_memory(role: str) -> Wait:
    return Wait(
        Trouble.OUT_OF_MEMORY,
        "ran out of memory and was killed, and is started again",
        f"Raise --{role}_resource_limit=memory=….",
    )


def why_refused(message: str, role: str = "worker") -> Wait:
    """Return why the API did not take a pod."""
    found = why_waiting(message, role)
    if found is not None:
        return found
    if server_is_away(message) and "webhook" not in message:
        return Wait(
            Trouble.API_SERVER_AWAY,
            "could not be created: the API server did not answer",
            "Nothing for the job: it trains on and tries again. `kubectl cluster-info` shows the server's state.",
        )
    if _RANGE.search(message):
        return Wait(
            Trouble.POD_REFUSED,
            "cannot be created: a LimitRange of the namespace does not allow what it asks for",
            f"Change the LimitRange (`kubectl describe limitrange` shows it), which the pods of a running job follow; "
            f"or start the job with another --{role}_resource_request and --{role}_resource_limit.",
        )
    return Wait(
        Trouble.POD_REFUSED,
        "cannot be created: the API server refuses it",
        "The message is the server's or an admission webhook's; `--dry_run` prints what is submitted.",
    )


def _quota(message: str) -> Wait:
    found = dict(re.findall(r"(requested|used|limited): ([^,\s]+(?:,[\w./-]+=[^,\s]+)*)", message))
    return Wait(
        Trouble.QUOTA_EXCEEDED,
        "cannot be created: the quota of the namespace is used up",
        "Raise the quota, ask for less (--num_workers, --worker_resource_request), or wait until others have ended.",
        found,
    )


def _unscheduled(message: str, role: str) -> Wait:
    """Return the most important of a scheduler's reasons, with the number of nodes of each."""
    scheduled = message.partition(" preemption:")[0]
    reasons = {found["reason"].strip(): int(found["count"]) for found in _COUNTED.finditer(scheduled)}
    evidence: dict[str, Detail] = {f"nodes: {reason}": count for reason, count in reasons.items()}
    if (nodes := _NODES.search(message)) is not None:
        evidence["nodes"] = int(nodes[1])
    if _CLAIM.search(message):
        claim = _claim(message)
        return Wait(claim.trouble, claim.seen, claim.advice, {**evidence, **claim.evidence})
    taints = {found["key"].strip() for reason in reasons if (found := _TAINT.search(reason)) is not None}
    control_plane = set(filter(_CONTROL_PLANE.match, taints))
    if len(reasons) > len(control_plane):  # the reasons of the other nodes matter
        taints -= control_plane
    lacking = [found[1].rstrip(".,") for found in re.finditer(r"Insufficient (\S+)", scheduled)]
    lacking += ["pods"] if "Too many pods" in scheduled else []
    has_tainted_gpus = any(map(_GPU.search, lacking)) and any(map(_GPU.search, taints))  # the other nodes have none
    if has_tainted_gpus or (taints and not lacking):
        return _tainted(taints, evidence)
    if lacking:
        wait = _insufficient(lacking, f"--{role}_resource_request", evidence)
        return replace(wait, advice=f"{wait.advice} {_WORKERS_CAME_FIRST}") if role == "ps" else wait
    is_cordoned = reasons and all("were unschedulable" in reason or _TAINT.search(reason) for reason in reasons)
    return Wait(
        Trouble.NO_MATCHING_NODE,
        "waits for a node that it may run on",
        "The nodes are cordoned, as for an upgrade: `kubectl get nodes` shows them, `kubectl uncordon NODE` ends it."
        if is_cordoned
        else "Compare --node_selector, and affinities of --pod_template or --cluster_spec, with `kubectl get nodes "
        "--show-labels`.",
        evidence,
    )


def _insufficient(lacking: Sequence[str], request: str, evidence: dict[str, Detail]) -> Wait:
    """Return that no node has enough of some resources, the scarcest kind first.

    Args:
        request: the flag that asks for them.
    """
    if gpu := next(filter(_GPU.search, lacking), ""):
        return Wait(
            Trouble.NO_GPU,
            f"waits for a node with a free GPU ({gpu})",
            f"Add nodes with GPUs, wait until others have ended, or ask for fewer: {request}, --num_workers.",
            {**evidence, "resource": gpu},
        )
    for resource, trouble, seen in (
        ("cpu", Trouble.NO_CPU, "waits for a node with enough processors"),
        ("memory", Trouble.NO_MEMORY, "waits for a node with enough memory"),
    ):
        if resource in lacking:
            return Wait(
                trouble,
                seen,
                f"Add nodes, wait until others have ended, or ask for less: {request}={resource}=…, --num_workers.",
                {**evidence, "resource": resource},
            )
    if lacking[0] == "pods":
        return Wait(
            Trouble.NO_RESOURCE,
            "waits for a node with enough room: each has as many pods as it may have",
            "Add nodes, wait until other pods have ended, or start fewer: --num_workers.",
            {**evidence, "resource": "pods"},
        )
    return Wait(
        Trouble.NO_RESOURCE,
        f"waits for a node with enough {lacking[0]}",
        f"Add nodes with it, wait until others have ended, or ask for less: {request}.",
        {**evidence, "resource": lacking[0]},
    )


def _gated(queue: str, gates: str) -> Wait:
    if queue:
        return Wait(
            Trouble.SCHEDULING_GATED,
            f"waits in the queue {queue}",
            "Nothing, if others use the quota: it starts when the queue admits it, and the job uses the pods that it "
            "has. `kubectl describe workloads` shows what the queue lacks.",
            {"queue": queue},
        )
    return Wait(
        Trouble.SCHEDULING_GATED,
        "waits for its scheduling gates",
        "The component that set the gates removes them: an admission webhook, or a pod template.",
        {"gates": gates},
    )


def _tainted(taints: set[str], evidence: dict[str, Detail]) -> Wait:
    names = ", ".join(sorted(taints))
    return Wait(
        Trouble.TAINT_NOT_TOLERATED,
        f"is tolerated by no node with room: they have the taint {names}",
        f"Tolerate it: --tolerations={min(taints)}; or remove it.",
        {**evidence, "taint": names},
    )


def _claim(message: str) -> Wait:
    found = re.search(r"persistentvolumeclaim \"?([\w.-]+)\"?", message)
    return Wait(
        Trouble.CLAIM_NOT_BOUND,
        "waits for a volume that is not there yet",
        "`kubectl get pvc` shows the claims of --volume: one that is Pending needs a storage class or a volume, and "
        "one with ReadWriteOnce fits a single node.",
        {"claim": found[1]} if found else {},
    )


def _image(message: str) -> Wait:
    found = _IMAGE.search(message)
    evidence: dict[str, Detail] = {"image": found["image"]} if found else {}
    if _LIMITED.search(message):
        return _unpulled(
            "The registry limits how much is pulled; --image_pull_secret names an account with a higher limit. The "
            "kubelet tries again.",
            evidence,
        )
    if _NO_REGISTRY.search(message):
        return _unpulled(
            "The node does not reach the registry that the image's name begins with: correct --image_name, or mend the "
            "node's network, DNS or certificates. The kubelet tries again.",
            evidence,
        )
    if _PULL_SECRET.search(message):
        return Wait(
            Trouble.PULL_NOT_ALLOWED,
            "cannot start: the registry does not let its image be pulled",
            "Name the secret with the credentials in --image_pull_secret, made in the job's namespace by `kubectl "
            "create secret docker-registry`. Some registries give the same answer for a name that does not exist.",
            evidence,
        )
    return _unpulled(
        "Correct --image_name (or --worker_image); `docker pull` shows whether it exists. An image that is only on the "
        "nodes needs --image_pull_policy=IfNotPresent.",
        evidence,
    )


def _unpulled(advice: str, evidence: dict[str, Detail]) -> Wait:
    return Wait(Trouble.IMAGE_NOT_FOUND, "cannot start: its image cannot be pulled", advice, evidence)


def waiting_pods(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose pods that could not be created, scheduled or started, from the events of the job."""
    for event in facts.of(EventKind.POD_PENDING, EventKind.POD_BLOCKED, EventKind.POD_NOT_CREATED):
        role = event.subject.removeprefix(f"elasticdl-{facts.job.name}-").partition("-")[0]
        refused = event.kind is EventKind.POD_NOT_CREATED
        wait = why_refused(event.message, role) if refused else why_waiting(event.message, role)
        if wait is None and event.kind is EventKind.POD_BLOCKED:
            wait = Wait(Trouble.CONTAINER_NOT_CREATED, "cannot start", "The message says what is missing.")
        if wait is None:
            continue
        found = _diagnosis(facts, event, wait)
        is_gated = wait.trouble is Trouble.SCHEDULING_GATED
        if not is_gated or found.cost.is_open or found.cost.slot_seconds >= _MIN_GATED_SECONDS:
            yield found


def _diagnosis(facts: Facts, event: JobEvent, wait: Wait) -> Diagnosis:
    subject = event.subject.removeprefix(f"elasticdl-{facts.job.name}-")
    ran = facts.after(event, subject, EventKind.POD_RUNNING)
    ended = facts.after(event, subject, *_ENDS)
    is_fatal = facts.has_ended_by(event)
    is_open = ran is None and ended is None and not facts.is_over
    until = next((one.at for one in (ran, ended) if one is not None), facts.end)
    other = facts.after(event, subject, EventKind.POD_PENDING, EventKind.POD_BLOCKED)  # from then on it waits for that
    waited = (until if other is None else min(other.at, until)) - event.at
    if is_fatal:
        done = "The job was ended: no pod of that role had ever started."
    elif ran is not None:
        done = f"It ran after {until - event.at:.1f} s."
    elif ended is not None:
        done = f"It has ended after {until - event.at:.1f} s, before it ran."
    elif event.kind is EventKind.POD_NOT_CREATED:
        done = f"The creation is tried again, at longer and longer intervals; {_meanwhile(subject)}"
    else:
        done = f"It is kept, and starts when it can; {_meanwhile(subject)}"
    return Diagnosis.of(
        event,
        wait.trouble,
        f"{subject} {wait.seen}",
        (stated(event),),
        done,
        wait.advice,
        cost=Cost(0.0 if is_fatal else max(0.0, waited), is_open=is_open and other is None),
        subject=subject,
        found=wait.evidence,
        is_fatal=is_fatal,
        key=subject.partition("-")[0],
    )


def _meanwhile(subject: str) -> str:
    if subject.startswith("ps-"):
        return "the job waits, for it trains with all parameter servers or not at all."
    return "the job uses the pods that it has."


def pods_without_events(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose pods that are pending in the cluster and have no event, such as the master's."""
    known = {event.subject for event in facts.of(EventKind.POD_PENDING, EventKind.POD_BLOCKED)}
    prefix = f"elasticdl-{facts.job.name}-"
    for pod in facts.job.status.pods:
        subject = "master" if pod.role == "master" else pod.name.removeprefix(prefix)
        if facts.is_over or subject in known or not pod.message or pod.phase == "Succeeded":
            continue
        wait = why_waiting(pod.message, pod.role)
        if pod.role == "master":
            wait = _why_master_ends(facts, pod.message, wait)
        if wait is None or (pod.phase != "Pending" and pod.role != "master"):
            continue
        log = (f"The end of its log:\n{facts.master_log}",) if pod.role == "master" and facts.master_log else ()
        yield Diagnosis(
            wait.trouble,
            (subject,),
            facts.now,
            f"{subject} {wait.seen}",
            (f"{pod.name} {pod.phase}: {pod.message}", *log),
            "It starts when it can." if pod.phase == "Pending" else "",
            Cost(is_open=True),
            wait.advice,
            {"message": pod.message, **wait.evidence},
            key=pod.role,
        )


def _why_master_ends(facts: Facts, message: str, wait: Wait | None) -> Wait | None:
    """Return why a master ends again and again: by its message, also between two ends of its container, and its log.

    Args:
        message: Message of the pod.
        wait: what the message means for any pod.
    """
    if wait is None and not facts.history.events:
        if "OOMKilled" in message:
            return _out_of_memory("master")
        wait = _CRASHING if message.startswith(RUNS_AGAIN) else None
    return why_crashing(facts.master_log) if facts.master_log and wait in (None, _CRASHING) else wait
