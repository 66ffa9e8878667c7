"""Data services of the original's training scripts, with its arguments; for any framework."""

from __future__ import annotations

from typing import Any

from elasticdl.api.data import DataShardService, RecordIndexService
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.errors import DataError, JobError

LOADER_HINT = "Write controller.loader(…) in the place of DataLoader(…): it takes the same arguments."


class OriginalDataShardService(DataShardService):
    """`DataShardService`, also with the arguments of the original; see `own_arguments`."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **own_arguments(keywords))


class OriginalRecordIndexService(RecordIndexService):
    """`RecordIndexService`, also with the arguments of the original, and for a controller that is made of it."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        names = ("batch_size", "num_epochs", "dataset_size")
        self.wishes = dict(zip(names, arguments, strict=False)) | own_arguments(keywords)
        self.record: CurrentRecord | None = None  # of the controller that is made of it
        super().__init__(**self.wishes)

    def fetch_record_index(self) -> int:
        return super().fetch_record_index() if self.record is None else self.record.fetch_record_index()


class CurrentRecord:
    """Which record a data set is asked for, in the process that fetches it."""

    def __init__(self) -> None:
        self.number: int | None = None

    def fetch_record_index(self) -> int:
        """Return the number of the record that is being fetched.

        Raises:
            JobError: it is not the controller's loader that fetches.
        """
        if self.number is None:
            raise JobError("A DataLoader of the script's own asks the controller for records.", LOADER_HINT)
        return self.number

    def fetch_shard(self) -> None:
        """Raise: shards are the business of `build_data_shard_service`, for loops without a controller."""
        raise JobError(
            "A controller gives no shards to the script.",
            "Make a data set whose item k is record k, and write controller.loader(…) in the place of DataLoader(…).",
        )


def own_arguments(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that mean something here.

    Tasks are permuted always, so `shuffle_shards` is; a job trains on one set of data, so `dataset_name` names nothing.

    Raises:
        DataError: the service is not one for training.
    """
    if keywords.get("task_type", pb.TRAINING) != pb.TRAINING:
        raise DataError(
            "A data service with a task_type other than TRAINING is not supported.",
            "Evaluate with controller.on_evaluation (docs/pytorch_script.md), or leave task_type out.",
        )
    dropped = ("task_type", "shuffle_shards", "dataset_name", "master_client")
    return {name: value for name, value in keywords.items() if name not in dropped}
