"""The controller and the data services of the original's training scripts, with its arguments.

Such a script has a data set that asks a service for the number of each record, and passes it to a DataLoader.  Here
the controller's loader decides on the records, so the service returns the number of the record being fetched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from elasticdl.api.data import DataShardService, RecordIndexService
from elasticdl.api.pytorch import join_job
from elasticdl.api.pytorch.controller import ElasticController, ElasticLoader, taken_over
from elasticdl.api.pytorch.wiring import TrainingOptions, make_loop
from elasticdl.api.session import ScriptSession
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.errors import DataError, FlagError, JobError

_AVERAGE = 0  # horovod.torch.Average
LOADER_HINT = "Write controller.loader(…) in the place of DataLoader(…): it takes the same arguments."


class AllReduceController(ElasticController):
    """The elastic controller, with the original's attribute `data_shard_service` and a `loader` like DataLoader."""

    def __init__(self, session: ScriptSession, wishes: TrainingOptions, record: CurrentRecord) -> None:
        super().__init__(
            (), lambda controller, dataset, options: make_loop(wishes, session, controller, dataset, options)
        )
        self._session = session
        self._wishes = wishes
        self._record = record
        self._is_asked = False
        self._begin: Callable[[], ElasticLoader] | None = None  # creates the loop and its loader

    @property
    def data_shard_service(self) -> CurrentRecord:
        """The service for the data set: its `fetch_record_index()` returns the number of the record being fetched."""
        self.expect_questions()
        return self._record

    def expect_questions(self) -> None:
        """Note that the data set asks this controller for the number of each record."""
        self._is_asked = True

    def loader(
        self, dataset: Any = None, collate_fn: Callable[..., Any] | None = None, **options: Any
    ) -> ElasticLoader:
        """Return the replacement of a DataLoader, with the same arguments; the controller shuffles.

        Raises:
            DataError: The number of records is unknown, or the batch size differs from the controller's.
            JobError: The controller already has a loader.
        """
        size = self._wishes.batch_size
        if options.get("batch_size", size) != size:
            raise DataError(
                f"The loader's batch_size is {options['batch_size']}, and the controller's {size}.",
                "Give both the same.",
            )
        options = {name: value for name, value in options.items() if name not in ("batch_size", "shuffle")}
        if hasattr(dataset, "collate_fn"):  # a DataLoader
            dataset, collate_fn, options = taken_over(dataset, collate_fn, options)
        if not self._wishes.dataset_size and hasattr(dataset, "__len__") and len(dataset) == sys.maxsize:
            raise DataError(
                f"{type(dataset).__name__} does not say how many records there are.",
                "Give create_elastic_controller the number as dataset_size.",
            )
        if self._begin is not None:
            raise JobError("a controller has one loader", "iterate over the same one in every epoch")
        is_numbered = self._is_asked and not hasattr(dataset, "__iter__")
        given = _Numbered(dataset, self._record) if is_numbered else dataset
        # Delayed: the original's scripts register the model and the optimizer only after this call.
        self._begin = functools.partial(super().loader, given, collate_fn, **options)
        return ElasticLoader(self, dataset)

    def batches(self) -> Iterator[Any]:
        """Return the batches of one epoch, or inside `scope()` of all epochs; see `ElasticLoader`."""
        self._wire_once()
        return super().batches()

    @property
    def num_batches(self) -> int:
        """See `ElasticLoader.__len__`."""
        self._wire_once()
        return super().num_batches

    def _wire_once(self) -> None:
        if self._loop is None and self._begin is not None:
            self._begin()

    def set_broadcast_optimizer(self, optimizer: Any) -> None:
        """Register the optimizer.

        Raises:
            FlagError: The optimizer keeps the global batch, but the job has no --fixed_global_batch, or another one.
        """
        spec = self._session.spec
        is_fixed = getattr(optimizer, "fixed_global_batch_size", False)
        num_batches = getattr(optimizer, "global_batch_num_per_step", None)
        records = (num_batches or spec.num_workers) * (self._wishes.batch_size or spec.minibatch_size)
        is_kept = spec.fixed_global_batch == records if num_batches else spec.fixed_global_batch > 0
        if is_fixed and not self._session.is_alone and not is_kept:
            raise FlagError(
                "DistributedOptimizer(…, fixed_global_batch_size=True) keeps the global batch, which is a flag here.",
                f"Start the job with --fixed_global_batch={records}: the records of a step, for any number of "
                "workers; or leave the argument out.",
            )
        super().set_broadcast_optimizer(optimizer)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Return the context of the training loop; see `ElasticController.scope`.

        Raises:
            JobError: The data set asks this controller for records, but the controller has no loader to fetch them.
        """
        if self._is_asked and self._begin is None:
            raise JobError("The data set asks the controller for records, and its loader is a DataLoader.", LOADER_HINT)
        with super().scope():
            yield


class _Numbered:
    """A data set that stores the number of the record being fetched."""

    def __init__(self, dataset: Any, record: CurrentRecord) -> None:
        self._dataset = dataset
        self._record = record

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        self._record.number = number
        try:
            return self._dataset[number]
        finally:
            self._record.number = None


def elastic_controller(
    batch_size: int = 0,
    num_epochs: int | None = None,
    dataset_size: int = 0,
    shuffle: bool | None = None,
    **keywords: Any,
) -> AllReduceController:
    """Create a controller with the original's arguments; see `elasticdl.api.pytorch.create_elastic_controller`."""
    wishes = _wishes(batch_size, num_epochs, dataset_size, shuffle, **own_arguments(keywords))
    return AllReduceController(join_job(), wishes, CurrentRecord())


def _wishes(
    batch_size: int = 0,
    num_epochs: int | None = None,
    dataset_size: int = 0,
    shuffle: bool | None = None,
    num_minibatches_per_shard: int = 0,
) -> TrainingOptions:
    """Return the options of a script; all others come from the job's flags."""
    return TrainingOptions(batch_size, num_epochs, dataset_size, shuffle, num_minibatches_per_shard, 0, "", None, 0)


def all_reduce_controller(*arguments: Any, data_shard_service: Any = None, master_client: Any = None) -> Any:
    """Create a controller like the original's `PyTorchAllReduceController(master_client, data_shard_service)`.

    The client is not needed.

    Raises:
        JobError: There is no `RecordIndexService` among the arguments.
    """
    service = data_shard_service or (arguments[-1] if arguments else None)
    if not isinstance(service, OriginalRecordIndexService):
        raise JobError(
            "PyTorchAllReduceController is made of a RecordIndexService.",
            "Write create_elastic_controller(batch_size, num_epochs, dataset_size, shuffle) of elasticdl.api.pytorch.",
        )
    service.record, service.session.takes_data = CurrentRecord(), False  # the controller takes the data instead
    made = AllReduceController(join_job(service.session), _wishes(**service.wishes), service.record)
    made.expect_questions()
    return made


def distributed_optimizer(
    optimizer: Any,
    named_parameters: Any = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: int | None = None,
    gradient_predivide_factor: float = 1.0,
    global_batch_num_per_step: int | None = None,
    fixed_global_batch_size: bool = False,
) -> Any:
    """Return the optimizer: the controller averages the gradients itself, for any optimizer.

    Args:
        optimizer: A PyTorch optimizer.
        named_parameters: Ignored.
        compression: Ignored: gradients are sent uncompressed.
        backward_passes_per_step: Must be 1; with `fixed_global_batch_size` ignored, since the job's flag decides.
        op: Horovod's reduction; None: Average, the only one supported.
        gradient_predivide_factor: Ignored: it does not change an average.
        global_batch_num_per_step: Batches per step with `fixed_global_batch_size`; None: the number of workers.
        fixed_global_batch_size: Checked against the job's flag by `AllReduceController.set_broadcast_optimizer`.

    Raises:
        FlagError: The arguments request other gradients than averages over one batch of each worker.
    """
    if op not in (None, _AVERAGE):
        raise FlagError(
            f"DistributedOptimizer(…, op={op!r}) is not supported: gradients are averaged.", "Leave op out."
        )
    if fixed_global_batch_size:
        optimizer.fixed_global_batch_size = True
        optimizer.global_batch_num_per_step = global_batch_num_per_step
    elif backward_passes_per_step != 1:
        raise FlagError(
            f"DistributedOptimizer(…, backward_passes_per_step={backward_passes_per_step}) is not supported: workers "
            "join and leave between two batches.",
            "Start the job with --fixed_global_batch=N, N records for each update, and leave the argument out.",
        )
    return optimizer


class OriginalDataShardService(DataShardService):
    """`DataShardService`, also with the arguments of the original; see `own_arguments`."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **own_arguments(keywords))


class OriginalRecordIndexService(RecordIndexService):
    """`RecordIndexService`, also with the arguments of the original; a controller can be created from it."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        names = ("batch_size", "num_epochs", "dataset_size")
        self.wishes = dict(zip(names, arguments, strict=False)) | own_arguments(keywords)
        self.record: CurrentRecord | None = None  # set by a controller created from this service
        super().__init__(**self.wishes)

    def fetch_record_index(self) -> int:
        return super().fetch_record_index() if self.record is None else self.record.fetch_record_index()


class CurrentRecord:
    """The number of the record being fetched, in the process that fetches it."""

    def __init__(self) -> None:
        self.number: int | None = None

    def fetch_record_index(self) -> int:
        """Return the number of the record being fetched.

        Raises:
            JobError: Another loader than the controller's fetches.
        """
        if self.number is None:
            raise JobError("A DataLoader of the script's own asks the controller for records.", LOADER_HINT)
        return self.number

    def fetch_shard(self) -> None:
        """Raise JobError: only `build_data_shard_service`, for loops without a controller, returns shards."""
        raise JobError(
            "A controller gives no shards to the script.",
            "Make a data set whose item k is record k, and write controller.loader(…) in the place of DataLoader(…).",
        )


def own_arguments(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that have a meaning in this version.

    `shuffle_shards` is dropped because tasks are always permuted, `dataset_name` because a job has one data set.

    Raises:
        DataError: The service is not for training.
    """
    if keywords.get("task_type", pb.TRAINING) != pb.TRAINING:
        raise DataError(
            "A data service with a task_type other than TRAINING is not supported.",
            "Evaluate with controller.on_evaluation (docs/pytorch_script.md), or leave task_type out.",
        )
    dropped = ("task_type", "shuffle_shards", "dataset_name", "master_client")
    return {name: value for name, value in keywords.items() if name not in dropped}
