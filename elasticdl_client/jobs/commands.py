"""The job commands: from options to stores, from jobs to printed text and exit code."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elasticdl_client import progress, worker_range
from elasticdl_client.choices import Runtime
from elasticdl_client.errors import ElasticDLError, FlagError, JobError
from elasticdl_client.explain import explanation as explain_words
from elasticdl_client.explain.diagnosis import Facts
from elasticdl_client.explain.explanation import Question, explain
from elasticdl_client.job_dir import is_elsewhere
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_status import RUNS_AGAIN
from elasticdl_client.jobs import event_list, words
from elasticdl_client.jobs.options import Options, parse, role_of, seconds_of
from elasticdl_client.jobs.store import JobInfo, JobStore, LogRequest, Phase
from elasticdl_client.jobs.stores import JobStores
from elasticdl_client.jobs.watch import top as show_top
from elasticdl_client.jobs.watch import watch, watch_list
from elasticdl_client.storage_kinds import is_remote
from elasticdl_client.stored_job import StoredJob, with_secrets

_LOG_LINES = 10  # lines shown of the log of a master that does not start
_MAX_WIDTH = 120  # of a line of prose; longer ones are hard to read


def run(command: str, arguments: Sequence[str]) -> int:
    """Run a job command; return the exit code for the shell.

    Raises:
        FlagError: the command line is wrong.
        ElasticDLError: the job is not found, or the runtime cannot be reached or refuses.
    """
    options = parse(command, arguments, os.environ)
    if is_remote(options.job_dir):
        return _resume_elsewhere(options)
    actions: dict[str, Callable[[Options, JobStores], int]] = {
        "list": _list,
        "top": _top,
        "status": _status,
        "logs": _logs,
        "events": _events,
        "explain": _explain,
        "scale": _scale,
        "chaos": _chaos,
        "delete": _delete,
        "clean": _clean,
        "stop": _stop,
        "resume": _resume,
        "tensorboard": _tensorboard,
        "dashboard": _dashboard,
    }
    return actions[command](options, JobStores.of(options))


def _top(options: Options, places: JobStores) -> int:
    return show_top(places.list_again, options.output)


def _list(options: Options, places: JobStores) -> int:
    if options.watch:
        wide = options.output == "wide"
        table = lambda jobs: words.job_table(jobs, with_namespace=options.all_namespaces, wide=wide)  # noqa: E731
        return watch_list(places.list_again, table, options.output)
    jobs = places.list()
    _say_unreachable(places)
    if options.output in ("json", "yaml"):
        print(words.structured([job.to_plain() for job in jobs], options.output))
    elif options.output == "name":
        _print_lines(f"job/{job.name}" for job in jobs)
    elif jobs:
        text = words.job_table(jobs, with_namespace=options.all_namespaces, wide=options.output == "wide")
        print(progress.paint_phases(text, sys.stdout))
    else:
        print(f"No jobs found {places.where}.", file=sys.stderr)
    return 0


def _status(options: Options, places: JobStores) -> int:
    job = places.find(options.jobs[0])
    if options.watch:
        store = places.store(job)
        return watch(job, lambda: store.find(job.name), lambda one: store.journal(one).history, options.output)
    if options.output:
        print(words.structured(job.to_plain(), options.output))
    else:
        print(progress.paint_phases(words.page(job, time.time()), sys.stdout))
    return 0


def _logs(options: Options, places: JobStores) -> int:
    job = places.find(options.jobs[0])
    since_s = seconds_of(options.since) or 0.0
    role, timestamps = role_of(options), options.timestamps
    request = LogRequest(role, options.follow, options.tail, since_s, options.previous, timestamps)
    for line in places.store(job).logs(job, request):
        if options.output == "json":
            plain = {"pod": line.pod, "line": line.text} | ({"time": line.time} if timestamps else {})
            text = words.json_text(plain)
        else:
            text = f"[{line.pod}] {line.text}" if request.is_of_many else line.text
            text = progress.paint_log_line(text, sys.stdout)
            text = f"{line.time} {text}" if timestamps and line.time else text
        print(text, flush=options.follow)
    return 0


def _events(options: Options, places: JobStores) -> int:
    job = places.find(options.jobs[0])
    event_list.show(job, places.store(job), options)
    return 0


def _explain(options: Options, places: JobStores) -> int:
    job = places.find(options.jobs[0])
    store = places.store(job)
    history = store.journal(job).history
    facts = Facts(job, history, time.time(), _log_of_crashing_master(job, store, history))
    pod = role_of(options) if options.pod else ""
    found = explain(facts, Question(options.why_pending, options.why_slow, pod, options.epoch))
    if options.output:
        print(words.structured(found.to_plain(), options.output))
    else:
        print(explain_words.text(found, min(_MAX_WIDTH, shutil.get_terminal_size().columns)))
    return 0


def _log_of_crashing_master(job: JobInfo, store: JobStore, history: EventHistory) -> str:
    """Return the end of the log of a master that crashes again and again: it may be the only sign of the cause.

    Right after a restart the current run has printed nothing about the cause, so the log of the run before is read.
    Once the master has started, its restarts are events.
    """
    master = next((pod for pod in job.status.pods if pod.role == "master"), None)
    if master is None or job.has_ended:
        return ""
    runs_again = master.message.startswith(RUNS_AGAIN) and not history.events
    if not runs_again and not master.message.startswith(("CrashLoopBackOff", "Error", "OOMKilled")):
        return ""
    try:
        request = LogRequest("master", False, _LOG_LINES, previous=runs_again)
        return "\n".join(line.text for line in store.logs(job, request))
    except ElasticDLError:  # the log is optional
        return ""


def _scale(options: Options, places: JobStores) -> int:
    job = places.find(options.jobs[0])
    if job.has_ended:
        raise JobError(f'job "{job.name}" {job.where} has ended ({job.phase}): it cannot be scaled.', _see(job))
    store = places.store(job)
    if job.spec is None:
        raise JobError(f'The specification of job "{job.name}" {job.where} cannot be read.', _see(job))
    wanted = worker_range.parse_request(options.num_workers, job.spec)
    current = int(options.current_num_workers) if options.current_num_workers else None
    before = store.scale(job, wanted, current)
    num_workers = wanted.nearest(before)
    if options.output == "json":
        numbers = {"num_workers": num_workers, "max_workers": 0 if wanted.is_fixed else wanted.most}
        print(words.structured({**job.identity, **numbers, "num_workers_before": before}, "json"))
    elif options.output == "name":
        print(f"job/{job.name}")
    elif not wanted.is_fixed:
        print(f'job "{job.name}" scaled: workers {before} → {num_workers}, from now on by gain within {wanted}')
    elif before == num_workers and job.status.scaling is not None:
        print(f'job "{job.name}" scaled: workers {before}, which stay')
    elif before == num_workers:
        print(f'job "{job.name}" not changed: workers {before}')
    else:
        print(f'job "{job.name}" scaled: workers {before} → {num_workers}')
    if job.phase is Phase.STOPPED:
        print(f"note: it has no master now, and follows after `elasticdl resume {job.name}`.", file=sys.stderr)
    return 0


def _chaos(options: Options, places: JobStores) -> int:
    from elasticdl_client.chaos import command

    return command.run(options, places)


def _delete(options: Options, places: JobStores) -> int:
    deleted, code = [], 0
    for name in dict.fromkeys(options.jobs):
        try:
            deleted.append(_delete_one(places.find(name), options, places))
        except FlagError:
            raise
        except ElasticDLError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 1
    _print_deleted(deleted, options)
    return code


def _clean(options: Options, places: JobStores) -> int:
    jobs = places.list()
    _say_unreachable(places)
    ended = []
    for job in jobs:
        if job.phase is Phase.STOPPED:
            print(f'note: job "{job.name}" {job.where} has stopped, not ended: kept.', file=sys.stderr)
        elif job.has_ended and job.directory and not options.job_dir and is_elsewhere(Path(job.directory)):
            kept = f'note: job "{job.name}" is in a directory of its own, {job.directory}: kept'
            print(f"{kept}; `elasticdl delete {job.name}` removes it.", file=sys.stderr)
        elif job.has_ended:
            ended.append(job)
    if not ended and not options.output:
        print(f"No ended jobs found {places.where}.", file=sys.stderr)
    _print_deleted([_delete_one(job, options, places) for job in ended if _has_still_ended(job, places)], options)
    return 0


def _has_still_ended(job: JobInfo, places: JobStores) -> bool:
    """Return whether a job is still an ended one: deleting others takes minutes; a new job may have its name now."""
    place = (job.name, job.namespace, job.directory)
    jobs = places.store(job).list()
    return any(one.has_ended and (one.name, one.namespace, one.directory) == place for one in jobs)


def _delete_one(job: JobInfo, options: Options, places: JobStores) -> dict[str, Any]:
    """Delete a job and print that; return its object for --output=json."""
    if not options.dry_run:
        places.store(job).delete(job, options.timeout if options.wait else None)
    if not options.output:
        where = f"from {job.namespace} namespace" if job.namespace else f"with its directory {job.directory}"
        print(f'job "{job.name}" deleted {where}{" (dry run)" if options.dry_run else ""}', flush=True)
    plain = job.to_plain()
    found = {name: plain[name] for name in ("name", "runtime", "namespace", "phase", "directory")}
    return {**found, "deleted": not options.dry_run}


def _print_deleted(deleted: list[dict[str, Any]], options: Options) -> None:
    if options.output == "json":
        print(words.structured(deleted, "json"))
    elif options.output == "name":
        _print_lines(f"job/{one['name']}" for one in deleted)


def _stop(options: Options, places: JobStores) -> int:
    job = places.find(options.jobs[0])
    if job.has_ended:
        raise JobError(f'job "{job.name}" {job.where} has ended ({job.phase}): it cannot be stopped.', _see(job))
    is_stopped = job.phase is Phase.STOPPED
    if not is_stopped:
        is_stopped = places.store(job).stop(job, options.timeout if options.wait else None)
        if options.wait and not is_stopped:
            raise JobError(f'job "{job.name}" {job.where} still stops after {options.timeout:g} s.', _see(job))
    found = places.find(job.name)
    if found.has_ended:
        print(f'note: job "{job.name}" {job.where} has ended ({found.phase}) before it could stop.', file=sys.stderr)
    if options.output == "json":
        print(words.structured({**job.identity, "phase": found.phase.value, "stopped": is_stopped}, "json"))
    elif options.output == "name":
        print(f"job/{job.name}")
    elif not found.has_ended:
        print(f'job "{job.name}" {"stopped" if is_stopped else "is stopping"}: `{job.command("resume")}` continues it')
    return 0


def _resume(options: Options, places: JobStores) -> int:
    job = places.find(options.jobs[0])
    if job.has_ended:
        raise JobError(f'job "{job.name}" {job.where} has ended ({job.phase}): there is nothing to resume.', _see(job))
    if job.phase is not Phase.STOPPED:
        raise JobError(f'job "{job.name}" {job.where} is {job.phase.lower()}: it has a master already.', _see(job))
    code = places.store(job).resume(job)
    if job.runtime is Runtime.LOCAL:
        return code  # the job ran in the foreground and has printed its end
    if options.output == "json":
        print(words.structured({"name": job.name, "namespace": job.namespace, "resumed": True}, "json"))
    else:
        print(f"job/{job.name}" if options.output else f'job "{job.name}" resumed: its master has a pod again')
    return code


def _resume_elsewhere(options: Options) -> int:
    """Continue a job on this machine or cluster from its directory in storage, wherever it ran before."""
    stored = StoredJob(options.job_dir.rstrip("/"))
    public, status = stored.read(), stored.status()
    name = public.job_name
    if options.jobs and options.jobs[0] != name:
        raise FlagError(f"{stored.url} is the directory of job {name}, not of {options.jobs[0]}.")
    if options.runtime and options.runtime != public.runtime:
        raise FlagError(f"Job {name} in {stored.url} is one of --runtime={public.runtime}.", "Leave --runtime out.")
    if status is not None and status.exit_code is not None:
        raise JobError(f"job {name} in {stored.url} has ended ({status.phase}): there is nothing to resume.")
    spec = with_secrets(public, options.envs, os.environ, lambda text: print(f"note: {text}", file=sys.stderr))
    if spec.runtime is Runtime.LOCAL:
        from elasticdl_client import local

        if options.namespace or options.context or options.cluster_spec:
            raise FlagError(
                f"Job {name} in {stored.url} is a local job.", "Leave out --namespace, --context and --cluster_spec."
            )
        return local.take_over(spec)
    from elasticdl_client.kubernetes import submit

    namespace = options.namespace or options.defaults.get("namespace", "")
    context = options.context or options.defaults.get("context", "")
    spec = dataclasses.replace(
        spec,
        namespace=namespace,
        context=context,
        cluster_spec=_cluster_spec_here(spec.cluster_spec, options.cluster_spec),
        force_use_kube_config_file=options.force_use_kube_config_file,
        wait=False,
    )
    submit.take_over(spec)
    if options.output == "json":
        print(words.structured({"name": name, "namespace": namespace, "resumed": True}, "json"))
    else:
        print(f"job/{name}" if options.output else f'job "{name}" resumed from {stored.url}')
    return 0


def _cluster_spec_here(of_job: str, given: str) -> str:
    """Return the file of --cluster_spec on this machine; it is code, so it is not loaded from storage."""
    name = Path(of_job).name
    if given and Path(given).name != name:
        why = f"The job's image has {name} for --cluster_spec" if name else "The job has no --cluster_spec"
        raise FlagError(f"{why}, not {Path(given).name}.", "Give the file that the job was submitted with.")
    if of_job and not Path(given or of_job).is_file():
        raise FlagError(
            f"The job was submitted with --cluster_spec={of_job}, and {given or of_job} is no file of this machine.",
            "Give --cluster_spec=FILE, a copy of it.",
        )
    return given or of_job


def _tensorboard(options: Options, places: JobStores) -> int:
    job = places.find(options.jobs[0])
    return places.store(job).tensorboard(job, options.port)


def _dashboard(options: Options, places: JobStores) -> int:
    from elasticdl_client.dashboard import command

    return command.run(options, places)


def _see(job: JobInfo) -> str:
    return f"See `elasticdl status {job.name}`."


def _say_unreachable(places: JobStores) -> None:
    if places.unreachable:
        print(f"note: only jobs of this machine: {places.unreachable}", file=sys.stderr)


def _print_lines(lines: Any) -> None:
    for line in lines:
        print(line)
