"""Peer: `tf.distribute.ParameterServerStrategy` with a `ClusterCoordinator` loop, 1 PS and 1 worker as processes.

    python -m benchmarks.peers.parameter_server_strategy TFRECORD_DIR BATCH SECONDS

Prints one JSON object with `samples_per_second` of the steady state.  Keras 3 does not run under this strategy, so the
model of benchmarks/zoo/deepfm_clicks.py is written here with `tf.Variable`s.  Adagrad is applied by TensorFlow's sparse
kernels where the variables are, on the PS, with the gradients of repeated ids summed first: much faster than the
optimizer of Keras 3, which updates whole tables.  The coordinator keeps several steps scheduled ahead.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time

import tensorflow as tf

from benchmarks.peers.keras_fit import WARM_UP_STEPS, dataset
from benchmarks.zoo.deepfm_clicks import DIM, FIELDS, HIDDEN, LEARNING_RATE, NUM_IDS, NUMBERS

STEPS_AHEAD = 8
EPSILON = 1e-7


class DeepFM(tf.Module):  # type: ignore[misc]
    """The model, its Adagrad accumulators, and one training step."""

    def __init__(self) -> None:
        super().__init__()
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
        self.accumulators = [tf.Variable(tf.fill(variable.shape, 0.1)) for variable in self.all]

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
            losses = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(labels, tf.float32), logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, [*rows, *self.dense])
        for index, (variable, accumulator) in enumerate(zip(self.all, self.accumulators, strict=True)):
            gradient = tf.convert_to_tensor(gradients[index])
            where = {"var": variable.handle, "accum": accumulator.handle, "lr": LEARNING_RATE, "epsilon": EPSILON}
            if index < len(rows):
                tf.raw_ops.ResourceSparseApplyAdagradV2(grad=gradient, indices=unique, **where)
            else:
                tf.raw_ops.ResourceApplyAdagradV2(grad=gradient, **where)
        return loss


def _serve(role: str, cluster: dict[str, list[str]]) -> None:
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=role, task_index=0, protocol="grpc", start=True
    )
    server.join()


def _coordinate(cluster: dict[str, list[str]], directory: str, batch: int, seconds: float) -> None:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc", task_type="chief", task_id=0
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = DeepFM()
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    per_worker = iter(coordinator.create_per_worker_dataset(lambda: dataset(directory, batch)))

    @tf.function  # type: ignore[untyped-decorator]
    def step(iterator: tf.data.Iterator) -> tf.Tensor:
        features, labels = next(iterator)
        return strategy.run(model.step, args=(features, labels))

    for _ in range(WARM_UP_STEPS):
        coordinator.schedule(step, args=(per_worker,))
    coordinator.join()
    began, steps, ahead = time.perf_counter(), 0, []
    while time.perf_counter() - began < seconds:
        ahead.append(coordinator.schedule(step, args=(per_worker,)))
        if len(ahead) > STEPS_AHEAD:
            loss = float(ahead.pop(0).fetch())
        steps += 1
    coordinator.join()
    elapsed = time.perf_counter() - began
    print(json.dumps({"samples_per_second": steps * batch / elapsed, "steps": steps, "loss": loss}), flush=True)


def main(directory: str, batch: int, seconds: float) -> None:
    ports = []
    for _ in range(3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    cluster = {role: [f"127.0.0.1:{port}"] for role, port in zip(("chief", "ps", "worker"), ports, strict=True)}
    environment = os.environ | {"GRPC_FAIL_FAST": "use_caller"}
    module = "benchmarks.peers.parameter_server_strategy"
    servers = [
        subprocess.Popen([sys.executable, "-m", module, "--serve", role, json.dumps(cluster)], env=environment)
        for role in ("ps", "worker")
    ]
    try:
        _coordinate(cluster, directory, batch, seconds)
    finally:
        for server in servers:
            server.kill()
            server.wait()


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
        sys.stdout.flush()
        os._exit(0)  # the coordinator's threads wait for servers that are gone
