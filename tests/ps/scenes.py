"""A small model, its pushes and pulls, and parameter servers to hold it: for the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from elasticdl.frameworks.framework import ModelReport, Parameters, Table, Variable
from elasticdl.ps.client import PsClient, Pull, Push
from elasticdl.ps.partition import even_buckets
from elasticdl.ps.server.service import PsService, register_service, serve_tensors
from elasticdl.ps.server.state import ServerState
from elasticdl.ps.server.synchronous import UpdateSettings
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.addresses import written
from elasticdl.rpc.servers import serve

TOKEN = "the token of this job"


def config(class_name: str, **options: object) -> str:
    """A Keras config as JSON."""
    return json.dumps({"module": "keras", "class_name": class_name, "config": options})


ADAM = config("Adam", learning_rate=0.01)
UNIFORM = config("RandomUniform", minval=-0.05, maxval=0.05, seed=None)
TABLES = (Table("wide", 1, config("Zeros")), Table("deep", 8, UNIFORM))
LAYOUT = ModelReport(
    variables=(
        Variable("kernel", (7, 5), True),
        Variable("bias", (5,), True),
        Variable("moving_mean", (3,), False),
    ),
    tables=TABLES,
    optimizer=ADAM,
    metrics=(),
)
NUM_TRAINABLE, NUM_NON_TRAINABLE = 40, 3


def initial_parameters() -> Parameters:
    random = np.random.default_rng(3)
    return Parameters(random.standard_normal(NUM_TRAINABLE).astype(np.float32), np.zeros(NUM_NON_TRAINABLE, np.float32))


def make_push(minibatch: int, lease: int = 1, task: int = 0, epoch: int = 0) -> Push:
    """The push of a minibatch: the same in every worker."""
    random = np.random.default_rng([epoch, task, minibatch])
    ids = random.choice(60, 20, replace=False).astype(np.int64) - 30
    return Push(
        lease=lease,
        epoch=epoch,
        task=task,
        minibatch=minibatch,
        gradient=random.standard_normal(NUM_TRAINABLE).astype(np.float32),
        change=random.standard_normal(NUM_NON_TRAINABLE).astype(np.float32),
        row_gradients={t.name: (ids, random.standard_normal((20, t.dim)).astype(np.float32)) for t in TABLES},
    )


def whole_pull(read_only: bool = True) -> Pull:
    """All dense values, and every row that a push of `make_push` may touch."""
    ids = np.arange(-30, 30, dtype=np.int64)
    return Pull(dense=True, ids={table.name: ids for table in TABLES}, read_only=read_only)


@dataclass(frozen=True)
class Cluster:
    """Parameter servers of this process, behind real sockets, and a client of them."""

    services: tuple[PsService, ...]
    partition: pb.Partition
    client: PsClient


@contextmanager
def ps_cluster(
    num_ps: int, initialize: bool = True, updates: UpdateSettings | None = None, host: str = "127.0.0.1"
) -> Iterator[Cluster]:
    services = tuple(PsService(ps_id, ServerState(updates, even_buckets(ps_id, num_ps))) for ps_id in range(num_ps))
    servers = []
    partition = pb.Partition(version=1)
    for service in services:
        service.incarnation = 10 + service.ps_id
        tensors = serve_tensors(service, host, TOKEN, lambda: None)
        register = partial(register_service, service=service, on_damage=lambda: None, tensor_address=tensors.address)
        server, port = serve(register, host, 0, TOKEN, 8)
        servers.append((server, tensors))
        partition.ps.add(ps_id=service.ps_id, address=written(host, port), incarnation=service.incarnation)
    client = PsClient(partition, LAYOUT, TOKEN, timeout_s=20)
    if initialize:
        client.initialize(initial_parameters(), TABLES, ADAM, 7)
    try:
        yield Cluster(services, partition, client)
    finally:
        client.close()
        for server, tensors in servers:
            server.stop(None).wait()
            tensors.close()


def assert_same_model(one: PsClient, other: PsClient) -> None:
    """All values are bit-equal."""
    left, right = one.exchange(None, whole_pull()), other.exchange(None, whole_pull())
    assert left.parameters is not None
    assert right.parameters is not None
    np.testing.assert_array_equal(left.parameters.trainable, right.parameters.trainable)
    np.testing.assert_array_equal(left.parameters.non_trainable, right.parameters.non_trainable)
    for table in TABLES:
        np.testing.assert_array_equal(left.rows[table.name], right.rows[table.name])


def push_all(client: PsClient, minibatches: Iterable[int], lease: int = 1) -> None:
    for n in minibatches:
        client.exchange(make_push(n, lease), None)
