"""A member's part of a synchronous step: compute gradients at the model's variables, update them after the reduction.

Gradients, the changes of variables that the model assigns, how many shares reached each trainable variable, and the
statistics of the step are in one flat buffer.  TensorFlow allocates it for every step and does not read it again, so
the reduction may write to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.frameworks.framework import NUM_TOLD, Floats, LocalGradient, Mode, Share
from elasticdl.frameworks.keras.computation import apply_gradients, build_optimizer
from elasticdl.frameworks.keras.model import BuiltModel, as_int64, check_assigned, flat_tensor
from elasticdl.frameworks.keras.operations import (
    IdOutOfRange,
    IdWatch,
    first_run,
    operations_of_graph,
    warn_of_chance,
)
from elasticdl.frameworks.keras.optimizer import scheduled_at
from elasticdl.frameworks.keras.samples import KerasMinibatch, full_spec, take_apart
from elasticdl.layers.functions import inlined

_FLAWS = ("the loss", "the gradient", "the change of the variables that the model assigns")


class AllReduceStep:
    """The compiled functions of one model's steps."""

    def __init__(
        self, built: BuiltModel, optimizer: Any, minibatch_size: int, jit_compile: bool, fixed_global_batch: bool
    ) -> None:
        """
        Args:
            built: The model.
            optimizer: The user's optimizer.
            minibatch_size: Samples in a full minibatch.
            jit_compile: Try XLA.
            fixed_global_batch: All steps have the same number of records, so a schedule counts steps.
        """
        self._built = built
        self._optimizer = optimizer
        self._scheduled = _scheduled(optimizer)
        self._told_rate = _ToldRate()
        self._fixed_global_batch = fixed_global_batch
        self._minibatch_size = minibatch_size
        self._jit_compile = jit_compile
        self._variables = [*built.trainable, *built.changed]
        self._sizes = [int(np.prod(v.shape, dtype=np.int64)) for v in self._variables]
        self._num_trainable = len(built.trainable)
        self._length = sum(self._sizes) + self._num_trainable + NUM_TOLD
        # A scaled loss may overflow: the optimizer then skips the step and reduces the scale.
        self._checks_gradient = not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._full: _AllReduceGraph | None = None
        self._any: _AllReduceGraph | None = None
        self._applies: dict[tuple[bool, ...], Any] = {}  # by which trainable variables have a gradient

    def scheduled_rate(self, version: int) -> float | None:
        """Return the rate of the schedule inside the user's optimizer at a model version; None: it has no schedule."""
        if self._scheduled is None:
            return None
        step = int(self._scheduled._iterations) if self._fixed_global_batch else version
        return scheduled_at(self._scheduled._learning_rate, step)

    def local_gradient(self, shares: Sequence[Share], spec: Any) -> LocalGradient:
        """See `Framework.local_gradient`; there is only one buffer, so none is ready early.

        Args:
            shares: See `Framework.local_gradient`.
            spec: Spec of a minibatch's element; unused without shares.
        """
        not_finite: dict[int, str] = {}
        parts = []
        for position, share in enumerate(shares):
            part, flaw = self._part(share, spec)
            if flaw:
                not_finite[position] = flaw
            parts.append(part)
        if len(parts) == 1:
            buffer = _Buffer(parts[0])
            return LocalGradient([buffer], lambda: _view(buffer.tensor)[-NUM_TOLD:].copy(), not_finite)
        total = np.zeros(self._length, np.float32)
        for part in parts:
            total += _view(part)
        return LocalGradient([total], lambda: total[-NUM_TOLD:].copy(), not_finite)

    def apply_gradient(self, gradient: LocalGradient, learning_rate: float | None) -> None:
        """See `Framework.apply_gradient`."""
        if self._scheduled is not None:
            rate = self.scheduled_rate(0) if learning_rate is None else learning_rate
            self._told_rate.rate.assign(np.float32(rate))  # see `as_int64`
        elif learning_rate is not None:
            self._optimizer.learning_rate = np.float32(learning_rate)
        if not self._applies:
            build_optimizer(self._optimizer, self._built.trainable)
        buffer = gradient.buffers[0]
        flat = buffer.tensor if isinstance(buffer, _Buffer) else tf.constant(buffer)
        counts = _view(flat)[-self._num_trainable - NUM_TOLD : -NUM_TOLD]
        reached = tuple((counts > 0).tolist())
        if reached not in self._applies:
            signature = [tf.TensorSpec((self._length,)), tf.TensorSpec(())]
            applied = partial(self._applied, reached)
            self._applies[reached] = tf.function(applied, input_signature=signature, autograph=False)
        self._applies[reached](flat, tf.constant(np.float32(gradient.rescale)))

    def _part(self, share: Share, spec: Any) -> tuple[Any, str]:
        """Return the flat vector of a share, and which values are not finite: then only the count is not 0."""
        flat, well = self._run(share, spec)
        if well.all():
            return flat, ""
        words = [name for name, is_finite in zip(_FLAWS, well, strict=True) if not is_finite]
        flaw = f"{', '.join(words)} {'is' if len(words) == 1 else 'are'} not finite"
        nothing = np.zeros(self._length, np.float32)
        nothing[-1] = 1.0
        return tf.constant(nothing) + 0.0, flaw

    def _run(self, share: Share, spec: Any) -> tuple[Any, Any]:
        minibatch: KerasMinibatch = share.batch.data
        if self._jit_compile and share.batch.size == self._minibatch_size:
            if self._full is not None:
                return self._full(minibatch, share)
            full = full_spec(spec, self._minibatch_size)
            if full is not None:
                made: tuple[_AllReduceGraph, tuple[Any, Any]] | None = first_run(
                    lambda: self._graph(full, minibatch.mode, jit_compile=True), lambda graph: graph(minibatch, share)
                )
                if made is not None:
                    self._full, found = made
                    return found
                self._jit_compile = False
        if self._any is None:
            self._any = self._graph(spec, minibatch.mode)
            warn_of_chance(self._any.operations)
        return self._any(minibatch, share)

    def _graph(self, spec: Any, mode: Mode, jit_compile: bool = False) -> _AllReduceGraph:
        return _AllReduceGraph(self._built, self._optimizer, spec, mode, self._checks_gradient, jit_compile)

    def _applied(self, reached: Sequence[bool], flat: Any, rescale: Any) -> None:
        """Update the variables; one without a gradient in any share is unchanged, as in `fit`, and does not decay."""
        parts = tf.split(flat * rescale, [*self._sizes, self._num_trainable + NUM_TOLD])[:-1]
        shaped = [tf.reshape(part, v.shape) for part, v in zip(parts, self._variables, strict=True)]
        gradients = [part if is_reached else None for part, is_reached in zip(shaped, reached, strict=False)]
        for variable, change in zip(self._built.changed, shaped[self._num_trainable :], strict=True):
            variable.assign_add(change)  # before the update, as in `fit`: the variable may be trainable
        with nullcontext() if self._scheduled is None else self._told_rate.standing_in(self._scheduled):
            apply_gradients(self._optimizer, gradients, self._built.trainable)


class _AllReduceGraph:
    """Forward and backward of minibatches of one spec."""

    def __init__(
        self,
        built: BuiltModel,
        optimizer: Any,
        spec: Any,
        mode: Mode,
        checks_gradient: bool,
        jit_compile: bool,
    ) -> None:
        assert built.loss is not None
        self._built = built
        self._loss = built.loss
        self._optimizer = optimizer
        self._spec = spec
        self._mode = mode
        self._checks_gradient = checks_gradient
        self._lookups = IdWatch()
        leaves = tf.nest.flatten(spec, expand_composites=True)
        signature = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]
        signature += [tf.TensorSpec((), tf.int64), tf.TensorSpec(())]
        function = tf.function(
            self._step, input_signature=signature, autograph=False, jit_compile=True if jit_compile else None
        )
        self._function = function.get_concrete_function()
        check_assigned(built, self._function.graph)

    @property
    def operations(self) -> set[str]:
        """The names of its operations."""
        return operations_of_graph(self._function.graph)

    def __call__(self, minibatch: KerasMinibatch, share: Share) -> tuple[Any, Any]:
        """Return the flat vector, and which of `_FLAWS` are finite.

        Raises:
            IdOutOfRange: An embedding layer has no row for an id.
        """
        seed = tf.constant(as_int64(share.seed), tf.int64)
        flat, well = self._function(*minibatch.leaves, seed, tf.constant(np.float32(share.scale)))
        told = _view(well)
        for bound, in_range in zip(self._lookups.bounds, told[len(_FLAWS) :], strict=True):
            if not in_range:
                raise IdOutOfRange(bound)
        return flat, told[: len(_FLAWS)]

    def _step(self, *flat: Any) -> tuple[Any, Any]:
        built, (*leaves, seed, scale) = self._built, flat
        examples = take_apart(self._mode, tf.nest.pack_sequence_as(self._spec, leaves, expand_composites=True))
        before = [tf.identity(v.value) for v in built.changed]
        start = flat_tensor(built.changed)
        built.seeds.assign(seed)
        self._lookups = lookups = IdWatch()
        with tf.GradientTape() as tape, lookups.watched(), inlined():
            loss = self._loss(examples)
            scaled = self._optimizer.scale_loss(loss)
        sources = [v.value for v in built.trainable]
        found = tape.gradient(scaled, sources)
        reached = tf.constant([float(part is not None) for part in found], tf.float32)
        given = [tf.zeros_like(own) if part is None else part for part, own in zip(found, sources, strict=True)]
        parts = [tf.reshape(tf.convert_to_tensor(part), [-1]) for part in given]
        change = flat_tensor(built.changed) - start
        for variable, value in zip(built.changed, before, strict=True):
            variable.assign(value)
        gradient = tf.concat(parts, 0) if parts else tf.zeros([0])
        checked = [loss, gradient if self._checks_gradient else loss, change]
        well = tf.stack([*(tf.reduce_all(tf.math.is_finite(part)) for part in checked), *lookups.in_range()])
        told = tf.stack([loss * scale, scale, tf.zeros(())])
        return tf.concat([gradient * scale, change * scale, reached, told], 0), tf.cast(well, tf.float32)


class _ToldRate(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """Replaces the user's schedule in a traced update: steps of a group that changes are no measure of progress."""

    def __init__(self) -> None:
        self.rate = tf.Variable(0.0, trainable=False, dtype=tf.float32)

    def __call__(self, step: Any) -> Any:
        return self.rate

    @contextmanager
    def standing_in(self, optimizer: Any) -> Iterator[None]:
        """Return a context in which an optimizer has this rate; afterwards its own schedule is restored."""
        own = optimizer._learning_rate
        optimizer._learning_rate = self
        try:
            yield
        finally:
            optimizer._learning_rate = own


def _scheduled(optimizer: Any) -> Any:
    """Return the optimizer with a schedule, possibly inside one that scales the loss; None: there is no schedule."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    has_schedule = isinstance(inner._learning_rate, keras.optimizers.schedules.LearningRateSchedule)
    return inner if has_schedule else None


class _Buffer:
    """A tensor as others may write into it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor if "GPU" not in tensor.device else tensor.cpu()

    def __dlpack__(self, **options: Any) -> Any:
        return tf.experimental.dlpack.to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _view(tensor: Any) -> Floats:
    """Return the values of a tensor without copying them."""
    return np.asarray(memoryview(tensor))
