"""Analysis: statistics of each task's records go to a part; at the end, all parts are merged into the user's file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from elasticdl.activities import Activity
from elasticdl.analysis.analysis import Analysis, check_library
from elasticdl.analysis.cells import Cells, Columns
from elasticdl.data.reader import Metadata, Reader
from elasticdl.frameworks.framework import Batch, FeedError, Inference, Mode, TaskRecords
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.storage.paths import path_of
from elasticdl.worker.inference.output_parts import Parts
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.tasks import HeldLease, TaskBatches
from elasticdl_client.errors import DataError, StorageError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")
_EXTENSION = "sketch"


@dataclass(frozen=True, slots=True)
class TableInput:
    """Takes the place of a model in an analysis: a task is one minibatch, whose data are the cells of its columns."""

    columns: Columns

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        """See `Framework.batches`.  A record that does not fit the table is an error of its lease."""
        for task in tasks:
            try:
                cells: Mapping[str, Cells] = self.columns.cells(task.records)
            except DataError as error:
                raise FeedError(task.lease, 0, str(error)) from error
            yield Batch(task.lease, 0, size=len(task.records), data=cells)
            yield Batch(task.lease, 1, end=True)


class AnalysisWork:
    """The `TaskWork` of an analyze job."""

    def __init__(self, spec: JobSpec, failures: TaskFailures, table: TableInput) -> None:
        self.model = cast(Inference, table)
        self.failures = failures
        self._link, self._clock = failures.link, failures.clock
        self._spec = spec
        self._parts = Parts(path_of(spec.prediction_outputs), _EXTENSION, failures.link.confirm)
        self._has_ended_job = False

    @classmethod
    def of(cls, spec: JobSpec, failures: TaskFailures, reader: Callable[[pb.TaskType], Reader]) -> AnalysisWork:
        """Return the work of a job.

        Args:
            reader: See `Readers.of`.

        Raises:
            DataError: a package is missing, or the data cannot be read.
        """
        check_library()
        return cls(spec, failures, TableInput(columns_of(spec, reader(pb.PREDICTION).metadata())))

    def run(self, held: HeldLease, batches: TaskBatches) -> None:
        analysis = Analysis()
        for batch in batches:
            with self._clock.during(Activity.COMPUTE):
                analysis.add(batch.data, batch.size)
        held.check_read()
        with self._parts.writing(held) as path:
            path.write_bytes(analysis.dump())
        assert batches.num_minibatches is not None
        self._link.finish(held.id, batches.num_minibatches)
        self._link.leases.remove(held.id)

    def alone(self, held: HeldLease) -> None:
        self.end(held)
        self._link.finish(held.id, 0)
        self._link.leases.remove(held.id)

    def end(self, held: HeldLease) -> None:
        """Merge the parts into the result; keep them until the job is over, another worker may repeat this.

        Raises:
            DataError: some parts belong to another job.
        """
        with self._clock.during(Activity.COMPUTE):
            whole = merged(self._contents(held))
            if whole.num_records > held.lease.shard.end:
                raise DataError(
                    f"The parts in {self._spec.prediction_outputs} are of {whole.num_records} records, those of this "
                    f"job are of {held.lease.shard.end}: another analysis has left the others.",
                    "Delete them, and start the job again, or with another --output.",
                )
            found = {"data": self._spec.data, **whole.statistics(self._spec.num_buckets, self._spec.vocabulary_size)}
        output = path_of(self._spec.output)
        with self._parts.writing_file(held, output) as path:
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        self._has_ended_job = True
        _log.info("Statistics of %d records and %d columns are in %s", whole.num_records, len(whole.sketches), output)

    def _contents(self, held: HeldLease) -> Iterator[bytes]:
        """Yield the parts; their number is reported as the minibatch, so the master sees progress."""
        for held.minibatch, part in enumerate(self._parts.contents()):
            yield part

    def close(self) -> None:
        """Remove the parts of the ended job, if this worker has merged them."""
        try:
            if self._has_ended_job:
                self._parts.remove()
        except (OSError, StorageError) as error:
            _log.warning("The parts of the analysis are left in %s: %s", self._spec.prediction_outputs, error)


def merged(parts: Iterable[bytes]) -> Analysis:
    """Return the analysis of all records, from the analyses of parts."""
    whole = Analysis()
    for part in parts:
        whole.merge(Analysis.load(part))
    return whole


def columns_of(spec: JobSpec, metadata: Metadata) -> Columns:
    """Return the columns that the job's flags select."""
    named = spec.data_reader_params_dict().get("column_dtypes", {})
    texts = frozenset(name for name, dtype in named.items() if dtype == "string") if isinstance(named, dict) else ()
    return Columns(metadata, tuple(_listed(spec.columns)), frozenset(_listed(spec.missing_values)), frozenset(texts))


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
