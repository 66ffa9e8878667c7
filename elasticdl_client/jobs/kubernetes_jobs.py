"""The jobs of a cluster: a ConfigMap that owns all objects of a job, a ConfigMap with its status, and its pods.

The API's phase of pods takes precedence over the master's status: it is correct even if no master runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime

from elasticdl_client import worker_range
from elasticdl_client.chaos.faults import FaultInjector
from elasticdl_client.choices import JobType, Runtime
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.job_series import JobJournal
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus, PodStatus
from elasticdl_client.jobs import cluster_logs, cluster_objects
from elasticdl_client.jobs.cluster_objects import Object, delete_object, list_objects, read_pod
from elasticdl_client.jobs.store import JobInfo, LogLine, LogRequest, Phase, phase_of
from elasticdl_client.kubernetes import api, events, names, rbac
from elasticdl_client.kubernetes.api_client import object_path
from elasticdl_client.kubernetes.rbac import Right
from elasticdl_client.worker_range import WorkerRange

_RIGHTS = {  # the rights that each verb needs
    "delete": (Right("", "configmaps", ("delete",)), Right("", "pods", ("delete",))),
    "resume": (Right("", "configmaps", ("list", "patch")), Right("", "pods", ("create", "delete"))),
    "scale": (Right("", "configmaps", ("list", "patch")),),
    "stop": (Right("", "configmaps", ("list", "patch")),),
}
_SUBMISSION_S = 15.0  # the master of a job whose ConfigMap is younger may not be created yet
_REPLACE_TIMEOUT_S = 60.0  # for the pod of an ended master to be deleted


class KubernetesJobs:
    """The `JobStore` of a cluster.

    Args:
        connection: Connection to the cluster.
        namespace: Empty: all namespaces.
        context: The context that the user has chosen; empty: the current one.
    """

    def __init__(self, connection: api.Connection, namespace: str, context: str = "") -> None:
        self._connection = connection
        self._namespace = namespace
        self._context = context

    def list(self) -> list[JobInfo]:
        """See `JobStore`."""
        return _jobs(self._connection, self._namespace, "", self._context)

    def find(self, name: str) -> JobInfo | None:
        """See `JobStore`."""
        return next(iter(_jobs(self._connection, self._namespace, name, self._context)), None)

    def logs(self, job: JobInfo, request: LogRequest) -> Iterator[LogLine]:
        """See `JobStore`."""
        return cluster_logs.lines(self._connection, job, request, lambda: self.find(job.name))

    def journal(self, job: JobInfo) -> JobJournal:
        """See `JobStore`.

        Raises:
            JobError: the journal is damaged.
            ClusterError: the cluster does not answer, or refuses.
        """
        found = _config_maps(self._connection, job.namespace, job.name)
        state = next((one for one in found if one["metadata"]["name"] == names.state_object(job.name)), {})
        try:
            return JobJournal.unpack((state.get("binaryData") or {}).get(names.JOURNAL_KEY, ""))
        except ValueError as error:
            where = f"the ConfigMap {names.state_object(job.name)}"
            raise JobError(f"The events of job {job.name} in {where} cannot be read: {error}.") from error

    def may(self, job: JobInfo, verb: str) -> bool:
        """See `JobStore`; asks the API server.

        Raises:
            ClusterError: the cluster does not answer.
        """
        return not rbac.missing_of_user(self._connection, job.namespace, _RIGHTS[verb])

    def delete(self, job: JobInfo, wait_s: float | None) -> None:
        """See `JobStore`."""
        cluster_objects.delete_job(self._connection, job, wait_s)

    def resume(self, job: JobInfo) -> int:
        """See `JobStore`; returns when the pod of the new master is created.

        Raises:
            JobError: The job's specification does not exist, or the old master is not deleted in time.
            ClusterError: the cluster does not answer, or refuses.
        """
        from elasticdl_client.kubernetes.objects import master_pod

        owner = self._owner(job)
        if owner is None or cluster_objects.is_going(owner) or names.MASTER_POD_KEY not in (owner.get("data") or {}):
            raise JobError(
                f"Job {job.name} has no ConfigMap {names.job_object(job.name)} with its master's pod any more.",
                f"Its other objects are deleted by `{job.command('delete')}`.",
            )
        manifest = master_pod(owner["data"], job.name, owner["metadata"]["uid"])
        self._remove_old_master(job)
        if _is_told_to_stop(owner):
            self._annotate(job, owner, {names.STOP_ANNOTATION: None}, "resume")
        with self._connection.doing(f"create the pod {names.pod_name(job.name, 'master', 0)}", "master"):
            self._connection.create(object_path("pods", namespace=job.namespace), manifest)
        return 0

    def scale(self, job: JobInfo, num_workers: WorkerRange, current: int | None = None) -> int:
        """See `JobStore`.

        Raises:
            JobError: The wanted number differs from `current`, or the ConfigMap has changed in between.
            ClusterError: the cluster does not answer, or refuses.
        """
        owner = self._owner(job)
        spec = _spec(owner)
        if owner is None or spec is None:
            raise JobError(f"Job {job.name} has no ConfigMap {names.job_object(job.name)} with its specification.")
        written = (owner["metadata"].get("annotations") or {}).get(names.NUM_WORKERS_ANNOTATION, "")
        before = worker_range.wanted(written, spec, job.status)
        worker_range.check_current(job.name, before, current)
        self._annotate(job, owner, {names.NUM_WORKERS_ANNOTATION: str(num_workers)}, "scale")
        return before

    def stop(self, job: JobInfo, wait_s: float | None) -> bool:
        """See `JobStore`; sets an annotation that this generation of the master, or the next, obeys.

        Raises:
            JobError: The job's training would be lost, or its ConfigMap was deleted or changed at the same time.
            ClusterError: the cluster does not answer, or refuses.
        """
        owner, spec = self._owner(job), job.spec
        if owner is None or spec is None:
            raise JobError(f"Job {job.name} has no ConfigMap {names.job_object(job.name)} with its specification.")
        is_trained = spec.job_type is JobType.TRAIN and bool(spec.model_def) and job.status.records_done > 0
        if is_trained and not spec.checkpoint_dir:
            raise JobError(
                f"Job {job.name} keeps no checkpoints: the training on its {job.status.records_done:,} records "
                "would be lost.",
                f"Submit jobs that are to be stopped with --checkpoint_dir; `{job.command('delete')}` ends this one.",
            )
        self._annotate(job, owner, {names.STOP_ANNOTATION: "true"}, "stop")
        return wait_s is not None and cluster_objects.wait_until(lambda: self._has_stopped(job), wait_s)

    def _has_stopped(self, job: JobInfo) -> bool:
        found = self.find(job.name)
        if found is None or found.has_ended:
            return True
        return found.phase is Phase.STOPPED and not (found.status.workers_alive or found.status.ps_alive)

    def _annotate(self, job: JobInfo, owner: Object, annotations: Mapping[str, str | None], verb: str) -> None:
        """Set annotations of a job's ConfigMap, if it is still the one that was read; the value None removes one."""
        metadata = owner["metadata"]
        with self._connection.doing(f"{verb} job {job.name}"):
            self._connection.patch(
                f"/api/v1/namespaces/{job.namespace}/configmaps/{metadata['name']}",
                {"metadata": {"annotations": annotations, "resourceVersion": metadata["resourceVersion"]}},
                "application/merge-patch+json",
            )

    def faults(self, job: JobInfo) -> FaultInjector:
        """See `JobStore`."""
        from elasticdl_client.chaos.cluster_faults import ClusterFaults

        return ClusterFaults(self._connection, job, lambda: self.resume(job))

    def tensorboard(self, job: JobInfo, port: int) -> int:
        """See `JobStore`.

        Raises:
            JobError: The job writes no event files to a place that pods can read, or TensorBoard does not start.
            ClusterError: the cluster does not answer, or refuses.
        """
        from elasticdl_client.jobs import tensorboard

        owner = self._owner(job)
        if owner is None or cluster_objects.is_going(owner):
            raise JobError(f"Job {job.name} has no ConfigMap {names.job_object(job.name)} any more.")
        return tensorboard.show_of_cluster(self._connection, job, owner, port)

    def _owner(self, job: JobInfo) -> Object | None:
        found = _config_maps(self._connection, job.namespace, job.name)
        return next((one for one in found if one["metadata"]["name"] == names.job_object(job.name)), None)

    def _remove_old_master(self, job: JobInfo) -> None:
        name = names.pod_name(job.name, "master", 0)
        pod = read_pod(self._connection, job.namespace, name)
        if pod is None:
            return
        delete_object(self._connection, "pod", job.namespace, name)
        is_gone = cluster_objects.wait_until(
            lambda: read_pod(self._connection, job.namespace, name) is None, _REPLACE_TIMEOUT_S
        )
        if not is_gone:
            raise JobError(
                f"The pod {name} of the master before does not go.",
                f"If its node is lost: kubectl delete pod {name} -n {job.namespace} --grace-period=0 --force",
            )


def _jobs(connection: api.Connection, namespace: str, name: str, context: str) -> list[JobInfo]:
    objects: dict[tuple[str, str], _Found] = defaultdict(_Found)
    for pod in list_objects(connection, "pod", namespace, name):
        objects[_key(pod)].pods.append(pod)
    # Read after the pods: when the label of a master's pod says that the job has ended, its last status is written.
    for config_map in _config_maps(connection, namespace, name):
        objects[_key(config_map)].config_maps[config_map["metadata"]["name"]] = config_map
    if name:
        for (where, _), found in objects.items():
            made = [pod["metadata"]["uid"] for pod in found.pods if cluster_objects.is_being_made(pod)]
            found.told = events.newest(connection, where, made)
    jobs = [_job(where, job, found, context) for (where, job), found in objects.items()]
    return sorted(jobs, key=lambda job: (job.created_at, job.namespace, job.name))


def _config_maps(connection: api.Connection, namespace: str, name: str) -> list[Object]:
    """Return the ConfigMaps that describe jobs; those with code have megabytes and describe nothing."""
    return list_objects(connection, "config_map", namespace, name, without=names.CODE_LABEL)


@dataclasses.dataclass(slots=True)
class _Found:
    config_maps: dict[str, Object] = dataclasses.field(default_factory=dict)
    pods: list[Object] = dataclasses.field(default_factory=list)
    told: dict[str, str] = dataclasses.field(default_factory=dict)  # messages of Events of starting pods, by uid


def _key(thing: Object) -> tuple[str, str]:
    return str(thing["metadata"]["namespace"]), cluster_objects.label(thing, names.JOB_LABEL)


def _job(namespace: str, name: str, found: _Found, context: str) -> JobInfo:
    owner = found.config_maps.get(names.job_object(name))
    everything = [*found.config_maps.values(), *found.pods]
    created_at = min(_created_at(thing) for thing in ([owner] if owner else everything))
    written, spec = _written(found.config_maps.get(names.state_object(name))), _spec(owner)
    status = _with_pods(written or JobStatus(name), sorted(found.pods, key=cluster_objects.sort_key), found.told, spec)
    master = next((pod for pod in found.pods if cluster_objects.label(pod, names.ROLE_LABEL) == "master"), None)
    age_s = time.time() - created_at
    phase, note = _phase(name, status, owner, master, age_s)
    job = JobInfo(name, Runtime.KUBERNETES, phase, status, note, namespace, context, created_at=created_at, spec=spec)
    has_state = names.state_object(name) in found.config_maps
    is_whole = (
        owner is not None and not cluster_objects.is_going(owner) and (master is not None or age_s > _SUBMISSION_S)
    )
    return _without_state(job, master) if is_whole and not has_state else job


def _phase(
    name: str, status: JobStatus, owner: Object | None, master: Object | None, age_s: float
) -> tuple[Phase, str]:
    """Return the phase of a job, and its details as text."""
    if owner is None or cluster_objects.is_going(owner):
        return phase_of(status, runs=master is not None), "It is being deleted, or was deleted in part."
    if master is not None:
        pod_phase, label = cluster_objects.pod_status(master).phase, cluster_objects.label(master, names.STATUS_LABEL)
        if label == "Finished" and status.exit_code is None:
            return Phase.SUCCEEDED, ""
        if label == "Failed" and status.exit_code is None:
            return Phase.FAILED, "" if status.message else f"Its master's log says why: elasticdl logs {name}."
        if pod_phase in ("Pending", "Running"):
            note = "It is stopping, by `elasticdl stop`." if _is_told_to_stop(owner) else ""
            return phase_of(status, runs=True), note
    elif not status.updated_at and age_s < _SUBMISSION_S:
        return Phase.PENDING, "It is being submitted."
    phase = phase_of(status, runs=False)
    if phase is not Phase.STOPPED:
        return phase, ""
    if _is_told_to_stop(owner):
        return phase, "Its pods were ended by `elasticdl stop`."
    how = (
        f"has ended ({cluster_objects.pod_status(master).message or 'reason unknown'})"
        if master is not None
        else "is gone"
    )
    return phase, f"Its master's pod {how}, and the job has not ended."


def _without_state(job: JobInfo, master: Object | None) -> JobInfo:
    """Return a job whose state was deleted by hand.

    Its master ends when it notices that, and no other master can continue it.
    """
    if job.phase is Phase.SUCCEEDED:
        return job
    runs = (
        master is not None
        and cluster_objects.pod_status(master).phase in ("Pending", "Running")
        and cluster_objects.label(master, names.STATUS_LABEL) != "Failed"
    )
    spec = None if job.spec is None else dataclasses.replace(job.spec, namespace=job.namespace, context=job.context)
    note = "\n  → ".join(api.without_state(job.name, job.command("delete"), spec))
    return dataclasses.replace(job, phase=Phase.RUNNING if runs else Phase.FAILED, note=note)


def _is_told_to_stop(owner: Object) -> bool:
    return bool((owner["metadata"].get("annotations") or {}).get(names.STOP_ANNOTATION))


def _written(state: Object | None) -> JobStatus | None:
    """Return the last status that the master wrote; None if there is none yet or it cannot be read."""
    text = ((state or {}).get("data") or {}).get(names.STATUS_KEY, "")
    try:
        return JobStatus.from_json(text) if text else None
    except (ValueError, TypeError):
        return None


def _with_pods(
    status: JobStatus, found: list[Object], events_say: Mapping[str, str], spec: JobSpec | None
) -> JobStatus:
    """Return the status with the pods as the API shows them, and with the number of running ones."""
    told = {pod.name: pod for pod in status.pods}
    seen = tuple(
        _told_more(cluster_objects.pod_status(pod), told, events_say.get(pod["metadata"]["uid"], "")) for pod in found
    )
    running = [cluster_objects.label(pod, names.ROLE_LABEL) for pod in found if _runs(pod)]
    return dataclasses.replace(
        status,
        pods=seen,
        workers_alive=running.count("worker"),
        workers_wanted=status.workers_wanted if status.started_at or spec is None else spec.num_workers,
        ps_alive=running.count("ps"),
        ps_wanted=status.ps_wanted or (spec.num_ps_pods if spec else 0),
    )


def _told_more(pod: PodStatus, told: Mapping[str, PodStatus], event: str) -> PodStatus:
    """Return a pod's status with the message of its newest Event; if the API gives none, with the master's."""
    if event:
        return dataclasses.replace(pod, message=event)
    before = told.get(pod.name)
    if pod.message or before is None or before.phase != pod.phase:
        return pod
    return dataclasses.replace(pod, message=before.message)


def _runs(pod: Object) -> bool:
    return cluster_objects.pod_status(pod).phase == "Running" and not cluster_objects.is_going(pod)


def _spec(owner: Object | None) -> JobSpec | None:
    try:
        return JobSpec.from_json(((owner or {}).get("data") or {})[names.SPEC_KEY])
    except (KeyError, FlagError):
        return None


def _created_at(thing: Object) -> float:
    return datetime.fromisoformat(thing["metadata"]["creationTimestamp"].replace("Z", "+00:00")).timestamp()
