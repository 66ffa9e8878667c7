"""Bad records and bad feeds: with `--max_bad_records` or `--strict_feed`, `feed` parses a whole task beforehand.

A record on which `feed` raises is found by bisection, so it can be excluded before any minibatch of its task is in the
model.  The records and their errors are written to files; the master decides about the task.  A strict `feed`, which
must make one sample of each record and does not, is located in the same way.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace

from elasticdl.frameworks.framework import Batch, FeedError, Inference, Mode, TaskRecords
from elasticdl.storage.paths import make_directory, path_of, writing
from elasticdl.storage.versions import reason
from elasticdl_client.errors import StorageError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.storage_kinds import AnyPath

_NOT_STRICT = "Without --strict_feed the difference is counted as filtered or augmented."
_SHOWN = 200  # bytes of a record
_NAME_BYTES = 80  # of a shard's name in a file name, which has at most 255
_log = logging.getLogger("elasticdl.worker")


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A job's flags for bad records and feeds; false if tasks are not checked.

    Attributes:
        limit: How many records may be excluded.
        directory: Where they are written; None: nowhere.
        is_strict: `feed` must make one sample of each record.
    """

    limit: int = 0
    directory: AnyPath | None = None
    is_strict: bool = False

    @classmethod
    def of(cls, spec: JobSpec) -> Quarantine:
        directory = path_of(spec.bad_records_dir) if spec.bad_records_dir else None
        return cls(spec.max_bad_records, directory, spec.strict_feed)

    def __bool__(self) -> bool:
        return self.limit > 0 or self.is_strict


def inspected(
    framework: Inference, mode: Mode, tasks: Iterator[TaskRecords], quarantine: Quarantine
) -> Generator[Batch, None, None]:
    """Yield minibatches like `Framework.batches`; with a quarantine, make all of a task before yielding its first.

    Args:
        quarantine: Bad records beyond its limit are not searched for.

    Raises:
        FeedError: `feed` raised, or made more or fewer samples than records where it must not.  The error names the bad
            records (only the first one without a quarantine), or none if no single record is the cause.  With a
            quarantine the records have been written to a file.
    """
    if not quarantine:
        yield from _located(framework, mode, tasks)
        return
    for task in tasks:
        yield from _all_batches(framework, mode, task, quarantine)


def _located(framework: Inference, mode: Mode, tasks: Iterator[TaskRecords]) -> Generator[Batch, None, None]:
    """Yield minibatches like `Framework.batches`; an error of `feed` names the bad record, if there is one."""
    drawn: deque[TaskRecords] = deque()  # the current task, and the tasks prepared ahead

    def kept() -> Iterator[TaskRecords]:
        for task in tasks:
            drawn.append(task)
            yield task

    batches = framework.batches(mode, kept())
    try:
        for batch in batches:
            if batch.end:
                drawn.popleft()
            yield batch
    except FeedError as error:
        for task in tuple(drawn):
            if task.lease == error.lease:
                _name_record(framework, mode, task, error)
        raise
    finally:
        if isinstance(batches, Generator):
            batches.close()


def _name_record(framework: Inference, mode: Mode, task: TaskRecords, error: FeedError) -> None:
    of_none = _error(framework, mode, task, 0, 0)
    if of_none is not None and str(of_none) == str(error):
        return  # the records are not the cause
    found: dict[int, str] = {}
    _bisect(framework, mode, task, 0, len(task.records), 1, found)
    error.bad_records = tuple(_number(task, position) for position in found)
    for position, message in found.items():
        what, arrow, hint = message.partition("\n  → ")
        text = bytes(task.records[position])[:_SHOWN].decode(errors="replace")
        shown = f": {text!r}" if text.isprintable() and "\ufffd" not in text else ""
        error.args = (
            f"{what.removesuffix('.')} (record {_number(task, position)} of {task.shard}{shown}).{arrow}{hint}",
        )


def _all_batches(framework: Inference, mode: Mode, task: TaskRecords, quarantine: Quarantine) -> list[Batch]:
    try:
        batches = list(framework.batches(mode, iter((task,))))
    except FeedError as error:
        if not quarantine.limit:
            raise
        found: dict[int, str] = {}
        _bisect(framework, mode, task, 0, len(task.records), quarantine.limit + 1, found)
        if found and quarantine.directory is not None:
            _write(quarantine.directory, task, found)
        error.bad_records = tuple(_number(task, position) for position in found)
        raise
    surplus = batches[-1].surplus
    if surplus.count and quarantine.is_strict:
        what = f"--strict_feed: {surplus.explained(len(task.records))}"
        raise FeedError(task.lease, 0, f"{what}, and must make one of each. {_NOT_STRICT}")
    return batches


def _number(task: TaskRecords, position: int) -> int:
    return task.numbers[position] if task.numbers else position


def _bisect(
    framework: Inference, mode: Mode, task: TaskRecords, start: int, end: int, limit: int, found: dict[int, str]
) -> None:
    if start == end or len(found) >= limit:
        return
    error = _error(framework, mode, task, start, end)
    if error is None:
        return
    if end - start == 1:
        found[start] = str(error)
        return
    middle = (start + end) // 2
    _bisect(framework, mode, task, start, middle, limit, found)
    _bisect(framework, mode, task, middle, end, limit, found)


def _error(framework: Inference, mode: Mode, task: TaskRecords, start: int, end: int) -> FeedError | None:
    """Return the error of `feed` on a part of the records, if any."""
    part = replace(task, records=task.records[start:end])
    try:
        for _ in framework.batches(mode, iter((part,))):
            pass
    except FeedError as error:
        return error
    return None


def _write(directory: AnyPath, task: TaskRecords, found: Mapping[int, str]) -> None:
    """Write the bad records to a file, one JSON object per line; the same records give the same file."""
    lines = []
    for position, error in found.items():
        record, number = bytes(task.records[position]), _number(task, position)
        line = {"shard": task.shard, "record": number, "error": error, "base64": base64.b64encode(record).decode()}
        lines.append(json.dumps(line, ensure_ascii=False))
    first = _number(task, min(found))
    name = os.path.basename(task.shard).encode()[:_NAME_BYTES].decode(errors="ignore")
    target = directory / f"{name}-{zlib.crc32(task.shard.encode()):08x}-{first}.jsonl"
    try:
        make_directory(directory)
        with writing(target, str(os.getpid())) as file:
            file.write(("\n".join(lines) + "\n").encode(errors="backslashreplace"))  # as JSON escapes them
    except (OSError, StorageError) as error:
        _log.warning("The bad records cannot be written to %s: %s", target, reason(error))
    else:
        _log.warning("Bad records of %s are written to %s", task.shard, target)
