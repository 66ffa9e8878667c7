"""Why a job is slower than it could be: hangs, stragglers, and where its time goes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from elasticdl_client import goodput
from elasticdl_client.explain.diagnosis import (
    Cost,
    Diagnosis,
    Facts,
    Trouble,
    as_sentences,
    evidence,
    group_change,
    one_line,
    recovery,
)
from elasticdl_client.explain.failures import is_library, of_function, user_symbols
from elasticdl_client.goodput import PsState, SlotState
from elasticdl_client.job_events import EventKind, JobEvent
from elasticdl_client.job_status import JobStatus, PsStatus, StandingWorker
from elasticdl_client.progress import age
from elasticdl_client.worker_range import Bottleneck, parse

_MIN_SECONDS = 3.0  # of workers' time; a share of less says nothing
_SHARE = 0.25  # of the time of the workers that is worth a diagnosis
_BUSY = 0.5  # of a server's time in calls; other work, such as reading and writing frames, takes as much
_NOTABLY_BUSY = 0.3  # below that an uneven load holds nothing up
_LARGE_CALL_BYTES = 1 << 20  # a millisecond or more on the wire and in memory
_UNEVEN = 2.0  # times the mean of the other servers: the keys, not the number of servers, are to blame
_THROTTLED_SHARE = 0.05
_IN_COLLECTIVE = "world"  # the activity of a worker that waits for the other members
_STACK_FRAME = re.compile(r"^  (?P<path>.+):\d+ in (?P<function>.+)$", re.MULTILINE)
_OWN = re.compile(r"/elasticdl/(api|collective|data|frameworks|layers|rpc|worker)/")
_DATASET = ("__getitem__", "__getitems__", "__iter__", "__next__", "collate_fn")
_SILENT = re.compile(r"(process \d+: )?silent ")
_TOLD = (EventKind.WORKER_HUNG, EventKind.WORKER_SLOW)  # have a diagnosis of their own


def hangs(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose workers that held a lease and committed nothing, and silent ones."""
    for event in facts.of(EventKind.WORKER_HUNG):
        yield _silent(facts, event) if _SILENT.match(event.message) else _hung(facts, event)
    for event in facts.of(EventKind.POD_GIVEN_UP):
        if not any(one.kind in _TOLD for one in facts.history.chain(event)):
            yield _given_up(facts, event)


class HangPart(StrEnum):
    """The code that a worker hangs in; `evidence["part"]` of `Trouble.CODE_HANGS` and `Trouble.COLLECTIVE_HANGS`."""

    FEED = "feed"
    MODEL = "model"
    LOSS = "loss"
    CALLBACK = "callback"
    DATASET = "dataset"  # of a loader, in the worker or in a process of it
    CODE = "code"  # another part of the user's
    READING = "reading"  # of data, by ElasticDL
    COLLECTIVE = "collective"
    RUNTIME = "runtime"  # ElasticDL's own code
    UNKNOWN = "unknown"  # there are no stacks


_BY_TROUBLE = {
    Trouble.FEED_RAISED: HangPart.FEED,
    Trouble.MODEL_RAISED: HangPart.MODEL,
    Trouble.LOSS_RAISED: HangPart.LOSS,
    Trouble.CALLBACK_RAISED: HangPart.CALLBACK,
}
_OWN_PARTS = {"collective": HangPart.COLLECTIVE, "data": HangPart.READING}
_IN_PART = {
    HangPart.FEED: " in `feed`",
    HangPart.MODEL: " in the model",
    HangPart.LOSS: " in the loss function",
    HangPart.CALLBACK: " in a callback",
    HangPart.DATASET: " in the dataset of a loader",
    HangPart.READING: " while it read data",
    HangPart.RUNTIME: " in the code of ElasticDL",
}
_HANG_CURES = {
    HangPart.READING: "See whether the data source answers: a network disk, a database, credentials that have expired.",
    HangPart.COLLECTIVE: "Look at the node of this member: its network, its GPU, its driver.",
    HangPart.RUNTIME: "Please report it to the developers of ElasticDL, with the stack.",
}


def hang_part(where: str, stacks: str, symbols: dict[str, Trouble]) -> HangPart:
    """Return the code that a worker hangs in.

    Args:
        where: the innermost line of user code; empty: there is none.
        stacks: of its threads, the one that matters first, each frame as `FILE:LINE in FUNCTION`.
        symbols: further names of functions, as --feed and --loss give them.
    """
    threads = [
        [(found["path"], found["function"].rpartition(".")[2]) for found in _STACK_FRAME.finditer(thread)]
        for thread in stacks.split("thread ")[1:]
    ]
    if where:
        is_in_users = False
        for path, function in threads[0] if threads else []:
            if (part := _own_part(path)) is not None:
                return HangPart.CODE if is_in_users else part
            if is_library(path):
                continue
            is_in_users = True
            if function in _DATASET:
                return HangPart.DATASET
            if (trouble := of_function(function, symbols)) in _BY_TROUBLE:
                return _BY_TROUBLE[trouble]
        return HangPart.CODE
    innermost = [next((part for path, _ in thread if (part := _own_part(path))), None) for thread in threads]
    named = [part for part in innermost if part is not None]
    return HangPart.READING if HangPart.READING in named else next(iter(named), HangPart.UNKNOWN)


_STANDING = {
    "start": "it loads the user's code and the model",
    "compile": "its first minibatch, in which it compiles",
    "input": "it waits for records and `feed`",
    "idle": "it waits for records and `feed`",
    "evaluate": "an evaluation, or what a script does after a loop",
    "export": "the export of the model",
    "checkpoint": "a checkpoint",
}


def standing_texts(status: JobStatus) -> list[str]:
    """Return what has not changed for long: of each such worker, and of the servers' checkpoint."""
    found = [standing_text(one, status.processes_per_worker) for one in status.standing]
    found += [text for text in [_others_text(status)] if text]
    return found + ([saving_text(status)] if status.saving_seconds else [])


def _others_text(status: JobStatus) -> str:
    """Return how many workers stand that are not listed; empty: none does."""
    others = status.num_standing - len(status.standing)
    what = "worker" if status.processes_per_worker == 1 else "process"
    plural = "" if others == 1 else "s" if what == "worker" else "es"
    have = "has" if others == 1 else "have"
    return f"{others} more {what}{plural} {have} not changed for half a minute or more" if others > 0 else ""


def saving_text(status: JobStatus) -> str:
    """Return for how long the parameter servers have been writing a checkpoint."""
    return f"The parameter servers have been writing a checkpoint for {age(status.saving_seconds)}"


def standing_text(one: StandingWorker, num_processes: int) -> str:
    """Return how long a worker has done the same, what, and where, after its name."""
    process = f" (process {one.process})" if num_processes > 1 else ""
    at = f", at {one.where}" if one.where else ""
    doing = _STANDING.get(one.activity, "one minibatch")
    return f"worker-{one.worker}{process} has done the same for {age(one.seconds)}: {doing}{at}"


_SLOW_STORAGE = "If a checkpoint takes so long, nothing has to be done. Else see that --checkpoint_dir answers."
_LIMITS_OF_STANDING = {
    "checkpoint": f"{_SLOW_STORAGE} One of which it takes nothing has failed after --step_timeout.",
    "evaluate": "If an evaluation takes so long, nothing has to be done: that of a script has no limit. Else mend the "
    "line that is named.",
}


def standing_workers(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose workers that may hang: they do the same thing for long, now or when the job was stopped."""
    if facts.job.has_ended:
        return
    status = facts.job.status
    if status.saving_seconds:
        yield Diagnosis(
            Trouble.NO_CHANGE,
            ("checkpoint",),
            status.updated_at - status.saving_seconds,
            saving_text(status),
            ("not all of them have answered",),
            "The job trains on, but does not end before its last checkpoint.",
            Cost(is_open=not facts.is_over),
            _SLOW_STORAGE,
            {"activity": "checkpoint", "seconds": status.saving_seconds},
            key="checkpoint",
        )
    others = [text for text in [_others_text(status)] if text]
    for one in status.standing:
        subject = f"worker-{one.worker}"
        yield Diagnosis(
            Trouble.NO_CHANGE,
            (subject,),
            status.updated_at - one.seconds,
            standing_text(one, status.processes_per_worker),
            (f"it is at {one.where}" if one.where else f"its main thread: {one.activity}", *others),
            "" if facts.is_over else "It is left alone as long as it may take that time.",
            Cost(is_open=not facts.is_over),
            _LIMITS_OF_STANDING.get(
                one.activity,
                "If it takes so long, nothing has to be done: a worker that hangs is found after --hang_timeout, or "
                "--step_timeout where it starts, compiles or exports. Else mend the line that is named.",
            ),
            {"activity": one.activity, "seconds": one.seconds, "where": one.where},
            key=subject,
        )


def standing_groups(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose groups whose members all waited in one collective, so that the cause is unknown."""
    for event in facts.of(EventKind.GROUP_BROKEN):
        if "waited" not in event.details:
            continue
        yield Diagnosis.of(
            event,
            Trouble.COLLECTIVE_HANGS,
            f"{event.subject} stood still in a collective: {one_line(event.message)}",
            evidence(facts, event),
            as_sentences(group_change(facts.consequences(event))),
            "If it happens again, look at the network between the nodes of its members, and at their GPUs.",
        )


def _own_part(path: str) -> HangPart | None:
    found = _OWN.search(path)
    return None if found is None else _OWN_PARTS.get(found[1], HangPart.RUNTIME)


def _hung(facts: Facts, event: JobEvent) -> Diagnosis:
    where, stacks = str(event.details.get("where", "")), str(event.details.get("stacks", "")).strip()
    part = hang_part(where, stacks, user_symbols(facts))
    if event.details.get("activity") == _IN_COLLECTIVE:
        part = HangPart.COLLECTIVE
    in_group = part is HangPart.COLLECTIVE
    what = "stood still in a collective" if in_group else f"made no progress{_IN_PART.get(part, '')}"
    done, cost = _remedy(facts, event)
    return Diagnosis.of(
        event,
        Trouble.COLLECTIVE_HANGS if in_group else Trouble.CODE_HANGS,
        f"{event.subject} {what}: {one_line(event.message)}",
        tuple(filter(None, (f"it is at {where}" if where else "", stacks))) or (one_line(event.message),),
        done,
        _HANG_CURES.get(
            part,
            "Mend the line that the stack ends in: an endless loop, or a lock that is never released. If a minibatch "
            "may take so long, raise --hang_timeout.",
        ),
        cost=cost,
        found={"part": part.value},
        is_fatal=facts.has_ended_by(event),
    )


def _silent(facts: Facts, event: JobEvent) -> Diagnosis:
    done, cost = _remedy(facts, event)
    return Diagnosis.of(
        event,
        Trouble.WORKER_SILENT,
        f"{event.subject} sent no heartbeat for longer than --lease_timeout",
        evidence(facts, event),
        done,
        "Nothing, if it was stopped on purpose (SIGSTOP). Otherwise look at its node: swapping, no processor time, no "
        "network; or at native code of yours that keeps Python's lock.",
        cost=cost,
        is_fatal=facts.has_ended_by(event),
    )


def _remedy(facts: Facts, event: JobEvent) -> tuple[str, Cost]:
    """Describe the response to a worker that hangs, is silent or slow, and its cost."""
    ends = (EventKind.POD_GIVEN_UP, EventKind.POD_LOST)
    follow = facts.consequences(event)
    given_up = next((one for one in follow if one.kind in ends), None)
    if given_up is not None:
        return recovery(facts, given_up)
    if event.kind is EventKind.WORKER_SLOW or event.details.get("action") == "report":
        return "It was reported, and left as it is.", Cost()
    given = "its tasks were given to other workers; its results under the old leases are refused"
    return as_sentences([given, *group_change(follow)]), Cost()


def _given_up(facts: Facts, event: JobEvent) -> Diagnosis:
    done, cost = recovery(facts, event)
    is_stuck = "stuck" in event.message
    return Diagnosis.of(
        event,
        Trouble.CODE_HANGS if is_stuck else Trouble.WORKER_SILENT,
        f"{event.subject} was given up: {one_line(event.message)}",
        evidence(facts, event),
        done,
        "Mend what does not return: `--log_level=DEBUG` shows its last steps, or raise --step_timeout."
        if is_stuck
        else "A process that is stopped (SIGSTOP), swaps, or is cut off from the network sends no heartbeat: look at "
        "its node. Pods that are slow to start need a longer --step_timeout.",
        cost=cost,
        is_fatal=facts.has_ended_by(event),
        key=event.subject.partition("-")[0],
    )


def lost_leases(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose workers that lost a lease but were not silent."""
    for event in facts.of(EventKind.LEASE_LOST):
        follow = [e.kind for e in facts.consequences(event)]
        if any(one.kind in _TOLD for one in facts.history.chain(event)) or EventKind.POD_GIVEN_UP in follow:
            continue
        yield _silent(facts, event)


def stragglers(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose members that compute more slowly than the others."""
    for event in facts.of(EventKind.WORKER_SLOW):
        throttled = event.details.get("throttled", 0.0)
        is_throttled = isinstance(throttled, int | float) and throttled > _THROTTLED_SHARE
        ratio = event.details.get("ratio")
        times = f"{float(ratio):.1f} times" if isinstance(ratio, int | float) else "much"
        why = [one_line(event.message)] if event.message else []
        why += [f"{name}: {value}" for name, value in event.details.items()]
        done, cost = _remedy(facts, event)
        yield Diagnosis.of(
            event,
            Trouble.WORKER_THROTTLED if is_throttled else Trouble.WORKER_SLOW,
            f"{event.subject} takes {times} as long for a minibatch as the others"
            + (", held back by the CPU limit of its container" if is_throttled else ""),
            tuple(why),
            done,
            "Raise --worker_resource_limit=cpu=…, or leave the limit out and request what a worker needs."
            if is_throttled
            else "Look at its node: other load, a slower processor, heat. --cluster_spec_json chooses equal nodes; "
            "--straggler_action=replace lets another pod take its place.",
            cost=cost,
        )


def input_bound(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose workers that wait too long for records, unless the job ended before it trained."""
    seconds = facts.job.status.worker_seconds
    share = _share(seconds, SlotState.INPUT)
    stands = any(one.activity in ("input", "idle") for one in facts.job.status.standing)  # it is not slow, but stands
    if (
        share >= _SHARE
        and not stands
        and not _lacks_workers(facts)
        and (seconds.get(SlotState.USEFUL) or not facts.is_over)
    ):
        yield Diagnosis(
            Trouble.INPUT_SLOW,
            ("job",),
            facts.job.status.updated_at,
            f"Workers spend {100 * share:.0f} % of their time waiting for records and `feed`",
            (goodput.summary(seconds),),
            "",
            Cost(seconds.get(SlotState.INPUT, 0.0), is_open=not facts.is_over),
            "Make reading cheaper: RecordIO or Parquet instead of text, vectorised `feed`, a larger --minibatch_size, "
            "data on a faster disk; more workers read in parallel.",
            {"share": round(share, 4), "seconds": round(seconds.get(SlotState.INPUT, 0.0), 3)},
        )


def _lacks_workers(facts: Facts) -> bool:
    """Return whether a job that runs has no worker now: the shares are of earlier ones."""
    return not facts.is_over and not facts.job.status.workers_alive


class PsLoad(StrEnum):
    """The load on parameter servers that holds a job up; `evidence["cause"]` of `Trouble.PS_OVERLOADED`."""

    THROTTLED = "throttled"  # the CPU limit of one of them
    BUSY = "busy"  # their threads
    HOT_ROWS = "hot rows"  # one of them has far more to do than the others
    BYTES = "bytes"  # each call carries many
    CALLS = "calls"  # there are many, and each carries little


_PS_CURES = {
    PsLoad.THROTTLED: "Raise --ps_resource_limit=cpu=…, or leave the limit out and request what a server needs.",
    PsLoad.BUSY: "Start more servers (--num_ps_pods), raise --get_model_steps, or give them more processors "
    "(--ps_resource_request).",
    PsLoad.HOT_ROWS: "One server has most of the load: rows of a few hot ids. Raise --get_model_steps, or use larger "
    "minibatches, so that a row is sent once for many records.",
    PsLoad.BYTES: "Each call carries much of a large dense model: raise --get_model_steps, start more servers, or "
    "train with AllReduce.",
    PsLoad.CALLS: "The servers have time; workers wait for many small calls: raise --minibatch_size or "
    "--get_model_steps.",
}


def overloaded_servers(facts: Facts) -> Iterator[Diagnosis]:
    """Parameter servers that hold the workers up; what workers wait for a lost one has a trouble of its own."""
    status = facts.job.status
    waited_s = status.worker_seconds.get(SlotState.WAITING_PS, 0.0) - _lost_servers_s(facts) * status.workers_wanted
    seconds = {**status.worker_seconds, SlotState.WAITING_PS: max(0.0, waited_s)}
    waiting = _share(seconds, SlotState.WAITING_PS)
    if waiting < _SHARE or not status.ps or _lacks_workers(facts):
        return
    found = _servers(facts)
    load, most = _load(found, status.ps_seconds)
    servers = sorted(found, key=lambda ps: (ps is not most, -ps.busy))
    yield Diagnosis(
        Trouble.PS_OVERLOADED,
        tuple(f"ps-{ps.id}" for ps in servers[:3]),
        status.updated_at,
        f"Workers spend {100 * waiting:.0f} % of their time waiting for parameter servers, most of all for "
        f"ps-{most.id}",
        (
            *(
                f"ps-{ps.id}: {ps.busy:.2f} threads busy, {ps.pushes_per_second:,.0f} pushes/s, "
                f"{ps.pulls_per_second:,.0f} pulls/s, {_traffic(ps) / 1e6:,.1f} MB/s"
                + (f", held back by its CPU limit for {100 * ps.throttled:.0f} % of the time" if ps.throttled else "")
                for ps in servers
            ),
            goodput.summary(status.worker_seconds),
        ),
        "",
        Cost(seconds[SlotState.WAITING_PS], is_open=not facts.is_over),
        _PS_CURES[load],
        {
            "cause": load.value,
            "waiting": round(waiting, 4),
            "busy": round(most.busy, 4),
            "throttled": round(most.throttled, 4),
        },
    )


def _lost_servers_s(facts: Facts) -> float:
    """Return for how many seconds at least one server that had been ready was away."""
    away: set[str] = set()
    began, total = 0.0, 0.0
    for event in facts.of(EventKind.POD_LOST, EventKind.POD_GIVEN_UP, EventKind.PS_READY):
        if not event.subject.startswith("ps-"):
            continue
        before = bool(away)
        if event.kind is EventKind.PS_READY:
            away.discard(event.subject)
        else:
            away.add(event.subject)
        if away and not before:
            began = event.at
        elif before and not away:
            total += event.at - began
    return total + (facts.end - began if away else 0.0)


def _servers(facts: Facts) -> Sequence[PsStatus]:
    """Return the servers; after a job with the rates of all their time: in its last seconds they have nothing to do."""
    status = facts.job.status
    seconds = sum(value for state, value in status.ps_seconds.items() if state != PsState.ABSENT)
    if not facts.is_over or not seconds:
        return status.ps
    seconds /= len(status.ps)
    return [
        replace(
            ps,
            pushes_per_second=ps.pushes / seconds,
            pulls_per_second=ps.pulls / seconds,
            received_per_second=ps.received_bytes / seconds,
            sent_per_second=ps.sent_bytes / seconds,
            busy=ps.busy_seconds / seconds,
        )
        for ps in status.ps
    ]


def _load(servers: Sequence[PsStatus], seconds: Mapping[str, float]) -> tuple[PsLoad, PsStatus]:
    """Return the load that holds the workers up, and the server that shows it most.

    Args:
        servers: in any order.
        seconds: Seconds of all servers by state.
    """
    throttled = max(servers, key=lambda ps: ps.throttled)
    if throttled.throttled > _THROTTLED_SHARE:
        return PsLoad.THROTTLED, throttled
    busiest, loudest = max(servers, key=lambda ps: ps.busy), max(servers, key=_traffic)
    if busiest.busy > _NOTABLY_BUSY and _stands_out(busiest.busy, [ps.busy for ps in servers]):
        return PsLoad.HOT_ROWS, busiest
    if _has_large_calls(loudest) and _stands_out(_traffic(loudest), [_traffic(ps) for ps in servers]):
        return PsLoad.HOT_ROWS, loudest
    works = seconds.get(PsState.BUSY, 0.0)
    if busiest.busy >= _BUSY or works > _BUSY * (works + seconds.get(PsState.IDLE, 0.0)):
        return PsLoad.BUSY, busiest
    return (PsLoad.BYTES, loudest) if _has_large_calls(*servers) else (PsLoad.CALLS, busiest)


def _stands_out(largest: float, every: Sequence[float]) -> bool:
    """Return whether the largest of several values is far above the mean of the others."""
    others = len(every) - 1
    return others > 0 and largest > _UNEVEN * (sum(every) - largest) / others


def _traffic(server: PsStatus) -> float:
    """Return the server's traffic in bytes per second."""
    return server.received_per_second + server.sent_per_second


def _has_large_calls(*servers: PsStatus) -> bool:
    num_calls = sum(ps.pushes + ps.pulls for ps in servers)
    return sum(ps.received_bytes + ps.sent_bytes for ps in servers) > _LARGE_CALL_BYTES * num_calls


def too_many_workers(facts: Facts) -> Iterator[Diagnosis]:
    """More workers than there are tasks of an epoch."""
    status = facts.job.status
    tasks = max((int(event.details.get("tasks", 0)) for event in facts.of(EventKind.EPOCH_STARTED)), default=0)
    num_processes = status.workers_wanted * status.processes_per_worker
    if not tasks or num_processes <= tasks or facts.flag("fixed_global_batch"):  # then all share each task
        return
    idle = status.worker_seconds.get(SlotState.IDLE, 0.0)
    fewer = f"--num_workers={max(1, tasks // status.processes_per_worker)}"
    whom = "of them" if status.processes_per_worker == 1 else f"of their {num_processes} processes"
    how = fewer if facts.is_over else f"`{facts.job.command('scale')} {fewer}`"
    yield Diagnosis(
        Trouble.TOO_MANY_WORKERS,
        ("job",),
        status.updated_at,
        f"There are {status.workers_wanted} workers and {tasks} tasks in an epoch: {num_processes - tasks} "
        f"{whom} find none",
        _line(status.worker_seconds),
        "",
        Cost(idle, is_open=not facts.is_over),
        f"Take fewer workers ({how}), or cut smaller tasks: --num_minibatches_per_task, --minibatch_size.",
        {"workers": status.workers_wanted, "tasks": tasks},
    )


_GROWTH_CURES = {
    Bottleneck.INPUT: "Make reading cheaper: RecordIO or Parquet instead of text, data on a faster disk, or near it.",
    Bottleneck.GROUP: "Raise --minibatch_size, so that there are fewer sums for each record; or use a faster network.",
    Bottleneck.TASKS: "Cut smaller tasks: --num_minibatches_per_task, --minibatch_size.",
    Bottleneck.PROCESSORS: "Workers share processors or memory: give each its own (--worker_resource_request), or more "
    "nodes.",
}


def ended_growth(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose a number of workers that follows the measured gain and no longer grows because of a bottleneck."""
    status, scaling = facts.job.status, facts.job.status.scaling
    if scaling is None or scaling.gain is None or scaling.bottleneck in ("", Bottleneck.ROOM):
        return
    bottleneck = Bottleneck(scaling.bottleneck)
    if bottleneck is Bottleneck.PARAMETER_SERVERS:
        load = _load(_servers(facts), status.ps_seconds)[0] if status.ps else PsLoad.BUSY
        cure = _PS_CURES[load]
        if load is PsLoad.BUSY and status.workers_wanted:
            workers = min(parse(scaling.workers).most, 2 * status.workers_wanted)
            servers = math.ceil(status.ps_wanted * workers / status.workers_wanted)
            cure += f" For {workers} workers take --num_ps_pods={max(servers, status.ps_wanted + 1)}."
    else:
        cure = _GROWTH_CURES[bottleneck]
    yield Diagnosis(
        Trouble.GROWTH_ENDED,
        ("job",),
        status.updated_at,
        f"The job keeps to {status.workers_wanted} of {scaling.workers} workers: another would add "
        f"{100 * max(0.0, scaling.gain):.0f} % of a worker's rate; the bottleneck: {bottleneck}",
        _line(status.worker_seconds),
        "",
        Cost(is_open=not facts.is_over),
        f"{cure} To have more workers all the same: lower --min_gain, or fix the number "
        f"(`{facts.job.command('scale')} --num_workers=N`).",
        {"bottleneck": bottleneck.value, "gain": scaling.gain, "workers": status.workers_wanted},
    )


def _line(seconds: dict[str, float]) -> tuple[str, ...]:
    text = goodput.summary(seconds)
    return (text,) if text else ()


def _share(seconds: dict[str, float], state: SlotState) -> float:
    """Return a state's share of the time in which workers could work, which excludes starting and pending."""
    outside = (SlotState.UNSCHEDULED, SlotState.STARTING, SlotState.STOPPED)
    whole = sum(value for name, value in seconds.items() if name not in outside)
    return seconds.get(state, 0.0) / whole if whole >= _MIN_SECONDS else 0.0
