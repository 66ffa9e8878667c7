"""One model for each kind of tensor that uses every layer, and inputs for it."""

from __future__ import annotations

from typing import Any

import keras

from elasticdl_preprocessing import (
    ConcatenateWithOffset,
    Discretization,
    Hashing,
    IndexLookup,
    LogRound,
    Normalizer,
    RoundIdentity,
    SparseEmbedding,
    ToNumber,
    ToRagged,
    ToSparse,
)
from tests.preprocessing.oracle import tensor_of

NUMBERS = {
    "dense": [[1.5, 0.0], [20.0, -3.0], [400.25, 2.5]],
    "sparse": [[1.5], [], [400.25, 2.5]],
    "ragged": [[1.5], [], [400.25, 2.5]],
}
WORDS = {
    "dense": [["1", ""], ["2", "1"], ["9", "2"]],
    "sparse": [["1"], ["2", "1"], []],
    "ragged": [["1"], ["2", "1"], []],
}


def inputs_of(kind: str) -> dict[str, Any]:
    width = {"dense": 2, "sparse": 5, "ragged": None}[kind]
    told = {"sparse": kind == "sparse", "ragged": kind == "ragged"}
    return {
        "numbers": keras.Input((width,), dtype="float32", name="numbers", **told),
        "words": keras.Input((width,), dtype="string", name="words", **told),
    }


def examples(kind: str) -> dict[str, Any]:
    return {
        "numbers": tensor_of(NUMBERS[kind], kind, "float32"),
        "words": tensor_of(WORDS[kind], kind, "string"),
    }


def model_of(kind: str) -> keras.Model:
    """Every layer takes tensors of the kind, or what another layer made of them."""
    keras.utils.set_random_seed(1)
    inputs = inputs_of(kind)
    numbers, words = inputs["numbers"], inputs["words"]
    ids = [
        Discretization([0.0, 10.0])(numbers),
        LogRound(4, base=10)(numbers),
        RoundIdentity(30, default_value=1)(numbers),
    ]
    looked_up = [Hashing(7)(words), IndexLookup(["1", "2"], num_oov_tokens=2)(words)]
    shared = SparseEmbedding(100, 3, combiner="sum")
    columns = [
        SparseEmbedding(100, 3)(ConcatenateWithOffset([0, 10, 20])(ids)),
        shared(ConcatenateWithOffset([40, 50])(looked_up)),
        shared(ToSparse()(looked_up[1])),
        SparseEmbedding(100, 2, combiner="sqrtn")(RoundIdentity(9)(ToNumber("float32", 2)(ToSparse("1")(words)))),
        keras.layers.Dense(2)(_sums(Normalizer(1.5, 4)(numbers))),
    ]
    if kind == "dense":
        columns.append(SparseEmbedding(100, 3)(Hashing(90)(ToRagged()(words))))
        columns.append(Normalizer(0, 10)(numbers))
    return keras.Model(inputs, keras.layers.Concatenate()(columns))


def _sums(numbers: Any) -> Any:
    """Their sum in each row, by way of an embedding whose ids they are: [B, 2]."""
    return SparseEmbedding(50, 2, embeddings_initializer="ones", combiner="sum")(RoundIdentity(50)(numbers))
