"""The data of a script: files that ElasticDL reads, or the numbers of records that the script holds itself.

All scripts of a job train on the same data, in minibatches of the same size: the first report decides.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from elasticdl.api.session import tasks_of
from elasticdl.data.factory import create_reader, open_source
from elasticdl.data.reader import Metadata, Reader
from elasticdl.protocol import Shard
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.master_link import MasterLink
from elasticdl_client.errors import DataError, JobError
from elasticdl_client.job_spec import JobSpec

_ASK_S = 0.2
_log = logging.getLogger("elasticdl.api")


class _Numbers:
    """The `Reader` for data that the script holds: a record is its number."""

    def shards(self) -> list[Shard]:
        return []

    def read(self, shard: Shard) -> Any:
        return range(shard.start, shard.end)

    def metadata(self) -> Metadata:
        return Metadata()


class ScriptSource:
    """The data of this script.

    Attributes:
        reader: Reads records, or their numbers.
        shards: The shards, if this script defines the data.
    """

    def __init__(
        self,
        origin: str,
        dataset_size: int,
        reader_params: dict[str, object] | None,
        spec: JobSpec,
        is_our_own: bool,
    ) -> None:
        """
        Args:
            origin: Files to read.
            dataset_size: Number of records that the script holds itself.
            reader_params: None: those of the job.
            is_our_own: This script defines the data.

        Raises:
            DataError: There are no data, or not the requested ones.
        """
        if dataset_size < 0:
            raise DataError(f"dataset_size is {dataset_size}.", "Give the number of records.")
        if not dataset_size and not origin:
            raise DataError(
                "The script does not say what to train on.",
                "Give dataset_size=… or training_data=…, or start the job with --training_data.",
            )
        self.reader: Reader = _Numbers() if dataset_size else open_source(spec, origin, reader_params, is_raw=True)
        self.shards: list[Shard] = []
        if is_our_own:
            self.shards = [Shard("", 0, dataset_size)] if dataset_size else self.reader.shards()

    @classmethod
    def none(cls) -> ScriptSource:
        """Return a source without data, for a pod that takes none."""
        return cls("", 1, None, JobSpec(), is_our_own=False)

    @property
    def has_records(self) -> bool:
        """Whether minibatches contain their records."""
        return not isinstance(self.reader, _Numbers)

    def records(self, shard: str, indices: Sequence[int], identity: str) -> list[bytes]:
        """Return records of a shard by number; none if the script holds the data.

        Args:
            identity: Identity of the shard; see `Shard`.

        Raises:
            DataError: The records cannot be read.
        """
        if not self.has_records or not indices:
            return []
        first = min(indices)
        records = self.reader.read(Shard(shard, first, max(indices) + 1, identity))
        return [records[index - first] for index in indices]

    def plan_alone(self, wanted: pb.Plan) -> pb.Plan:
        """Return the plan of a process without a master."""
        wanted.num_records = sum(len(shard) for shard in self.shards)
        wanted.num_minibatches = sum(-(-len(task) // wanted.minibatch_size) for task in tasks_of(self.shards, wanted))
        return wanted

    def agree(self, link: MasterLink, wanted: pb.Plan) -> pb.Plan:
        """Report the plan to the master, and wait for the plan in force.

        Raises:
            DataError: This script reported another number of records than the first one.
            JobError: The master cannot be reached.
        """
        shards = [pb.ShardMessage(name=s.name, start=s.start, end=s.end, identity=s.identity) for s in self.shards]
        report = pb.ModelReport(plan=wanted, has_training_shards=bool(shards), training_shards=shards)
        ack = link.report_model(report)
        if not ack.accepted:
            raise JobError(f"the master rejected the report of the data: {ack.reason}")
        pause = threading.Event()
        while not (reply := link.register()).HasField("plan"):
            pause.wait(_ASK_S)
        self._compare(wanted, reply.plan)
        return reply.plan

    def _compare(self, wanted: pb.Plan, found: pb.Plan) -> None:
        """Compare this script's plan with the one in force, which is the first reported; raise if the data differ."""
        size = sum(len(shard) for shard in self.shards)
        if size and found.num_records != size:
            raise DataError(
                f"This script says that there are {size} records, the first one of the job said {found.num_records}.",
                "All workers of a job must train on the same data.",
            )
        if wanted.minibatch_size != found.minibatch_size:
            text = "Minibatches have %d records, as the first script of the job said, not %d"
            _log.warning(text, found.minibatch_size, wanted.minibatch_size)


def read_records(
    origin: str, data_reader_params: dict[str, object] | None = None, columns: Sequence[str] = ()
) -> list[bytes]:
    """Return all records of a source, without the ledger: for validation data that fit into memory.

    Args:
        origin: Files, a table or several of them, in the form of --training_data.
        data_reader_params: Parameters of the reader.
        columns: Columns to read; empty: all.

    Raises:
        DataError: The records cannot be read.
    """
    reader = create_reader(origin, data_reader_params, columns=columns, is_raw=True)
    return [record for shard in reader.shards() for record in reader.read(shard)]
