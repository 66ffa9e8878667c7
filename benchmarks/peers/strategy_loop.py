"""Peer: a `ClusterCoordinator` loop under `tf.distribute.ParameterServerStrategy`, as TensorFlow 2.21 still has it.

    python -m benchmarks.peers.strategy_loop TFRECORD_DIR --batch N --seconds S [--optimizer NAME] [--num_ps N]
        [--num_workers N]

Prints one JSON object with `samples_per_second` of the steady state.  Keras 3 does not run under this strategy, so the
model of benchmarks/zoo/deepfm_clicks.py is written here with `tf.Variable`s.  Updates are TensorFlow's own sparse
operations where the variables are, on the PS, with the gradients of repeated ids summed first: much faster than the
optimizers of Keras 3, which update whole tables.  Adam is lazy, as ours is.  The coordinator keeps several steps
scheduled ahead for each worker.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time

import tensorflow as tf

from benchmarks.peers.cluster import serve, strategy
from benchmarks.peers.deepfm import dataset
from benchmarks.peers.options import parse_options
from benchmarks.zoo.clicks import DIM, FIELDS, HIDDEN, LEARNING_RATE, NUM_IDS, NUMBERS, loss

WARM_UP_STEPS = 40
STEPS_AHEAD = 8
EPSILON = 1e-7
BETA_1, BETA_2 = 0.9, 0.999


class DeepFM(tf.Module):  # type: ignore[misc]
    """The model, its optimizer's slots, and one training step."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.rate = LEARNING_RATE[optimizer]
        self.is_adam = optimizer == "Adam"
        uniform = tf.random.stateless_uniform
        self.factors = tf.Variable(uniform([NUM_IDS, DIM], (1, 0), -0.05, 0.05))
        self.weights = tf.Variable(uniform([NUM_IDS, 1], (2, 0), -0.05, 0.05))
        self.dense: list[tf.Variable] = []
        fan_in = FIELDS * DIM + NUMBERS
        for layer, units in enumerate((*HIDDEN, 1)):
            limit = math.sqrt(6 / (fan_in + units))
            self.dense.append(tf.Variable(uniform([fan_in, units], (3, layer), -limit, limit)))
            self.dense.append(tf.Variable(tf.zeros([units])))
            fan_in = units
        self.all = [self.factors, self.weights, *self.dense]
        initial = [0.0, 0.0] if self.is_adam else [0.1]
        self.slots = [[tf.Variable(tf.fill(variable.shape, value)) for value in initial] for variable in self.all]
        self.powers = [tf.Variable(BETA_1), tf.Variable(BETA_2)]

    def logits(self, factors: tf.Tensor, weights: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
        total = tf.reduce_sum(factors, 1)
        pairs = tf.reduce_sum(tf.square(total) - tf.reduce_sum(tf.square(factors), 1), 1) / 2
        deep = tf.concat([tf.reshape(factors, [-1, FIELDS * DIM]), numbers], 1)
        for kernel, bias in zip(self.dense[:-2:2], self.dense[1:-2:2], strict=True):
            deep = tf.nn.relu(deep @ kernel + bias)
        deep = deep @ self.dense[-2] + self.dense[-1]
        return tf.reduce_sum(weights, [1, 2]) + pairs + deep[:, 0]

    def step(self, features: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
        unique, places = tf.unique(tf.reshape(features["ids"], [-1]))
        places = tf.reshape(places, [-1, FIELDS])
        rows = [tf.gather(table, unique) for table in (self.factors, self.weights)]
        with tf.GradientTape() as tape:
            tape.watch(rows)
            logits = self.logits(tf.gather(rows[0], places), tf.gather(rows[1], places), features["dense"])
            mean = loss(labels, logits)
        gradients = tape.gradient(mean, [*rows, *self.dense])
        for index, (variable, slots) in enumerate(zip(self.all, self.slots, strict=True)):
            gradient = tf.convert_to_tensor(gradients[index])
            ids = unique if index < len(rows) else None
            with tf.device(variable.device):
                if self.is_adam:
                    self._adam(variable, slots, gradient, ids)
                else:
                    self._adagrad(variable, slots[0], gradient, ids)
        if self.is_adam:
            for power, beta in zip(self.powers, (BETA_1, BETA_2), strict=True):
                power.assign(power * beta)
        return mean

    def _adagrad(self, variable: tf.Variable, slot: tf.Variable, gradient: tf.Tensor, ids: tf.Tensor | None) -> None:
        where = {"var": variable.handle, "accum": slot.handle, "lr": self.rate, "epsilon": EPSILON}
        if ids is None:
            tf.raw_ops.ResourceApplyAdagradV2(grad=gradient, **where)
        else:
            tf.raw_ops.ResourceSparseApplyAdagradV2(grad=gradient, indices=ids, **where)

    def _adam(
        self, variable: tf.Variable, slots: list[tf.Variable], gradient: tf.Tensor, ids: tf.Tensor | None
    ) -> None:
        first, second = slots
        if ids is None:
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle, m=first.handle, v=second.handle, beta1_power=self.powers[0],
                beta2_power=self.powers[1], lr=self.rate, beta1=BETA_1, beta2=BETA_2, epsilon=EPSILON, grad=gradient,
            )  # fmt: skip
            return
        new_first = BETA_1 * tf.gather(first, ids) + (1 - BETA_1) * gradient
        new_second = BETA_2 * tf.gather(second, ids) + (1 - BETA_2) * tf.square(gradient)
        first.scatter_update(tf.IndexedSlices(new_first, ids))
        second.scatter_update(tf.IndexedSlices(new_second, ids))
        rate = self.rate * tf.sqrt(1 - self.powers[1]) / (1 - self.powers[0])
        variable.scatter_sub(tf.IndexedSlices(rate * new_first / (tf.sqrt(new_second) + EPSILON), ids))


def main() -> None:
    options = parse_options()
    if options.serve:
        serve(options)
    with strategy(options, "benchmarks.peers.strategy_loop") as pss:
        with pss.scope():
            model = DeepFM(options.optimizer)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(pss)
        data = iter(coordinator.create_per_worker_dataset(lambda: dataset(options.tfrecord, options.batch)))

        @tf.function  # type: ignore[untyped-decorator]
        def step(iterator: tf.data.Iterator) -> tf.Tensor:
            features, labels = next(iterator)
            return pss.run(model.step, args=(features, labels))

        for _ in range(WARM_UP_STEPS):
            coordinator.schedule(step, args=(data,))
        coordinator.join()
        began, steps, ahead, mean = time.perf_counter(), 0, [], 0.0
        while time.perf_counter() - began < options.seconds:
            ahead.append(coordinator.schedule(step, args=(data,)))
            if len(ahead) > STEPS_AHEAD * options.num_workers:
                mean = float(ahead.pop(0).fetch())
            steps += 1
        coordinator.join()
        rate = steps * options.batch / (time.perf_counter() - began)
        print(json.dumps({"samples_per_second": rate, "steps": steps, "loss": mean}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the coordinator's threads wait for servers that are gone


if __name__ == "__main__":
    main()
