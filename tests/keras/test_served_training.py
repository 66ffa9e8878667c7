"""Models trained on real parameter servers, beside the same models trained by Keras alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest

from elasticdl.frameworks.framework import Batch, Floats, Parameters
from elasticdl.frameworks.keras.model import flat_values
from elasticdl.model_def import load
from elasticdl.ps.client import PsClient, Pull, Push
from elasticdl_client.errors import ModelDefinitionError
from tests.ps.scenes import TOKEN, ps_cluster

RANDOM = np.random.default_rng(6)
NUMBERS = RANDOM.normal(size=(24, 4)).astype("f4")
LABELS = RANDOM.integers(0, 3, 24).astype("f4")
ROWS = np.concatenate([NUMBERS, LABELS[:, None]], axis=1)


@contextmanager
def served(tested: Any, num_ps: int) -> Iterator[PsClient]:
    """Parameter servers that hold the initial values of a framework's model."""
    with ps_cluster(num_ps, initialize=False) as cluster:
        report = tested.report()
        client = PsClient(cluster.partition, report, TOKEN, timeout_s=20)
        client.initialize(tested.initial(), report.tables, report.optimizer, 7)
        try:
            yield client
        finally:
            client.close()


def train(tested: Any, client: PsClient, batches: Sequence[Batch]) -> None:
    """One minibatch after the other."""
    for number, batch in enumerate(batches):
        pulled = client.exchange(None, Pull(dense=True, ids=batch.ids))
        step = tested.gradients(batch, pulled.parameters, pulled.rows, seed=1)
        rows = {name: (batch.ids[name], gradients) for name, gradients in step.row_gradients.items()}
        push = Push(1, 0, 0, number, step.gradient, step.change, rows, pulled.versions, unreached=step.unreached)
        client.exchange(push, None)


def values(client: PsClient, ids: Mapping[str, Any] | None = None) -> tuple[Parameters, Mapping[str, Floats]]:
    pulled = client.exchange(None, Pull(dense=True, ids=ids or {}, read_only=True))
    assert pulled.parameters is not None
    return pulled.parameters, pulled.rows


def plain_model(request: Any, model_def: str, params: Any, initial: Sequence[Any]) -> Any:
    """The compiled model of Keras alone."""
    model = load(str(request.path.parent / "zoo"), model_def, params, required=("feed",)).model()
    model.set_weights([variable.numpy() for variable in initial])
    model.run_eagerly = True  # a few steps take less than tracing them
    return model


KINDS = keras.optimizers
OPTIMIZERS = {
    "SGD": KINDS.SGD(0.1, weight_decay=0.1),
    "momentum": KINDS.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": KINDS.Adam(0.05, weight_decay=0.1, amsgrad=True, clipnorm=0.1),
    "AdamW": KINDS.AdamW(0.05, weight_decay=0.1, global_clipnorm=0.1),
    "Adamax": KINDS.Adamax(0.05, weight_decay=0.1, clipvalue=0.02),
    "Nadam": KINDS.Nadam(0.05, weight_decay=0.1),
    "Adagrad": KINDS.Adagrad(0.05, weight_decay=0.1),
    "RMSprop": KINDS.RMSprop(0.05, momentum=0.9, centered=True, weight_decay=0.1),
    "Adadelta": KINDS.Adadelta(0.5, weight_decay=0.1),
    "Ftrl": KINDS.Ftrl(
        0.05,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.01,
        l2_shrinkage_regularization_strength=0.01,
        beta=0.1,
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_epochs_are_those_of_fit_and_a_variable_without_a_gradient_stays(
    framework: Any, rows_of: Any, minibatches: Any, request: Any, kind: str
) -> None:
    params = {"optimizer": keras.optimizers.serialize(OPTIMIZERS[kind])}
    tested = framework("compiled.half_used", params, feed="feed_used")
    batches = 2 * minibatches(tested, rows_of(ROWS))
    plain = plain_model(request, "compiled.half_used", params, tested._built().trainable)
    plain.fit(NUMBERS, {"used": LABELS}, batch_size=8, epochs=2, shuffle=False, verbose=0)
    with served(tested, num_ps=3) as client:
        train(tested, client, batches)
        trained = values(client)[0].trainable
    np.testing.assert_allclose(trained, flat_values(plain.trainable_variables), rtol=1e-5, atol=2e-6)
    assert [variable.name.split("/")[0] for variable in tested.report().variables][:2] == ["unused", "unused"]
    np.testing.assert_array_equal(trained[: 4 * 2 + 2], tested.initial().trainable[: 4 * 2 + 2])


def test_a_loss_that_has_no_gradient_is_an_error(framework: Any, rows_of: Any, minibatches: Any) -> None:
    tested = framework("compiled.cut_off")
    (batch, *_) = minibatches(tested, rows_of(ROWS))
    with pytest.raises(ModelDefinitionError, match="no trainable variable has a gradient"):
        tested.gradients(batch, tested.initial(), {}, seed=1)


@pytest.mark.parametrize("jit_compile", [True, False])
def test_rows_of_a_table_without_a_gradient_stay(framework: Any, minibatches: Any, jit_compile: bool) -> None:
    """A short minibatch too, which is filled up."""
    tested = framework("swapped.partly_frozen", embedding_threshold=0, jit_compile=jit_compile, optimizer="decaying")
    records = [
        " ".join(map(str, RANDOM.integers(0, 2, 1).tolist() + RANDOM.integers(0, 40, 6).tolist())) for _ in range(13)
    ]
    batches = minibatches(tested, [record.encode() for record in records])
    ids = {table: np.arange(40) for table in ("table", "frozen")}
    with served(tested, num_ps=2) as client:
        _, before = values(client, ids)
        train(tested, client, batches)
        _, after = values(client, ids)
    np.testing.assert_array_equal(after["frozen"], before["frozen"])
    assert (after["table"] != before["table"]).any()
