"""The port `Framework`: a worker's requirements of TensorFlow or PyTorch, and nothing else.

Below this port is everything that imports a framework; above it only NumPy.  Dense variables cross it as two flat
float32 vectors, trainable and non-trainable, each variable raveled in C order, in the order of `ModelReport`.
Embedding rows that live on the parameter servers cross it as one array of unique rows per table.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.callback_rules import Rules
from elasticdl.frameworks.devices import DeviceMeter

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Ranges = tuple[tuple[int, int], ...]  # of a flat vector, [start, end), ascending


class Mode(StrEnum):
    """The `mode` argument of the user's `feed`."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    shape: tuple[int, ...]
    trainable: bool


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table on the parameter servers.

    Attributes:
        initializer: Keras config as JSON, ``{"class_name": …, "config": {…}}``.
        input_dim: ids are in [0, input_dim); 0: any int64.
        constraint: Keras config of `embeddings_constraint` as JSON, for touched rows; empty: none.
    """

    name: str
    dim: int
    initializer: str
    input_dim: int = 0
    constraint: str = ""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The definitions of the user's module.

    Attributes:
        optimizer: a Keras config as JSON.
        has_callbacks: `Framework.end_training` has something to do.
        rules: the master's decisions for the user's callbacks.
    """

    variables: tuple[Variable, ...]
    tables: tuple[Table, ...]
    optimizer: str
    metrics: tuple[str, ...]
    has_callbacks: bool = False
    rules: Rules = field(default_factory=Rules)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The dense part of a model: trainable [T] and non-trainable [N], float32."""

    trainable: Floats
    non_trainable: Floats


@dataclass(frozen=True, slots=True)
class TaskRecords:
    """The records of one lease, as the input pipeline takes them.

    Attributes:
        seed: of (job seed, epoch, task): the seed of every shuffle inside this task.
        shard: that they are of.
        numbers: of the records in it; may be empty.
    """

    lease: int
    seed: int
    records: Sequence[bytes]
    shard: str = ""
    numbers: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Surplus:
    """Samples that `feed` has made of a task beyond one a record.

    Attributes:
        count: negative: as many fewer samples than records.
        made_by: the operations of `feed` that make it, for people; empty: not known.
    """

    count: int = 0
    made_by: str = ""

    def explained(self, num_records: int) -> str:
        """Describe the samples of a task with this number of records."""
        why = f" ({self.made_by} in it)" if self.made_by else ""
        return f"feed{why} makes {num_records + self.count} samples of {num_records} records"


NO_SURPLUS = Surplus()


@dataclass(frozen=True, slots=True)
class Batch:
    """The n-th minibatch of a lease; with `end`, no minibatch but the end of the task: it has n of them.

    Attributes:
        size: samples in it (after the user's `filter`).
        surplus: with `end`: of the whole task.
        ids: table name to the ids [n] that the model looks up, as they come: they may repeat; empty without tables.
        data: the framework's own; only the framework looks inside.
    """

    lease: int
    n: int
    end: bool = False
    size: int = 0
    surplus: Surplus = NO_SURPLUS
    ids: Mapping[str, Ids] = field(default_factory=dict)
    data: Any = None


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a minibatch: mean loss with regularisation, gradients, the change of non-trainable variables.

    Attributes:
        row_gradients: table to [n, dim], in the order of Batch.ids; repeated ids are not summed.  A table that the loss
            does not depend on is left out: its rows stay as they are.
        not_finite: describes for the user which of loss and gradients are not finite; empty: none.
        unreached: elements [start, end) of the trainable vector that stay as they are, ascending: a variable that the
            loss does not depend on has no gradient, so it does not decay, either.
    """

    loss: float
    gradient: Floats  # [T]
    change: Floats  # [N]
    row_gradients: Mapping[str, Floats]
    not_finite: str = ""
    unreached: Ranges = ()


class NotFiniteStep(ArithmeticError):
    """Local strategy: the loss or a gradient is not finite, as the text says, and the model has taken the step."""


@dataclass(frozen=True, slots=True)
class Share:
    """AllReduce: a minibatch that this member adds to a step.

    Attributes:
        seed: of (job seed, epoch, task, n): dropout and the like depend on it alone.
        scale: its records / all records of the step.
        is_alone: the step is this minibatch alone and the group this member: nothing is summed.  Then the change of
            non-trainable variables may be in the model before `Framework.apply_gradient`, unless it is not finite.
    """

    batch: Batch
    seed: int
    scale: float
    is_alone: bool = False


ComputeGradient = Callable[[Sequence[Share], Callable[[Any], None]], "LocalGradient"]
"""See `Framework.local_gradient`."""
NUM_TOLD = 3  # numbers at the end of the last buffer of a `LocalGradient`


def _is_done() -> None:
    """No gradient overflows."""


@dataclass(slots=True)
class LocalGradient:
    """AllReduce: a member's part of a step.  Its buffers are summed over all members in place.

    A share that is not finite adds nothing but 1 to the count of those.

    Attributes:
        buffers: float32, one dimension, contiguous, writable; NumPy arrays or objects with `__dlpack__`.  Equal in
            number and length in every process.  The last one ends with the changes of variables that the model itself
            assigns (of all shares, each times its scale), and then `NUM_TOLD` numbers: the sum of the losses (each
            times its scale), the sum of the scales of the finite shares, the number of shares that are not finite.
            Empty: nothing is to be reduced, the one share of the step being alone.
        told: reads those numbers as they are now: of this member before the reduction, of the step after it.
        not_finite: of this member's own shares, by their position: describes for the user what is not finite; complete
            once `told` has been called.
        rescale: `Framework.apply_gradient` multiplies all buffers by it (1 / the sum of the scales, if it is not 1).
        repeat: asked after the reduction, with the same answer in every member: computes the step again instead of
            `Framework.local_gradient`, as its gradient has overflowed; None: it has not.
        run_ahead: for a share that is alone, before `told`: update the model with the learning rate that
            `Framework.apply_gradient` will be given, which must follow, and begin the next step, of the share given.
            `told` takes both back if this one is not finite.  None: the framework gains nothing by it.
    """

    buffers: list[Any]
    told: Callable[[], Floats]
    not_finite: dict[int, str] = field(default_factory=dict)
    rescale: float = 1.0
    repeat: Callable[[], ComputeGradient | None] = _is_done
    run_ahead: Callable[[float | None, Share], None] | None = None


@dataclass(frozen=True, slots=True)
class MetricState:
    """One metric's variables as float64; see the proto message of the same name."""

    name: str
    arrays: tuple[npt.NDArray[np.float64], ...]
    additive: bool = True
    num_states: int = 1


@dataclass(frozen=True, slots=True)
class InitialRow:
    """How the initial row of an id is made, the same in every process.

    Attributes:
        kind: constant (a), uniform (in [a, b)), normal or truncated_normal (mean a, standard deviation b).
        key: values drawn depend on it, the id and the column alone.
    """

    kind: str = "constant"
    key: int = 0
    a: float = 0.0
    b: float = 0.0


@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of one table, for export.  With an `input_dim` all of them, in order of id.

    Attributes:
        chunks: ids [n] and rows [n, dim], `num_rows` ids in all; read once, before the next table.
        initial: the row of any other id.
    """

    name: str
    dim: int
    num_rows: int
    chunks: Iterator[tuple[Ids, Floats]]
    initial: InitialRow = InitialRow()


FEATURES_ALONE = "In mode PREDICTION `feed` returns the features alone, without labels."


class FeedError(Exception):
    """User code raised while a minibatch was made; the cause is ``__cause__``.

    The pipeline is thrown away; `Framework.batches` must be called again for what comes after.

    Attributes:
        bad_records: the records of the lease to blame, by their numbers in the shard, where they were looked for.
        details: the traceback of the user's code; empty: nothing was raised there, or the message says it all.
    """

    def __init__(self, lease: int, n: int, message: str, is_explained: bool = False, frames: str = "") -> None:
        """
        Args:
            is_explained: the message says it all.
            frames: of the user's code, as in a traceback, where the cause has none.
        """
        super().__init__(message)
        self.lease = lease
        self.n = n
        self.bad_records: tuple[int, ...] = ()
        self._is_explained = is_explained
        self._frames = frames

    @property
    def details(self) -> str:
        cause = self.__cause__ if not self._is_explained else None
        if cause is not None and self._frames:
            return f"Traceback (most recent call last):\n{self._frames}{self}\n"
        return "".join(traceback.format_exception(self)) if cause is not None else ""


class LabelError(Exception):
    """The labels of a minibatch are none that the loss takes.

    Attributes:
        sample: the first wrong one, by its place in its task; None: not known, as the user's `feed` made it.
    """

    def __init__(self, message: str, sample: int | None) -> None:
        super().__init__(message)
        self.sample = sample


class Inference(Protocol):
    """Operations on a model that is not trained, and all that a loaded export can do."""

    @property
    def device_meter(self) -> DeviceMeter:
        """The device that the model is on; builds the model if need be."""
        ...

    def report(self) -> ModelReport:
        """Builds the model if need be.

        Raises:
            ModelDefinitionError: something in it is unsupported, by name.
        """
        ...

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        """Minibatches of the tasks in order, each task closed by a `Batch` with `end`.

        `tasks` is advanced from another thread, at most one task ahead of the one being yielded, or one for each
        process that makes minibatches.  The compiled pipeline of a mode is kept for the life of the process.

        Raises:
            FeedError: user code raised, or an endless `feed`.
        """
        ...

    def predict(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> Any:
        """The model's outputs for a minibatch: arrays of [batch.size, …], or tuples and dictionaries of them.

        `parameters` and `rows` as in `Evaluation.update`.
        """
        ...

    def evaluation(self) -> Evaluation:
        """Freshly reset metrics."""
        ...


@runtime_checkable
class TakesSnapshots(Protocol):
    """A framework that can copy its state where the model is, in less time than `Framework.state` takes."""

    def snapshot(self) -> Callable[[], dict[str, npt.NDArray[Any]]]:
        """Return a function that gives the present `Framework.state`, once, in any thread, while training continues."""
        ...


@runtime_checkable
class DescribesSums(Protocol):
    """A framework of which equal names and shapes in `Framework.state` do not say that members sum up the same."""

    def sums(self) -> Sequence[str]:
        """Describe the parts of the buffers of `LocalGradient`, in order."""
        ...


@runtime_checkable
class ShardsOptimizer(Protocol):
    """A framework whose optimizer can keep its state for some of the parameters alone.

    A shard is what the optimizer keeps for one parameter.  Shards go by number, in an order that is the same in every
    process.
    """

    def shard_sizes(self) -> list[int]:
        """Return the elements of each parameter."""
        ...

    def keep_shards(self, numbers: Collection[int]) -> None:
        """Hold these shards alone: drop others, and update no other parameter.  Before the first call: hold none."""
        ...

    def shard(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """Return one shard, named as in `Framework.state`; copies."""
        ...

    def parameter(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """Return the values of the parameter that a shard is of, under any one name; a copy."""
        ...

    def load_shards(self, shards: Mapping[int, Mapping[str, npt.NDArray[Any]]]) -> None:
        """Do the inverse of `shard`, unless it is not kept, and of `parameter`, where that is among the arrays.

        A call takes time for all parameters: load many shards at once.
        """
        ...

    def shards_of(self, state: Mapping[str, npt.NDArray[Any]]) -> dict[int, dict[str, npt.NDArray[Any]]]:
        """Return the shards in a whole `Framework.state`."""
        ...

    def shard_bytes(self) -> int:
        """Return how much memory the shards that are held take."""
        ...

    def shared_state(self) -> dict[str, npt.NDArray[Any]]:
        """Return everything but shards; copies."""
        ...

    def load_shared_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Do the inverse of `shared_state`; shards stay as they are."""
        ...

    def begin_exchange(self, owner_of: Sequence[int], rank: int) -> list[tuple[int, Any]]:
        """Return the buffers in which members send updated parameters to all, and the rank of each sender, in order.

        Args:
            owner_of: the rank that sends each parameter, by number.
            rank: this process's, whose buffers hold its parameters now.
        """
        ...

    def end_exchange(self) -> None:
        """Take the parameters from those buffers: all have come."""
        ...


class KeepsState(Protocol):
    """Local strategy and AllReduce: the model, with its optimizer, is in this process."""

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Local strategy and AllReduce: variables and optimizer slots, by name; copies."""
        ...

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """The inverse of `state`."""
        ...

    def load_weights(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """The model's part of a `state`; there need be no optimizer.

        Raises:
            CheckpointError: it is of another model.
        """
        ...


class TrainsAlone(Protocol):
    """Local strategy: the framework trains its own variables."""

    def train(self, batch: Batch, seed: int, learning_rate: float | None = None) -> float:
        """Local strategy: one step with the user's own optimizer on the framework's own variables; the loss.

        `learning_rate` None: the optimizer's own.

        Raises:
            NotFiniteStep: the loss or a gradient is not finite.
        """
        ...


class TrainsWithServers(Protocol):
    """ParameterServerStrategy: the variables come with each call."""

    def initial(self) -> Parameters:
        """Initial values: a function of (module, seed) alone, the same in every process."""
        ...

    def gradients(self, batch: Batch, parameters: Parameters, rows: Mapping[str, Floats], seed: int) -> Step:
        """Forward and backward at the given values; `rows[table]` is [n, dim] for `batch.ids[table]`.

        `seed` is that of (job seed, epoch, task, n): dropout and the like depend on it alone.
        """
        ...


class TrainsByAllReduce(Protocol):
    """AllReduceStrategy: the gradients of all members are summed in between."""

    @property
    def device(self) -> str:
        """Where the buffers of a `LocalGradient` are: ``cpu``, ``cuda`` or ``cuda:N``."""
        ...

    def local_gradient(self, shares: Sequence[Share], ready: Callable[[Any], None]) -> LocalGradient:
        """AllReduce: gradients at the framework's own variables, each share times its scale, summed.

        Every share starts from the same values of the variables, and leaves them unchanged.

        Args:
            shares: may be empty: then everything is zero, of the same shapes.
            ready: called with every buffer but the last, in order, as soon as it is final; the caller may reduce it
                while the rest is computed.
        """
        ...

    def apply_gradient(self, gradient: LocalGradient, learning_rate: float | None) -> None:
        """AllReduce: after the reduction, the summed changes, and one update with the user's own optimizer.

        `learning_rate` None: the optimizer's own.
        """
        ...


class CallsBack(Protocol):
    """The user's callbacks in the worker; `Rules` are those that the master decides."""

    def begin_training(self) -> None:
        """Calls the user's callbacks before this process computes its first minibatch.

        Raises:
            ModelDefinitionError: one raises.
        """
        ...

    def end_epoch(self, parameters: Parameters | None, epoch: int, logs: Mapping[str, float]) -> str | None:
        """Calls the user's callbacks once an epoch is in the model; `parameters` as for `export`.

        Returns:
            Why training is to end early, if a callback asks for it.
        """
        ...

    def end_evaluation(self, step: int, results: Mapping[str, float]) -> str | None:
        """Calls the user's callbacks with the numbers of an evaluation; returns what `end_epoch` does."""
        ...

    def end_training(self, parameters: Parameters | None, output: str) -> None:
        """Calls the user's callbacks once, after training; `parameters` as for `export`."""
        ...


class Framework(Inference, KeepsState, TrainsAlone, TrainsWithServers, TrainsByAllReduce, CallsBack, Protocol):
    """One instance per worker process, made from a `ModelDefinition` and the job's seed.

    A job calls one of the three `Trains…`, that of its strategy.
    """

    def learning_rate(self, epoch: int, version: int) -> float | None:
        """Return the `LearningRateScheduler`'s rate; None: there is none.

        Args:
            epoch: from 0.
            version: of the model; with --fixed_global_batch the steps of the group, each of that many records.
        """
        ...

    def rate_in_use(self) -> float | None:
        """For people: the learning rate where `learning_rate` was last asked for; None: not known.  From any thread."""
        ...

    def export(
        self, path: str, parameters: Parameters | None, tables: Iterable[TableRows], model_file: bool = True
    ) -> None:
        """Writes a SavedModel to the directory `path`.

        Args:
            parameters: None: the framework's own variables.
            tables: all rows that live elsewhere.
            model_file: write the framework's own file of the model beside it, too, if it has one for such a model.
        """
        ...


class Evaluation(Protocol):
    """The metrics of one EVALUATION task, or of a merged evaluation."""

    def update(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> None:
        """Adds a minibatch.  `parameters` None: the framework's own variables (Local strategy)."""
        ...

    def states(self) -> list[MetricState]: ...

    def results(self, merged: Sequence[MetricState]) -> dict[str, float]:
        """The numbers of merged states; a metric with several values yields ``name_0``, ``name_1`` …"""
        ...
