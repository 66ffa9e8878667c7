"""WorkerRange: how many workers a job may have, as a user writes it: a number, a range, or auto.

It owns the three forms of the text and the words for what limits a job's growth.  The master's core
decides which number within the range a job has.

The user's request for a running job, checked against the job's limits, is a number, or a range in which the number
follows the gain: data beside the job, which outlives client and master: an annotation of the job's ConfigMap, a file in
the directory of a local job.  Client and master read it by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from elasticdl_client.choices import DistributionStrategy, JobType
from elasticdl_client.errors import FlagError, JobError

if TYPE_CHECKING:
    from elasticdl_client.job_spec import JobSpec
    from elasticdl_client.job_status import JobStatus

AUTO = "auto"
MAX_WORKERS = 100_000
FORMS = "a number such as 4, a range such as 2:16, or auto"
_MAX_TEXT = 40  # of a text that is no number
_RANGE = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?")


class Bottleneck(StrEnum):
    """The reason why another worker adds little to a job's rate."""

    PARAMETER_SERVERS = "parameter servers"
    INPUT = "input"
    GROUP = "group"  # the sum of the gradients of an AllReduce group
    TASKS = "tasks"  # there are fewer than workers
    PROCESSORS = "processors"  # workers compute more slowly beside each other
    ROOM = "room"  # pods wait for a place


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """The least and the greatest number of workers; both are the same where the number is fixed."""

    least: int
    most: int

    @property
    def is_fixed(self) -> bool:
        """The number does not follow the gain."""
        return self.least == self.most

    def nearest(self, num_workers: int) -> int:
        """Return the number in the range that is nearest to another one."""
        return min(max(num_workers, self.least), self.most)

    def __str__(self) -> str:
        return str(self.least) if self.is_fixed else f"{self.least}:{self.most}"


def parse(text: str, least: int = 1) -> WorkerRange:
    """Return the range that a text says.

    Args:
        text: one of `FORMS`.
        least: number of workers of `auto`.

    Raises:
        FlagError: it has none of the forms, or its end is before its beginning.
    """
    text = text.strip()
    if text.lower() == AUTO:
        return WorkerRange(least, MAX_WORKERS)
    found = _RANGE.fullmatch(text)
    first = int(found[1]) if found else 0
    last = int(found[2] or found[1]) if found else 0
    shown = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
    if found is None or max(first, last) > MAX_WORKERS:
        raise FlagError(f"'{shown}' is not a number of workers.", f"Give {FORMS}; at most {MAX_WORKERS}.")
    if last < first:
        raise FlagError(f"'{shown}' is not a range of workers: it ends before it begins.", f"Give {last}:{first}.")
    if found[2] and not first:
        raise FlagError(f"'{shown}' begins with 0 workers, of which no gain can be measured.", f"Give 1:{last}.")
    return WorkerRange(first, last)


def parse_flags(given: Mapping[str, object]) -> dict[str, object]:
    """Return a job's flags with a range in --num_workers written as two numbers, --num_workers and --max_workers.

    Raises:
        FlagError: the range is none, or --max_workers says its end, too.
    """
    flags, value = dict(given), given.get("num_workers")
    if not isinstance(value, str) or not (":" in value or value.strip().lower() == AUTO):
        return flags
    if "max_workers" in flags:
        raise FlagError(
            f"--num_workers={value} says the most workers, and so does --max_workers={flags['max_workers']}.",
            "Leave --max_workers out.",
        )
    least = str(flags.get("min_workers", "")).strip()
    found = parse(value, int(least) if re.fullmatch("[1-9][0-9]{0,4}", least) else 1)
    return flags | {"num_workers": found.least, "max_workers": found.most}


FILE = "num_workers"  # in the directory of a local job


def parse_request(text: str, spec: JobSpec) -> WorkerRange:
    """Return the number of workers, or the range, that a user has written down for a job.

    Raises:
        FlagError: it is none, or one that the job cannot have.
    """
    if spec.distribution_strategy is DistributionStrategy.LOCAL:
        raise FlagError(
            f"Job {spec.job_name} cannot be scaled: the Local strategy has one worker.",
            "Start it with another --distribution_strategy.",
        )
    if spec.need_tf_config:
        raise FlagError(
            f"Job {spec.job_name} cannot be scaled: its TF_CONFIG names all workers from the start.",
            "Start it again with another --num_workers.",
        )
    is_all_reduce = spec.distribution_strategy is DistributionStrategy.ALL_REDUCE and spec.job_type is JobType.TRAIN
    found = parse(text, spec.min_workers if is_all_reduce else 1)
    number = found.least
    if not number and (is_all_reduce or spec.job_command):
        raise FlagError(
            f"The workers of job {spec.job_name} hold its model: with 0 of them it would be lost.", "Give 1 or more."
        )
    if is_all_reduce and number < spec.min_workers:
        raise FlagError(
            f"{number} workers are fewer than --min_workers={spec.min_workers}: training would never continue.",
            f"Give {spec.min_workers} or more.",
        )
    return found


def wanted(text: str, spec: JobSpec, status: JobStatus) -> int:
    """Return how many workers a job is to have now.

    Args:
        text: the user's request; empty: none.
        status: the last one that the master wrote.
    """
    present = status.workers_wanted if status.started_at else spec.num_workers
    try:
        return parse_request(text, spec).nearest(present)
    except FlagError:  # the master has refused it: nothing has changed
        return present


def describe(status: JobStatus) -> str:
    """Return one line about a number of workers that follows the gain; empty while it is fixed."""
    scaling = status.scaling
    if scaling is None:
        return ""
    line = f"{scaling.workers}, {scaling.state}"
    if scaling.gain is not None:
        share = f"{100 * max(0.0, scaling.gain):.0f} % of a worker's rate"
        line += f", another worker adds {share}" if scaling.bottleneck else f", each of the last workers adds {share}"
    return line + (f", bottleneck: {scaling.bottleneck}" if scaling.bottleneck else "")


def check_current(job_name: str, wanted_now: int, current: int | None) -> None:
    """Check the precondition of a change.

    Raises:
        JobError: not `current` workers are wanted now.
    """
    if current is not None and current != wanted_now:
        raise JobError(f"Job {job_name} has {wanted_now} workers, not {current}: it was not scaled.")
