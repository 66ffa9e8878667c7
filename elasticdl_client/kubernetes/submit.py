"""Submits a job: checks, creates its objects, or writes them down instead; with --wait the job is followed."""

from __future__ import annotations

import dataclasses
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from elasticdl_client.certificates import make_certificate
from elasticdl_client.choices import DistributionStrategy, JobType
from elasticdl_client.data_sources import is_table
from elasticdl_client.errors import ElasticDLError, FlagError, JobError
from elasticdl_client.job_spec import JobSpec, flag_fields
from elasticdl_client.kubernetes import api, code, follow, names, objects, pod_template
from elasticdl_client.kubernetes.api_client import kind_path
from elasticdl_client.kubernetes.checks import check, gives_users
from elasticdl_client.kubernetes.code import Archive
from elasticdl_client.kubernetes.flags import CHOSEN_BY_CLUSTER, DEFAULT_USER
from elasticdl_client.kubernetes.objects import job_manifests, public_manifests
from elasticdl_client.kubernetes.pods import Manifest, owned
from elasticdl_client.kubernetes.resources import mount_of, parse_volumes
from elasticdl_client.model_source import check_model_source
from elasticdl_client.requirements_file import check_installable
from elasticdl_client.script_output import Shown
from elasticdl_client.storage_kinds import is_remote
from elasticdl_client.stored_job import StoredJob, stored_job, with_places, withdraw_quietly

_TOKEN_BYTES = 32
_NO_ACCOUNT_TOKEN = "No API token found for service account"  # servers before 1.24, right after it was made
_ACCOUNT_TOKEN_S = 30.0
_LOOK_S = 0.5


def run(spec: JobSpec, *, shown: Shown = Shown.GLANCE) -> int:
    """Submit a job; return the exit code for the shell.

    Args:
        spec: The job.
        shown: the part of its workers' output that --wait shows.

    Raises:
        ElasticDLError: it could not be submitted.
    """
    if spec.yaml or spec.dry_run:
        names.check_own_names(spec.job_name)
        spec = with_places(spec)
        for note in mount_notes(spec):
            _note(note)
        _write(*_with_code(spec))
        return 0
    connection, spec = submit(spec, _note)
    _say_submitted(spec)
    return follow.wait(connection, spec, shown) if spec.wait else 0


def submit(spec: JobSpec, note: Callable[[str], None]) -> tuple[api.Connection, JobSpec]:
    """Check a job and create its objects.

    Args:
        spec: The job.
        note: Receives messages for the user.

    Returns:
        The connection to its cluster, and the job in the namespace and with the user that it has there.

    Raises:
        ElasticDLError: it could not be submitted.
    """
    given_user = spec.run_as_user
    connection, spec, archive, notes = _checked(spec)
    for text in notes:
        note(text)
    manifests = _manifests(spec, archive)
    if archive is not None and (text := code.publish(archive)):
        note(text)
    stored = stored_job(spec)
    if stored is not None:
        _publish(stored, spec, given_user)
    try:
        create(connection, spec, manifests)
    except BaseException:
        withdraw_quietly(stored)
        raise
    return connection, spec


def _publish(stored: StoredJob, spec: JobSpec, given_user: str) -> None:
    """Write down a job for other machines and namespaces: with the content of templates, which are files of this one.

    Args:
        given_user: Value of --run_as_user; another namespace may admit it.
    """
    portable = dataclasses.replace(
        spec,
        pod_template=pod_template.compact(spec.pod_template),
        master_pod_template=pod_template.compact(spec.master_pod_template),
        worker_pod_template=pod_template.compact(spec.worker_pod_template),
        ps_pod_template=pod_template.compact(spec.ps_pod_template),
        run_as_user=given_user,
    )
    stored.publish(portable)


def take_over(spec: JobSpec) -> None:
    """Create the objects of a job that was begun in another namespace, and continues from its directory in storage.

    Args:
        spec: the one in that directory, with its secrets, in the namespace that it shall have.

    Raises:
        ElasticDLError: they could not be created.
    """
    connection = api.connect(spec.force_use_kube_config_file, spec.context)
    spec = _admitted(_placed(spec, connection.namespace), connection)
    for text in [*mount_notes(spec), *check(connection, spec)]:
        _note(text)
    here = api.elasticdl_command("resume", spec)
    create(connection, spec, _manifests(spec, None), f"`{here}` continues the job that is there.")


def check_submission(spec: JobSpec) -> None:
    """Check a job as `submit` does, and create nothing: for what is done before a submission and takes long.

    Args:
        spec: The job.

    Raises:
        ElasticDLError: it could not be submitted.
    """
    _checked(spec)


def _checked(spec: JobSpec) -> tuple[api.Connection, JobSpec, Archive | None, list[str]]:
    """Return the cluster, the job as it is there, its code, and warnings for the user."""
    names.check_own_names(spec.job_name)
    spec = with_places(spec)
    stored = stored_job(spec)
    if stored is not None:
        stored.check_free()
    spec, archive = _with_code(spec)
    notes = mount_notes(spec)
    connection = api.connect(spec.force_use_kube_config_file, spec.context)
    spec = _admitted(_placed(spec, connection.namespace), connection)
    return connection, spec, archive, notes + check(connection, spec)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _placed(spec: JobSpec, namespace: str) -> JobSpec:
    """Return the job with its namespace; if it names none, with this one."""
    return dataclasses.replace(spec, namespace=spec.namespace or namespace)


def _admitted(spec: JobSpec, connection: api.Connection) -> JobSpec:
    """Return the job with a user that its namespace admits."""
    if spec.run_as_user != DEFAULT_USER or not gives_users(connection, spec.namespace):
        return spec
    return dataclasses.replace(spec, run_as_user=CHOSEN_BY_CLUSTER)


def _write(spec: JobSpec, archive: Archive | None) -> None:
    """Write the objects instead of creating them; errors of the cluster are only warnings."""
    placed = _placed(spec, api.DEFAULT_NAMESPACE)
    try:
        connection = api.connect(spec.force_use_kube_config_file, spec.context)
        placed = _placed(spec, connection.namespace)
        placed = _admitted(placed, connection)
        for note in check(connection, placed):
            _note(note)
    except api.ClusterError as error:
        _note(f"nothing is checked against a cluster. {error.what}")
    except ElasticDLError as error:
        print(f"warning: as it is, the cluster would not run this job. {error}", file=sys.stderr)
    if spec.yaml:
        stored = stored_job(placed)
        if stored is not None:
            stored.check_free()
        if archive is not None and (note := code.publish(archive)):
            _note(note)
        if stored is not None:
            _publish(stored, placed, spec.run_as_user)
        try:
            objects.write(spec.yaml, objects.to_yaml(_manifests(placed, archive)))
        except BaseException:
            withdraw_quietly(stored)
            raise
        said = f"ElasticDL job {spec.job_name} YAML has been dumped into file {spec.yaml}."
        print(said, file=sys.stderr if spec.dry_run or objects.is_stream(spec.yaml) else sys.stdout)
        _note("the Secret in it holds the job's token and passwords: keep the file to yourself, make one for each job.")
    if spec.dry_run:
        sys.stdout.write(objects.to_yaml(public_manifests(placed, archive)))
        sys.stdout.flush()
        _note("tokens and passwords are shown as ***: --yaml=FILE writes the objects as they would be created.")


def _with_code(spec: JobSpec) -> tuple[JobSpec, Archive | None]:
    """Pack the code of --code; return the job with the archive's name instead of the directory."""
    if not spec.code:
        return spec, None
    if spec.model_zoo:
        raise FlagError(
            f"--code={spec.code} is the model zoo of all pods, and --model_zoo={spec.model_zoo} names another one.",
            "Leave --model_zoo out.",
        )
    if mount_of(names.ZOO_DIRECTORY, parse_volumes(spec.volume)) is not None:
        raise FlagError(
            f"--code is unpacked to {names.ZOO_DIRECTORY}, where --volume mounts something else.", "Mount it elsewhere."
        )
    if spec.model_def and not spec.job_command:
        check_model_source(spec, Path(spec.code).expanduser())
    check_installable(Path(spec.code).expanduser())
    archive = code.pack(spec)
    return dataclasses.replace(spec, code=str(archive.reference)), archive


def _manifests(spec: JobSpec, archive: Archive | None) -> list[Manifest]:
    """Return the objects of a new job, with a secret of its own."""
    certificate = make_certificate() if spec.uses_tls else {}
    return job_manifests(spec, secrets.token_hex(_TOKEN_BYTES), certificate, archive)


def _say_submitted(spec: JobSpec) -> None:
    job = spec.job_name
    master = names.pod_name(job, "master", 0)
    print(f"ElasticDL job {job} was successfully submitted. The master pod is: {master}.")
    if not spec.wait:
        print(f"  {api.kubectl_command(f'logs -f {master}', spec)}")
        print(f"  {api.elasticdl_command('status', spec)}")
        print(f"  {api.elasticdl_command('delete', spec)}")
    sys.stdout.flush()


def create(connection: api.Connection, spec: JobSpec, manifests: list[Manifest], if_taken: str = "") -> str:
    """Create all of a job's objects, or none; the first owns the others.

    Args:
        if_taken: what to do if there is a job of that name; empty: delete it, or choose another name.

    Returns:
        The uid of the owner.

    Raises:
        ElasticDLError: one could not be created; those before it are deleted again.
    """
    first, *others = manifests
    try:
        uid = str(_create(connection, first)["metadata"]["uid"])
    except api.ClusterError as error:
        if error.status != 409:
            raise
        delete = api.elasticdl_command("delete", spec)
        raise JobError(
            f"A job of the name {spec.job_name} exists in the namespace {spec.namespace}.",
            if_taken or f"`{delete}` deletes it; or choose another --job_name.",
        ) from error
    try:
        for manifest in others:
            _create(connection, owned(manifest, spec.job_name, uid))
    except BaseException:
        _undo(connection, spec, uid)
        raise
    return uid


def _create(connection: api.Connection, manifest: Manifest) -> Any:
    kind, metadata = manifest["kind"], manifest["metadata"]
    path = kind_path(kind, namespace=metadata["namespace"])
    deadline = time.monotonic() + _ACCOUNT_TOKEN_S
    while True:
        try:
            what = f"create the {kind} {metadata['name']} in the namespace {metadata['namespace']}"
            with connection.doing(what, "master" if kind == "Pod" else ""):
                return connection.create(path, manifest)
        except api.ClusterError as error:
            if _NO_ACCOUNT_TOKEN not in error.what or time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S)


def _undo(connection: api.Connection, spec: JobSpec, uid: str) -> None:
    """Delete the owner, and with it the objects that it owns; only print an error: the earlier error is raised."""
    owner = names.job_object(spec.job_name)
    options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
    try:
        with connection.doing(f"delete the ConfigMap {owner} again"):
            connection.delete(kind_path("ConfigMap", owner, spec.namespace), options)
    except api.ClusterError as error:
        hint = f"`{api.elasticdl_command('delete', spec)}` does."
        print(f"warning: the part that was created is not deleted: {error.what} {hint}", file=sys.stderr)


def mount_notes(spec: JobSpec) -> list[str]:
    """Return the data that are lost with a pod because they are on no mount.

    Raises:
        FlagError: a path that no pod can write to.
    """
    found = []
    mounts, flags = parse_volumes(spec.volume), flag_fields(spec.job_type)
    for name in (
        "checkpoint_dir",
        "output",
        "prediction_outputs",
        "metrics_output",
        "bad_records_dir",
        "tensorboard_log_dir",
        "log_file_path",
        "requirements_cache",
    ):
        path = getattr(spec, name)
        if not path or name not in flags or is_remote(path) or is_table(path):
            continue
        mount = mount_of(path, mounts)
        if mount is not None and not mount.is_writable:
            raise FlagError(f"--{name}={path} is on {mount.mount_path}, which cannot be written to.", "Name another.")
        if mount is not None and mount.outlives_pods:
            continue
        places = ("/tmp", names.JOB_DIRECTORY, *([mount.mount_path] if mount is not None else []))
        is_writable = any(PurePosixPath(path).is_relative_to(place) for place in places)
        if not is_writable and not spec.cluster_spec:  # a cluster specification may add mounts
            raise FlagError(
                f"--{name}={path} is on no mount of --volume, and pods cannot write to the rest of their file system.",
                'Name a directory below a mount_path, for example --volume="claim_name=data,mount_path=/data" and '
                f"--{name}=/data/{name}.",
            )
        where = "an empty_dir" if mount is not None else "no mount"
        found.append(f"--{name}={path} is on {where} of --volume: files written there are lost with the pod.")
    has_state = spec.num_ps_pods or spec.distribution_strategy is not DistributionStrategy.PARAMETER_SERVER
    if spec.job_type is JobType.TRAIN and not spec.checkpoint_dir and has_state:  # a --job_command may have none
        lost = {
            DistributionStrategy.PARAMETER_SERVER: "state of a lost parameter server is gone",
            DistributionStrategy.ALL_REDUCE: "model is gone once all workers are lost at the same time",
            DistributionStrategy.LOCAL: "state of a lost worker is gone",
        }[spec.distribution_strategy]
        found.append(f"without --checkpoint_dir the {lost}, and is trained again from the first epoch.")
    return found
