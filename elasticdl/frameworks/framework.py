"""The port `Framework`: everything that a worker needs from TensorFlow or PyTorch, and nothing else.

Only code below this port imports a framework; code above it uses NumPy.  Dense variables cross it as two flat
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
Ranges = tuple[tuple[int, int], ...]  # ranges [start, end) of a flat vector, ascending


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
        input_dim: Ids are in [0, input_dim); 0: any int64.
        constraint: Keras config of `embeddings_constraint` as JSON, applied to updated rows; empty: none.
    """

    name: str
    dim: int
    initializer: str
    input_dim: int = 0
    constraint: str = ""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What the user's module defines.

    Attributes:
        optimizer: Keras config as JSON.
        has_callbacks: `Framework.end_training` has something to do.
        rules: What the master decides for the user's callbacks.
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
        seed: Derived from (job seed, epoch, task): the seed of every shuffle inside this task.
        shard: The shard of the records.
        numbers: Indices of the records in the shard; may be empty.
    """

    lease: int
    seed: int
    records: Sequence[bytes]
    shard: str = ""
    numbers: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Surplus:
    """The samples that `feed` made of a task beyond one per record.

    Attributes:
        count: Negative: fewer samples than records.
        made_by: The operations in `feed` that cause it, for people; empty: unknown.
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
    """The n-th minibatch of a lease; with `end`, the end marker of a task that has n minibatches.

    Attributes:
        size: Number of samples (after the user's `filter`).
        surplus: With `end`: the surplus of the whole task.
        ids: Maps each table to the ids [n] that the model looks up, in order, with repetitions; empty without tables.
        data: The framework's own representation; only the framework reads it.
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
        row_gradients: Maps each table to [n, dim], in the order of Batch.ids; repeated ids are not summed.  A table
            that the loss does not depend on is absent: its rows stay unchanged.
        not_finite: Describes for the user which of loss and gradients are not finite; empty: all are finite.
        unreached: Ranges [start, end) of the trainable vector that stay unchanged, ascending: a variable that the
            loss does not depend on has no gradient and therefore no weight decay.
    """

    loss: float
    gradient: Floats  # [T]
    change: Floats  # [N]
    row_gradients: Mapping[str, Floats]
    not_finite: str = ""
    unreached: Ranges = ()


class NotFiniteStep(ArithmeticError):
    """Local strategy: the loss or a gradient is not finite (see the message); the model has been updated with it."""


@dataclass(frozen=True, slots=True)
class Share:
    """AllReduce: a minibatch that this member contributes to a step.

    Attributes:
        seed: Derived from (job seed, epoch, task, n); dropout and the like depend on it alone.
        scale: Its records / all records of the step.
        is_alone: The step has only this minibatch and the group only this member, so nothing is summed.  The change of
            non-trainable variables may then be in the model before `Framework.apply_gradient`, unless it is not finite.
    """

    batch: Batch
    seed: int
    scale: float
    is_alone: bool = False


ComputeGradient = Callable[[Sequence[Share], Callable[[Any], None]], "LocalGradient"]
"""See `Framework.local_gradient`."""
NUM_TOLD = 3  # statistics at the end of the last buffer of a `LocalGradient`


def _is_done() -> None:
    """Do nothing."""


@dataclass(slots=True)
class LocalGradient:
    """AllReduce: a member's part of a step.  Its buffers are summed over all members in place.

    A share that is not finite adds only 1 to the number of such shares.

    Attributes:
        buffers: float32, one dimension, contiguous, writable; NumPy arrays or objects with `__dlpack__`.  Number and
            lengths are the same in every process.  The last one ends with the changes of variables that the model
            itself assigns (of all shares, each times its scale), and then `NUM_TOLD` statistics: the sum of the losses
            (each times its scale), the sum of the scales of the finite shares, the number of shares that are not
            finite.  Empty: nothing has to be reduced, because the step has a single share (see `Share.is_alone`).
        told: Returns the current statistics: of this member before the reduction, of the step after it.
        not_finite: Maps the position of each own share that is not finite to a description for the user; complete
            after the first call of `told`.
        rescale: `Framework.apply_gradient` multiplies all buffers by it (1 / the sum of the scales, if it is not 1).
        repeat: Call it after the reduction.  Returns the gradient of the same step, computed again, if this one
            overflowed, else None; the answer is the same in every member.
        run_ahead: For a share that is alone, called before `told`: update the model with the learning rate that will be
            passed to `Framework.apply_gradient`, and start the next step with the given share.  `told` reverts both if
            this share is not finite.  None: the framework gains nothing by it.
    """

    buffers: list[Any]
    told: Callable[[], Floats]
    not_finite: dict[int, str] = field(default_factory=dict)
    rescale: float = 1.0
    repeat: Callable[[], ComputeGradient | None] = _is_done
    run_ahead: Callable[[float | None, Share], None] | None = None


@dataclass(frozen=True, slots=True)
class MetricState:
    """The variables of one metric as float64; see the proto message of the same name."""

    name: str
    arrays: tuple[npt.NDArray[np.float64], ...]
    additive: bool = True
    num_states: int = 1


@dataclass(frozen=True, slots=True)
class InitialRow:
    """How to make the initial row of an id; the result is the same in every process.

    Attributes:
        kind: constant (a), uniform (in [a, b)), normal or truncated_normal (mean a, standard deviation b).
        key: Random seed; values depend only on it, the id and the column.
    """

    kind: str = "constant"
    key: int = 0
    a: float = 0.0
    b: float = 0.0


@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of one table, for export; all rows, in order of id, if the table has an `input_dim`.

    Attributes:
        chunks: Ids [n] and rows [n, dim], `num_rows` ids in all; can be read once, before the next table.
        initial: The row of any other id.
    """

    name: str
    dim: int
    num_rows: int
    chunks: Iterator[tuple[Ids, Floats]]
    initial: InitialRow = InitialRow()


FEATURES_ALONE = "In mode PREDICTION `feed` returns the features alone, without labels."


class FeedError(Exception):
    """User code raised while a minibatch was made; ``__cause__`` is its exception.

    The pipeline cannot be used again: call `Framework.batches` for the remaining tasks.

    Attributes:
        bad_records: The records of the lease that cause the error, as numbers in the shard, if they were searched for.
        details: The traceback of the user's code; empty: no user code raised, or the message is complete without it.
    """

    def __init__(self, lease: int, n: int, message: str, is_explained: bool = False, frames: str = "") -> None:
        """
        Args:
            is_explained: The message is complete without a traceback.
            frames: Traceback of the user's code, for a cause without its own.
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
    """The labels of a minibatch are not accepted by the loss.

    Attributes:
        sample: Index of the first wrong sample in its task; None: unknown, since the user's `feed` made the samples.
    """

    def __init__(self, message: str, sample: int | None) -> None:
        super().__init__(message)
        self.sample = sample


class Inference(Protocol):
    """Operations that need no training; a loaded export supports only these."""

    @property
    def device_meter(self) -> DeviceMeter:
        """The meter of the model's device; builds the model if necessary."""
        ...

    def report(self) -> ModelReport:
        """Return what the user's module defines; builds the model if necessary.

        Raises:
            ModelDefinitionError: The model uses something unsupported; the message names it.
        """
        ...

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        """Yield the minibatches of the tasks in order, and after each task a `Batch` with `end`.

        `tasks` is advanced in another thread, ahead of the yielded task by at most one task, or by one per process
        that makes minibatches.  The compiled pipeline of a mode is kept until the process ends.

        Raises:
            FeedError: User code raised, or `feed` is endless.
        """
        ...

    def predict(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> Any:
        """Return the model's outputs for a minibatch: arrays [batch.size, …], or tuples and dictionaries of them.

        `parameters` and `rows` as in `Evaluation.update`.
        """
        ...

    def evaluation(self) -> Evaluation:
        """Return a new evaluation with reset metrics."""
        ...


@runtime_checkable
class TakesSnapshots(Protocol):
    """A framework that can copy its state on the model's device, faster than `Framework.state`."""

    def snapshot(self) -> Callable[[], dict[str, npt.NDArray[Any]]]:
        """Copy the state on the device; the returned function converts the copy to a `Framework.state`.

        Call that function once, in any thread, while training continues.
        """
        ...


@runtime_checkable
class DescribesSums(Protocol):
    """A framework with sums that can differ although names and shapes in `Framework.state` are equal."""

    def sums(self) -> Sequence[str]:
        """Describe the parts of the buffers of `LocalGradient`, in order."""
        ...


@runtime_checkable
class ShardsOptimizer(Protocol):
    """A framework whose optimizer can keep the state of a subset of the parameters.

    A shard is the optimizer's state of one parameter.  Shards are numbered, in the same order in every process.
    """

    def shard_sizes(self) -> list[int]:
        """Return the number of elements of each parameter."""
        ...

    def keep_shards(self, numbers: Collection[int]) -> None:
        """Keep only these shards: drop the others, and update only their parameters.  Initially there are none."""
        ...

    def shard(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """Return a copy of one shard, with the names of `Framework.state`."""
        ...

    def parameter(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """Return a copy of the values of a shard's parameter, under an arbitrary name."""
        ...

    def load_shards(self, shards: Mapping[int, Mapping[str, npt.NDArray[Any]]]) -> None:
        """Load arrays returned by `shard` (ignored unless the shard is kept) and by `parameter` (optional).

        A call takes time for all parameters: load many shards at once.
        """
        ...

    def shards_of(self, state: Mapping[str, npt.NDArray[Any]]) -> dict[int, dict[str, npt.NDArray[Any]]]:
        """Return the shards of a complete `Framework.state`."""
        ...

    def shard_bytes(self) -> int:
        """Return the memory of the shards that this process keeps, in bytes."""
        ...

    def shared_state(self) -> dict[str, npt.NDArray[Any]]:
        """Return a copy of the state without shards."""
        ...

    def load_shared_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Load a state returned by `shared_state`; shards stay unchanged."""
        ...

    def begin_exchange(self, owner_of: Sequence[int], rank: int) -> list[tuple[int, Any]]:
        """Return the buffers that broadcast updated parameters, each with the rank of its sender, in order.

        Args:
            owner_of: Maps the number of each parameter to the rank that sends it.
            rank: The rank of this process; its buffers already hold its parameters.
        """
        ...

    def end_exchange(self) -> None:
        """Copy the parameters from those buffers, after all of them have been received."""
        ...


class KeepsState(Protocol):
    """Local strategy and AllReduce: the model and its optimizer are in this process."""

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the variables and optimizer slots, by name."""
        ...

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Load a state returned by `state`."""
        ...

    def load_weights(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Load only the model's part of a `state`; no optimizer is required.

        Raises:
            CheckpointError: The state belongs to another model.
        """
        ...


class TrainsAlone(Protocol):
    """Local strategy: the framework trains its own variables."""

    def train(self, batch: Batch, seed: int, learning_rate: float | None = None) -> float:
        """Take one step with the user's own optimizer on the framework's own variables, and return the loss.

        `learning_rate` None: the optimizer's own.

        Raises:
            NotFiniteStep: The loss or a gradient is not finite.
        """
        ...


class TrainsWithServers(Protocol):
    """ParameterServerStrategy: each call is given the variables."""

    def initial(self) -> Parameters:
        """Return the initial values: they depend only on (module, seed), so they are the same in every process."""
        ...

    def gradients(self, batch: Batch, parameters: Parameters, rows: Mapping[str, Floats], seed: int) -> Step:
        """Compute forward and backward at the given values; `rows[table]` is [n, dim] for `batch.ids[table]`.

        `seed` is derived from (job seed, epoch, task, n); dropout and the like depend on it alone.
        """
        ...


class TrainsByAllReduce(Protocol):
    """AllReduceStrategy: the gradients of all members are summed between the two calls of a step."""

    @property
    def device(self) -> str:
        """The device of the buffers of a `LocalGradient`: ``cpu``, ``cuda`` or ``cuda:N``."""
        ...

    def local_gradient(self, shares: Sequence[Share], ready: Callable[[Any], None]) -> LocalGradient:
        """Compute gradients at the framework's own variables, and sum them over the shares, each times its scale.

        Every share starts from the same values of the variables and leaves them unchanged.

        Args:
            shares: May be empty: then all buffers are zero, with the same shapes.
            ready: Called with every buffer but the last, in order, as soon as it is final; the caller may reduce it
                while the rest is computed.
        """
        ...

    def apply_gradient(self, gradient: LocalGradient, learning_rate: float | None) -> None:
        """Apply the reduced gradient: the summed changes, and one update with the user's own optimizer.

        `learning_rate` None: the optimizer's own.
        """
        ...


class CallsBack(Protocol):
    """Calls of the user's callbacks in the worker; `Rules` are the ones that the master decides."""

    def begin_training(self) -> None:
        """Call the user's callbacks before this process computes its first minibatch.

        Raises:
            ModelDefinitionError: A callback raises.
        """
        ...

    def end_epoch(self, parameters: Parameters | None, epoch: int, logs: Mapping[str, float]) -> str | None:
        """Call the user's callbacks after all minibatches of an epoch are in the model; `parameters` as for `export`.

        Returns:
            The reason to end training early, if a callback asks for it.
        """
        ...

    def end_evaluation(self, step: int, results: Mapping[str, float]) -> str | None:
        """Call the user's callbacks with the results of an evaluation; returns the same as `end_epoch`."""
        ...

    def end_training(self, parameters: Parameters | None, output: str) -> None:
        """Call the user's callbacks once, after training; `parameters` as for `export`."""
        ...


class Framework(Inference, KeepsState, TrainsAlone, TrainsWithServers, TrainsByAllReduce, CallsBack, Protocol):
    """The complete port: one instance per worker process, made from a `ModelDefinition` and the job's seed.

    A job calls only the `Trains…` protocol of its strategy.
    """

    def learning_rate(self, epoch: int, version: int) -> float | None:
        """Return the rate of the `LearningRateScheduler`; None: there is none.

        Args:
            epoch: Counted from 0.
            version: Model version; with --fixed_global_batch the number of steps of the group.
        """
        ...

    def rate_in_use(self) -> float | None:
        """Return the rate at the last call of `learning_rate`, for people; None: unknown.  Thread-safe."""
        ...

    def export(
        self, path: str, parameters: Parameters | None, tables: Iterable[TableRows], model_file: bool = True
    ) -> None:
        """Write a SavedModel to the directory `path`.

        Args:
            parameters: None: the framework's own variables.
            tables: All rows on the parameter servers.
            model_file: Also write the framework's own model file next to it, if it has one for such a model.
        """
        ...


class Evaluation(Protocol):
    """The metrics of one EVALUATION task, or of a merged evaluation."""

    def update(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> None:
        """Add a minibatch.  `parameters` None: the framework's own variables (Local strategy)."""
        ...

    def states(self) -> list[MetricState]: ...

    def results(self, merged: Sequence[MetricState]) -> dict[str, float]:
        """Return the results of merged states; a metric with several values yields ``name_0``, ``name_1`` …"""
        ...
