"""Jobs as text: kubectl's tables and ages, the page of `elasticdl status`, the formats of --output.  Prints nothing."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import time
from collections.abc import Sequence

from elasticdl_client import progress, report, worker_range
from elasticdl_client.explain.slowness import standing_texts
from elasticdl_client.goodput import summary
from elasticdl_client.job_status import JobStatus, PsStatus, finite
from elasticdl_client.jobs.store import JobInfo, Phase
from elasticdl_client.news import metrics_text
from elasticdl_client.progress import age

_HEAD_WIDTH = 14
_SHOWN_EPOCHS = 5
_SHOWN_SERVERS = 10
_SHOWN_BUSIEST = 5
_NONE = "<none>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as kubectl prints it: columns three spaces apart, the first row has their names."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def structured(value: object, form: str) -> str:
    """Return JSON, indented as kubectl does, or YAML."""
    if form == "json":
        return json_text(value, indent=4)
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True)).rstrip("\n")


def json_text(value: object, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """Return JSON that every parser reads: NaN and infinity, which a metric may be, are null."""
    dumps = functools.partial(json.dumps, indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)
    try:
        return dumps(value)
    except ValueError:
        return dumps(finite(value))


def job_table(jobs: Sequence[JobInfo], *, with_namespace: bool, wide: bool) -> str:
    """Return the table of `elasticdl list`."""
    heads = ["NAME", "RUNTIME", "PHASE", "WORKERS", "PS", "RECORDS", "AGE"]
    rows = [heads + (["EPOCH", "STEP", "LOSS", "RATE", "MESSAGE"] if wide else [])]
    rows += [_row(job) + (_wide(job) if wide else []) for job in jobs]
    if with_namespace:
        rows = [
            ["NAMESPACE", *rows[0]],
            *([job.namespace or _NONE, *row] for job, row in zip(jobs, rows[1:], strict=True)),
        ]
    return table(rows)


def _row(job: JobInfo) -> list[str]:
    status = job.status
    return [
        job.name,
        job.runtime.value,
        job.phase.value,
        f"{status.workers_alive}/{status.workers_wanted}",
        f"{status.ps_alive}/{status.ps_wanted}",
        f"{status.records_done / status.records_total:.0%}" if status.records_total else f"{status.records_done}",
        age(time.time() - job.created_at) if job.created_at else "<unknown>",
    ]


def _wide(job: JobInfo) -> list[str]:
    status = job.status
    epochs = f"/{status.num_epochs}" if status.num_epochs > 0 else ""
    message = " ".join([*messages(job), waiting_for(job)]).strip()
    return [
        f"{status.epoch}{epochs}" if status.epoch else _NONE,
        str(status.model_version),
        _NONE if status.loss is None else f"{status.loss:.4g}",
        f"{status.records_per_second:,.0f}/s" if job.phase is Phase.RUNNING else _NONE,
        " ".join(message.split())[:100] or _NONE,
    ]


def messages(job: JobInfo) -> list[str]:
    """Return the messages on a job's phase: the client's findings and the master's reasons, each once."""
    said = report.with_users_line(job.status.message)
    return [text for text in dict.fromkeys((job.note, said)) if text]


def waiting_for(job: JobInfo) -> str:
    """Return why a job that could run has no worker, from the messages of its pending pods; empty if it has one."""
    if job.has_ended or job.status.workers_alive or job.phase is Phase.STOPPED:
        return ""
    pending = [pod for pod in job.status.pods if pod.phase == "Pending" and pod.message]
    for role in ("master", "ps", "worker"):
        reasons = dict.fromkeys(pod.message for pod in pending if pod.role == role)
        if reasons:
            return f"No worker runs yet; pending {role}: {'; '.join(reasons)}"
        refused = next((one for one in job.status.not_created if one.role == role), None)
        if refused is not None:
            return f"No worker runs yet; {role} not created: {refused.message}"
    return ""


def what_to_do(job: JobInfo) -> str:
    """Return how a stopped job continues; empty for others."""
    if job.phase is not Phase.STOPPED:
        return ""
    return f"{job.continuation}, `{job.command('delete')}` ends it."


def page(job: JobInfo, now: float) -> str:
    """Return the output of `elasticdl status`.

    Args:
        job: With the pods as they were found.
        now: Seconds since the Unix epoch.
    """
    status = job.status
    is_over = job.has_ended or job.phase is Phase.STOPPED
    head = [("Name", job.name), ("Runtime", job.runtime.value), ("Namespace", job.namespace)]
    head += [("Directory", job.directory), ("Phase", job.phase.value)]
    head += [("Message", text) for text in [*messages(job), waiting_for(job)]]
    head += [("Standing", text) for text in ([] if job.has_ended else standing_texts(status))]
    head += [("To do", what_to_do(job)), *_progress(status, with_rate=not is_over)]
    head += [("Time", progress.time_text(status, with_eta=not is_over))]
    head += [("Goodput", summary(status.worker_seconds)), ("PS time", summary(status.ps_seconds))]
    if is_over:
        status = dataclasses.replace(status, not_created=())
    workers = _pod_counts(status, "worker", status.workers_alive, status.workers_wanted)
    head += [("Workers", "; ".join(filter(None, (workers, progress.processes_text(status)))))]
    head += [("Group", "" if is_over else progress.group_text(status))]
    head += [("Devices", "" if is_over else progress.devices_text(status))]
    head += [("Scaling", "" if is_over else worker_range.describe(status))]
    head += [("PS", _pod_counts(status, "ps", status.ps_alive, status.ps_wanted) if status.ps_wanted else "")]
    head += [("Staleness", progress.staleness_text(status))]
    head += [("Restarts", f"{status.generation - 1} (of the master)" if status.generation > 1 else "")]
    head += [("Exit code", "" if status.exit_code is None else str(status.exit_code))]
    head += [("Started", _ago(status.started_at or job.created_at, now)), ("Updated", _ago(status.updated_at, now))]
    head += [("Logs", job.logs)]
    lines = [_head_line(name, text) for name, text in head if text]
    servers = [] if is_over else _server_lines(status)
    coverage = [f"  {line}" for line in progress.coverage_lines(status, _SHOWN_EPOCHS)]
    coverage = ["Coverage:", *coverage] if coverage else []
    return "\n".join([*lines, *coverage, *servers, *_pod_lines(status)])


def _pod_counts(status: JobStatus, role: str, alive: int, wanted: int) -> str:
    """Return how many pods of a role run and, while some are missing, the states of the newest others.

    Pods that the API server refused come last.
    """
    others = [pod.phase.lower() for pod in status.pods if pod.role == role and pod.phase != "Running"]
    missing = collections.Counter(others[max(0, len(others) - max(0, wanted - alive)) :])
    refused = [f"{one.count} not created ({one.message})" for one in status.not_created if one.role == role]
    found = [f"{alive}/{wanted} running", *(f"{count} {phase}" for phase, count in missing.items())]
    return ", ".join([*found, *refused])


def _server_lines(status: JobStatus) -> list[str]:
    """Return the load of each parameter server; of many, the totals and the busiest one."""
    if not status.ps:
        return []
    rows = [["PS", "BUSY", "PUSHES/S", "PULLS/S", "IN", "OUT", "ROWS", "TABLES"]]
    shown = sorted(status.ps, key=lambda ps: ps.id)
    if len(shown) > _SHOWN_SERVERS:
        names = [field.name for field in dataclasses.fields(PsStatus)]
        total = PsStatus(**{name: sum(getattr(ps, name) for ps in shown) for name in names})
        rows.append(_server_row("all", dataclasses.replace(total, busy=total.busy / len(shown))))
        shown = sorted(shown, key=lambda ps: -ps.busy)[:_SHOWN_BUSIEST]
    rows += [_server_row(str(ps.id), ps) for ps in shown]
    return ["Parameter servers:", *(f"  {line}" for line in table(rows).splitlines())]


def _server_row(name: str, ps: PsStatus) -> list[str]:
    return [
        name,
        f"{ps.busy:.0%}",
        f"{ps.pushes_per_second:,.0f}",
        f"{ps.pulls_per_second:,.0f}",
        f"{ps.received_per_second / 1e6:,.1f} MB/s",
        f"{ps.sent_per_second / 1e6:,.1f} MB/s",
        f"{ps.rows:,}",
        f"{ps.table_bytes / 1e6:,.0f} MB",
    ]


def _progress(status: JobStatus, *, with_rate: bool) -> list[tuple[str, str]]:
    """Return records, tasks, epoch, model and evaluation; a value that is not known is an empty text."""
    records = f"{status.records_done:,}"
    if status.records_total:
        records += f"/{status.records_total:,} ({status.records_done / status.records_total:.0%})"
    if status.records_skipped:
        records += f", skipped {status.records_skipped:,}"
    if with_rate:
        records += f", {status.records_per_second:,.0f} records/s"
    tasks = f"{status.tasks_done:,} done" if status.tasks_done or status.tasks_total else ""
    if status.tasks_total:
        tasks += f", {status.tasks_total - status.tasks_done:,} left"
    epochs = f"/{status.num_epochs}" if status.num_epochs > 0 else ""
    model = f"step {status.model_version}" if status.model_version else ""
    if status.loss is not None:
        model += f"{', ' if model else ''}loss {status.loss:.4g}"
    evaluation = f"{metrics_text(status)} at step {status.metrics_step}" if status.metrics else ""
    epoch = f"{status.epoch}{epochs}" if status.epoch else ""
    return [("Records", records), ("Tasks", tasks), ("Epoch", epoch), ("Model", model), ("Evaluation", evaluation)]


def _head_line(name: str, text: str) -> str:
    return f"{name + ':':<{_HEAD_WIDTH}}" + text.replace("\n", "\n" + " " * _HEAD_WIDTH)


def _ago(at: float, now: float) -> str:
    if not at:
        return ""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))} ({age(now - at)} ago)"


def _pod_lines(status: JobStatus) -> list[str]:
    if not status.pods:
        return ["Pods:         <none>"]
    rows = [["NAME", "PHASE", "RESTARTS", "MESSAGE"]]
    for pod in status.pods:
        rows.append([pod.name, pod.phase, str(pod.restarts), " ".join(pod.message.split())])
    return ["Pods:", *(f"  {line}" for line in table(rows).splitlines())]
