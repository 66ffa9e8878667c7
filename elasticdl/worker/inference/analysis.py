"""Analysing: statistics of the records of each task go into a part, and at the end all parts into the user's file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from elasticdl.analysis.analysis import Analysis
from elasticdl.analysis.cells import Cells, Columns
from elasticdl.analysis.sketch import check_library
from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Batch, FeedError, Inference, Mode, TaskRecords
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.storage.paths import path_of, remove_directory
from elasticdl.worker.activity import Activity, ActivityClock
from elasticdl.worker.factories import Readers
from elasticdl.worker.inference.loop import OnePassLoop
from elasticdl.worker.inference.output_parts import Parts
from elasticdl.worker.input.batches import TaskBatches
from elasticdl.worker.input.quarantine import Quarantine
from elasticdl.worker.input.task_stream import TaskStream
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.strategy import Values
from elasticdl_client.errors import DataError, StorageError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.storage_kinds import AnyPath

_log = logging.getLogger("elasticdl.worker")
_EXTENSION = "sketch"


@dataclass(frozen=True, slots=True)
class TableInput:
    """The model's substitute in an analysis: a task is one minibatch, whose data are the cells of its columns."""

    columns: Columns

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        """See `Framework.batches`.  A record that is not of the table is an error of its lease."""
        for task in tasks:
            try:
                cells: Mapping[str, Cells] = self.columns.cells(task.records)
            except DataError as error:
                raise FeedError(task.lease, 0, str(error)) from error
            yield Batch(task.lease, 0, size=len(task.records), data=cells)
            yield Batch(task.lease, 1, end=True)


class AnalysisWork:
    """See `PassWork`."""

    def __init__(self, link: MasterLink, spec: JobSpec, clock: ActivityClock) -> None:
        self._link = link
        self._spec = spec
        self._clock = clock
        self._parts = Parts(path_of(spec.prediction_outputs), _EXTENSION, link.confirm)

    def run(self, held: HeldLease, values: Values, batches: TaskBatches, check: Callable[[], None]) -> None:
        analysis = Analysis()
        for batch in batches:
            with self._clock.during(Activity.COMPUTE):
                analysis.add(batch.data, batch.size)
        check()
        with self._parts.writing(held) as path:
            path.write_bytes(analysis.dump())
        assert batches.num_minibatches is not None
        self._link.finish(held.id, batches.num_minibatches)

    def end(self, held: HeldLease) -> None:
        """Put the parts together; keep them until the job is over, as another worker may have to repeat this."""
        with self._clock.during(Activity.COMPUTE):
            whole = merged(part.read_bytes() for part in self._parts.finished())
            found = {"data": self._spec.data, **whole.statistics(self._spec.num_buckets, self._spec.vocabulary_size)}
        output = path_of(self._spec.output)
        with self._parts.writing_file(held, output) as path:
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        _log.info("Statistics of %d records and %d columns are in %s", whole.num_records, len(whole.sketches), output)


def merged(parts: Iterable[bytes]) -> Analysis:
    """The analysis of all records, from those of parts of them."""
    whole = Analysis()
    for part in parts:
        whole.merge(Analysis.load(part))
    return whole


def make_analysis_loop(link: MasterLink, readers: Readers, spec: JobSpec, clock: ActivityClock) -> OnePassLoop:
    """The loop of a worker of an analysis.

    Raises:
        DataError: a package is missing, or the data cannot be read.
    """
    check_library()
    metadata = readers.of(pb.PREDICTION).metadata()
    tasks = TaskStream(link, readers.of, lambda held: None, spec.seed, False, clock)
    nothing = Values(None, lambda batch: {})
    return OnePassLoop(
        link,
        tasks,
        cast(Inference, TableInput(columns_of(spec, metadata))),
        lambda held: nothing,
        AnalysisWork(link, spec, clock),
        Quarantine.of(spec),
        lambda: _remove_parts(path_of(spec.prediction_outputs)),
    )


def _remove_parts(directory: AnyPath) -> None:
    """Remove the parts of a job that has ended; another worker may do so, too."""
    try:
        remove_directory(directory)
    except (OSError, StorageError) as error:
        _log.warning("The parts of the analysis are left in %s: %s", directory, error)


def columns_of(spec: JobSpec, metadata: Metadata) -> Columns:
    """Return the columns that the job's flags select."""
    named = spec.data_reader_params_dict().get("column_dtypes", {})
    texts = frozenset(name for name, dtype in named.items() if dtype == "string") if isinstance(named, dict) else ()
    return Columns(metadata, tuple(_listed(spec.columns)), frozenset(_listed(spec.missing_values)), frozenset(texts))


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
