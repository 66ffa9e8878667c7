"""Troubles by the user's code, data and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elasticdl_client.explain.diagnosis import Cost, Diagnosis, Facts, Trouble, as_sentences, evidence, one_line, plural
from elasticdl_client.explain.ends import other_version
from elasticdl_client.job_events import Detail, EventKind, JobEvent
from elasticdl_client.jobs.store import Phase

_FRAME = re.compile(
    r'^\s+File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n(?!\s+File ")\s+(?P<code>\S.*))?',
    re.MULTILINE,
)
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib(64)?/python3|^<|/elasticdl_preprocessing/"
    r"|/elasticdl/(api|cluster|collective|data|frameworks|layers|model_def|worker)/"
)
_CHAINED = re.compile(r"\n(?:The above exception was the direct cause|During handling of the above exception)")
_NUMBERS = re.compile(r"\(?\brecords? [^()]*\)?|\d+")  # differ between failures that are alike
_RAISED = re.compile(r"\.py: (?:the )?(?P<what>[\w.]+)\b[^\n]*? raised ")
_HOOK = re.compile(r"on_[a-z_]+|callbacks")
_MODEL = ("custom_model", "__init__", "call", "forward", "build", "__call__", "train_step")
_FEED_ERROR = re.compile(r"\bFeedError\b")
_GONE = re.compile(
    r"No such file|does not exist|is not there|not found|cannot be opened|cannot be reached|Input/output error|Stale"
    r"|holds no records|is empty|could not connect|Connection refused|Permission denied",
    re.IGNORECASE,
)
_DATA = re.compile(r"[Rr]ecord \d|byte \d|cannot be read|damaged|checksum|line \d+|row \d+|column|label", re.IGNORECASE)
_CHANGED = re.compile(r"changed since the job began|changed while the job reads it|not hold the same records")
_LAST_CHECKPOINT = "The last checkpoint was not written"
_CHECKPOINTS = "checkpoints"  # key of those that were not written
_AWAY = re.compile(r"\bPS (?P<id>\d+) at \S+ does not answer")
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)

_WORDS = {
    Trouble.FEED_RAISED: "`feed` raised an exception",
    Trouble.LOSS_RAISED: "The loss function raised an exception",
    Trouble.MODEL_RAISED: "The model raised an exception",
    Trouble.CALLBACK_RAISED: "A callback raised an exception",
    Trouble.CODE_RAISED: "The user's code raised an exception",
    Trouble.BAD_RECORD: "A record cannot be used",
    Trouble.DATA_GONE: "A data source cannot be read",
    Trouble.DATA_CHANGED: "The data is not what the job began with",
    Trouble.DISK_FULL: "A disk is full",
    Trouble.CHECKPOINT_NOT_WRITTEN: "A checkpoint cannot be written",
    Trouble.VERSIONS_DIFFER: "Two pods run different versions of ElasticDL",
}


@dataclass(frozen=True, slots=True)
class ErrorFrame:
    """A frame of a traceback that is in a file of the user's."""

    path: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f'File "{self.path}", line {self.line}, in {self.function}' + (f"\n  {self.code}" if self.code else "")


def frames_of_user(traceback: str) -> list[ErrorFrame]:
    """Return the frames in the user's own files of the exception that was raised first, the innermost last."""
    root = _CHAINED.split(traceback)[0]
    found = (
        ErrorFrame(one["path"], int(one["line"]), one["function"], one["code"] or "") for one in _FRAME.finditer(root)
    )
    return [frame for frame in found if not is_library(frame.path)]


def is_library(path: str) -> bool:
    """Return whether a file is none of the user's."""
    return _LIBRARY.search(path) is not None


def blamed(error: str, traceback: str = "", symbols: dict[str, Trouble] | None = None) -> Trouble:
    """Return which part of the user's code or data an error of a task comes from.

    Args:
        error: as the worker has reported it.
        traceback: Traceback of the exception; empty: the user's code raised none.
        symbols: further names of functions, as --feed and --loss give them.
    """
    if other_version(error) or other_version(traceback):
        return Trouble.VERSIONS_DIFFER
    if _NO_SPACE.search(error):
        return Trouble.DISK_FULL
    if _LAST_CHECKPOINT in error:
        return Trouble.CHECKPOINT_NOT_WRITTEN
    if _CHANGED.search(error):
        return Trouble.DATA_CHANGED
    if (raised := _RAISED.search(error)) is not None:
        by_name = of_function(raised["what"].rpartition(".")[2], symbols)
        return by_name or of_function(raised["what"].partition(".")[0], symbols) or Trouble.MODEL_RAISED
    for frame in reversed(frames_of_user(traceback)):
        if (trouble := of_function(frame.function, symbols)) is not None:
            return trouble
    if _FEED_ERROR.search(traceback) or re.search(r"\bfeed\b", error):
        return Trouble.FEED_RAISED
    if traceback:
        return Trouble.CODE_RAISED
    if _GONE.search(error):
        return Trouble.DATA_GONE
    return Trouble.BAD_RECORD if _DATA.search(error) else Trouble.CODE_RAISED


def user_symbols(facts: Facts) -> dict[str, Trouble]:
    """Return the names that flags give to functions of the user, each with what it is to blame for."""
    if facts.job.spec is None:
        return {}
    spec = facts.job.spec
    named = {
        spec.feed: Trouble.FEED_RAISED,
        spec.loss: Trouble.LOSS_RAISED,
        spec.callbacks: Trouble.CALLBACK_RAISED,
        spec.model_def.rpartition(".")[2]: Trouble.MODEL_RAISED,
    }
    return {name: trouble for name, trouble in named.items() if name}


def of_function(name: str, symbols: dict[str, Trouble] | None) -> Trouble | None:
    """Return what a function of the user is to blame for when it raises; None: its name says nothing."""
    if symbols and name in symbols:
        return symbols[name]
    if name in ("feed", "dataset_fn"):
        return Trouble.FEED_RAISED
    if name == "loss":
        return Trouble.LOSS_RAISED
    if _HOOK.fullmatch(name):
        return Trouble.CALLBACK_RAISED
    return Trouble.MODEL_RAISED if name in _MODEL else None


def failed_tasks(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose tasks in which the user's code raised, or whose records cannot be read."""
    for event in facts.of(EventKind.TASK_FAILED):
        traceback = str(event.details.get("traceback", ""))
        trouble = blamed(event.message, traceback, user_symbols(facts))
        is_fatal = facts.has_ended_by(event)
        where = _where(event)
        frames = frames_of_user(traceback)
        line = tuple(map(str, frames[-1:]))
        tries = int(event.details.get("failures", 1))
        found = _place(frames)
        yield Diagnosis.of(
            event,
            trouble,
            f"{_WORDS[trouble]} on worker-{event.details.get('worker', '?')}: {one_line(event.message)}",
            (*line, *([where] if where else []), *evidence(facts, event)[1:]),
            f"The task was tried {plural(tries, 'time')}, then the job was ended."
            if is_fatal
            else "The task was given out again, to another worker where there is one.",
            (_hint(event.message) if _LAST_CHECKPOINT in event.message else "") or _advice(trouble, facts),
            found=found,
            is_fatal=is_fatal,
            key=_key(event.message),
        )


def _place(frames: list[ErrorFrame]) -> dict[str, Detail]:
    """Return the location of the innermost frame, as evidence."""
    return {"at": f"{frames[-1].path}:{frames[-1].line}", "function": frames[-1].function} if frames else {}


def _alike(message: str) -> str:
    """Return the part of a message that is equal in failures of one kind."""
    return _NUMBERS.sub("", one_line(message))


def _where(event: JobEvent) -> str:
    """Task, minibatch and records, as far as the event says."""
    details = event.details
    parts = [f"task {event.subject.removeprefix('task-')} of epoch {details.get('epoch', '?')}"]
    minibatch = details.get("minibatch", -1)
    parts += [f"minibatch {minibatch}"] if isinstance(minibatch, int) and minibatch >= 0 else []
    parts += [f"records {details['records']}"] if details.get("records") else []
    return ", ".join(parts)


def _advice(trouble: Trouble, facts: Facts) -> str:
    logs = f"`{facts.job.command('logs')} --role=worker` has the whole traceback"
    match trouble:
        case Trouble.FEED_RAISED:
            return (
                f"Mend `feed`: call it in a shell with the records named here; {logs}. If single records are bad, "
                "--max_bad_records=N leaves up to N of them out."
            )
        case Trouble.BAD_RECORD:
            return "Mend or remove the record, or let --max_bad_records=N leave up to N of them out."
        case Trouble.DATA_GONE:
            return "See that the source exists and that all pods can read it: same path, mounted volume, credentials."
        case Trouble.DATA_CHANGED:
            return "Start a new job on the new data: this one counts the records of the old."
        case Trouble.DISK_FULL:
            return f"Make room on the disk that is named here; {logs}."
        case Trouble.VERSIONS_DIFFER:
            return "Let all pods run one version: the same tag in --image_name and --worker_image, pulled anew."
        case Trouble.CALLBACK_RAISED:
            return f"Mend the callback; {logs}."
        case Trouble.LOSS_RAISED:
            return f"Mend the loss function: compare the shapes of its labels and predictions; {logs}."
    return f"Mend the line named here; {logs}."


def rejected_models(facts: Facts) -> Iterator[Diagnosis]:
    """Model definitions that a worker could not build."""
    for event in facts.of(EventKind.MODEL_REJECTED):
        traceback = str(event.details.get("traceback", ""))
        trouble = blamed(event.message, traceback, user_symbols(facts))
        if trouble in (Trouble.BAD_RECORD, Trouble.CODE_RAISED):
            trouble = Trouble.MODEL_RAISED  # it was refused before it had a record
        frames = frames_of_user(traceback)
        line = tuple(map(str, frames[-1:]))
        found = _place(frames)
        is_last = _LAST_CHECKPOINT in event.message
        words = _WORDS[trouble] if is_last or " raised " in event.message else "The model definition cannot be used"
        when = "when all was trained" if is_last else "before anything was trained"
        done = f"The job was ended {when}: no other worker would fare better."
        if not facts.has_ended_by(event):
            done = "It alone did not end the job: others had trained the model, so only the worker was to be replaced."
        yield Diagnosis.of(
            event,
            trouble,
            f"{words}: {one_line(event.message)}",
            line or (one_line(event.message),),
            done,
            _hint(event.message) or _advice(trouble, facts),
            found=found,
            is_fatal=facts.has_ended_by(event),
            key=_key(event.message),
        )


def _key(message: str) -> str:
    """Return what merges the diagnoses of an error; the last checkpoint has an event of its own, too."""
    return _CHECKPOINTS if _LAST_CHECKPOINT in message else _alike(message)


def _hint(message: str) -> str:
    """Return the hint that is part of an error of ElasticDL."""
    return " ".join(message.partition("\n  → ")[2].split("\n")[:1]).strip()


def losses(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose losses and gradients that are not finite."""
    for event in facts.of(EventKind.LOSS_NOT_FINITE):
        is_fatal = facts.has_ended_by(event)
        yield Diagnosis.of(
            event,
            Trouble.LOSS_NOT_FINITE,
            f"The numbers of a minibatch are not finite: {one_line(event.message)}",
            (_where(event),),
            "The job was ended (--nan_policy=fail)." if is_fatal else "The minibatch was left out (--nan_policy=skip).",
            "Look at these records first: a missing cell of a table is NaN. If they are finite, lower the learning "
            "rate or clip gradients. --nan_policy=skip leaves such minibatches out.",
            is_fatal=is_fatal,
        )


def excluded(facts: Facts) -> Iterator[Diagnosis]:
    """Report the records that were skipped because of --max_bad_records."""
    before = 0
    for event in facts.of(EventKind.RECORDS_EXCLUDED):
        records = str(event.details.get("records", ""))
        count, limit = int(event.details.get("excluded", 0)), event.details.get("limit", 0)
        new, before = count - before, count  # two workers may have met the same one
        yield Diagnosis.of(
            event,
            Trouble.BAD_RECORD,
            f"Records cannot be used: {one_line(event.message)}",
            (f"records {records}",),
            f"They were left out, in this and later epochs: {count} of at most {limit} (--max_bad_records).",
            "Mend or remove them; --bad_records_dir names where they are written with their errors.",
            cost=Cost(records=new),
        )


def unreadable_data(facts: Facts) -> Iterator[Diagnosis]:
    """Data sources that the master could not list."""
    for event in facts.of(EventKind.DATA_UNREADABLE):
        trouble = Trouble.DATA_CHANGED if _CHANGED.search(event.message) else Trouble.DATA_GONE
        yield Diagnosis.of(
            event,
            trouble,
            f"{_WORDS[trouble]} ({event.details.get('data', '')} data): {one_line(event.message)}",
            (event.message.partition("\n  → ")[0],),
            "The job was ended: without its data there is nothing to hand out.",
            _hint(event.message) or _advice(trouble, facts),
            is_fatal=facts.has_ended_by(event),
        )


def checkpoints(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose checkpoints that could not be written or read."""
    for event in facts.of(EventKind.CHECKPOINT_FAILED):
        is_full = _NO_SPACE.search(event.message) is not None
        saved = next((e for e in facts.of(EventKind.CHECKPOINT_SAVED) if e.number > event.number), None)
        is_fatal = facts.has_ended_by(event)
        again = f" The next one, {saved.subject}, was written." if saved is not None else ""
        kept = "" if event.message.endswith("there is none yet") else " The last good checkpoint is kept."
        away = _AWAY.search(event.message)
        yield Diagnosis.of(
            event,
            Trouble.DISK_FULL if is_full else Trouble.CHECKPOINT_NOT_WRITTEN,
            f"{event.subject} was not written: the disk is full"
            if is_full
            else f"{event.subject} was not written: {one_line(event.message)}",
            (event.message,),
            f"The job was ended, as it was the last one.{kept}"
            if is_fatal
            else f"The job trained on, and a later one is tried.{kept}{again}",
            "Make room in --checkpoint_dir, or keep fewer: --keep_checkpoint_max."
            if is_full
            else f"See why ps-{away['id']} did not answer; the storage is not to blame."
            if away is not None
            else "See that --checkpoint_dir is mounted, writable by all pods, and fast enough.",
            cost=Cost(is_open=saved is None and not facts.is_over),
            is_fatal=is_fatal,
            key=_CHECKPOINTS,
        )
    for event in facts.of(EventKind.CHECKPOINT_UNREADABLE):
        is_fatal = facts.has_ended_by(event)
        taken = event.details.get("restored_from")
        yield Diagnosis.of(
            event,
            Trouble.CHECKPOINT_DAMAGED,
            f"{event.subject} could not read a checkpoint: {one_line(event.message)}",
            tuple(event.message.splitlines()),
            "The job was ended." if is_fatal else f"It was passed over; taken was {taken or 'none: initial values'}.",
            "Repair or remove what is damaged, and start again from a whole one (--checkpoint_dir_for_init) or none.",
            is_fatal=is_fatal,
        )


def exports(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose models that were trained but not exported."""
    for event in facts.of(EventKind.MODEL_NOT_EXPORTED):
        why = event.message.partition(": ")[2].partition(". ")[0]
        yield Diagnosis.of(
            event,
            Trouble.MODEL_NOT_EXPORTED,
            f"The model was not exported: {why}",
            (event.message,),
            "The last checkpoint, written when training was done, is the trained model.",
            "Name it to other jobs by --checkpoint_dir_for_init. For an export give workers more memory, on Kubernetes "
            "by --worker_resource_limit.",
        )


def stops(facts: Facts) -> Iterator[Diagnosis]:
    """Diagnose jobs that were asked to end, and jobs without a running process."""
    asked = facts.of(EventKind.JOB_STOP_REQUESTED)
    if facts.job.phase is Phase.STOPPED and not asked:
        yield Diagnosis(
            Trouble.STOPPED,
            ("job",),
            facts.end,
            "The job has stopped before its end",
            (facts.job.note,) if facts.job.note else (),
            "Its journal and checkpoints are kept." if facts.job.has_begun else "",
            Cost(),
            as_sentences([facts.job.continuation]),
            {"phase": facts.job.phase.value},
            is_fatal=True,
        )
    for event in asked:
        yield Diagnosis.of(
            event,
            Trouble.STOPPED,
            f"The job was asked to end: {one_line(event.message)}",
            (event.message,),
            "The job was ended.",
            is_fatal=True,
        )


def others(facts: Facts, known: Sequence[Diagnosis]) -> Iterator[Diagnosis]:
    """Return the end of a job that none of the other diagnoses explains."""
    if any(one.is_fatal for one in known):
        return
    status = facts.job.status
    failed = facts.of(EventKind.JOB_FAILED)
    noted = facts.job.note if facts.job.phase is Phase.FAILED and status.exit_code is None else ""
    if not failed and not noted and (status.exit_code in (None, 0) or not status.message):
        return
    message = failed[-1].message if failed else noted or status.message
    trouble = Trouble.JOB_FAILED
    if other_version(message):
        trouble = Trouble.VERSIONS_DIFFER
    elif _CHANGED.search(message):
        trouble = Trouble.DATA_CHANGED
    elif "holds no records" in message:
        trouble = Trouble.DATA_GONE
    chain = facts.history.chain(failed[-1]) if failed else ()
    yield Diagnosis(
        trouble,
        ("job",),
        failed[-1].at if failed else status.updated_at,
        f"The job failed: {one_line(message)}",
        (message.partition("\n  → ")[0], *(one for event in chain for one in evidence(facts, event)[:1])),
        "The job was ended.",
        Cost(),
        _hint(message) or f"`{facts.job.command('logs')}` has the master's log.",
        {"message": message},
        (failed[-1].number,) if failed else (),
        True,
    )
