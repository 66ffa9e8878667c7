"""Errors of the layers, their construction, and the shapes that they report to Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

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

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "divisor": (lambda: Normalizer(1, 0), "divisor not 0"),
    "boundaries": (lambda: Discretization([2, 1]), "fall"),
    "no bins": (lambda: LogRound(0), "num_bins must be positive"),
    "base": (lambda: LogRound(3, base=1), "no base"),
    "no buckets": (lambda: RoundIdentity(-1), "num_buckets must be positive"),
    "no hash bins": (lambda: Hashing(0), "num_bins"),
    "hash bins": (lambda: Hashing(None), "num_bins"),  # type: ignore[arg-type]
    "one hot": (lambda: Hashing(3, output_mode="one_hot"), "gives ids"),
    "tokens": (lambda: IndexLookup(["a", "b", "a"]), "more than once: a"),
    "no file": (lambda: IndexLookup("no/such/file"), "cannot be read"),
    "oov": (lambda: IndexLookup(["a"], num_oov_tokens=0), "num_oov_tokens must be positive"),
    "dtype": (lambda: ToNumber(tf.string, 0), "not the dtype of a number"),
    "default": (lambda: ToNumber("int64", 0.5), "default_value=0.5 is no integer"),
    "no default": (lambda: ToNumber("int64", float("nan")), "default_value=nan is no integer"),
    "None": (lambda: ToNumber("int64", None), "default_value=None is no integer"),  # type: ignore[arg-type]
    "text": (lambda: ToNumber("int64", "abc"), "ToNumber: default_value='abc' is no"),  # type: ignore[arg-type]
    "combiner": (lambda: SparseEmbedding(3, 2, combiner="max"), "not one of"),
    "offsets": (lambda: ConcatenateWithOffset([1])([tf.constant([[1]]), tf.constant([[1]])]), "1 offsets"),
    "rank": (lambda: ToRagged()(tf.zeros([1, 1, 1], tf.int64)), "one or two"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_value_errors(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_tensors_are_type_errors() -> None:
    sparse = tf.sparse.from_dense([[1]])
    with pytest.raises(TypeError, match="sparse"):
        ToRagged()(sparse)
    with pytest.raises(TypeError, match="several kinds"):
        ConcatenateWithOffset(None)([sparse, tf.constant([[1]])])
    with pytest.raises(TypeError, match="strings and integers"):
        IndexLookup(["a"])(tf.constant([1.0]))


def test_a_string_that_is_no_number_is_an_error_of_the_step() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="convert string: b"):
        ToNumber("float32", 0)(tf.constant(["b"]))


@pytest.mark.parametrize(
    ("out_type", "held", "wrong"),
    [("int8", ["-128", "127"], "300"), ("uint8", ["0", "255"], "-1"), ("uint64", ["0", str(2**63 - 1)], "-1")],
)
def test_a_string_that_an_integer_type_does_not_hold_is_an_error_of_the_step(
    out_type: str, held: list[str], wrong: str
) -> None:
    layer = ToNumber(out_type, 0)
    model = keras.Model(words := keras.Input((1,), dtype="string"), layer(words))
    assert layer(tf.constant(held)).numpy().tolist() == [int(text) for text in held]
    for convert in (layer, tf.function(model)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{out_type} holds"):
            convert(tf.constant([[""], [wrong]]))


@pytest.mark.parametrize("layer", [ToSparse, ToRagged])
def test_nan_can_be_left_out(layer: type[ToSparse] | type[ToRagged]) -> None:
    kept = layer(ignore_value=float("nan"))(tf.constant([[np.nan, 0.0, 1.5]]))
    assert kept.values.numpy().tolist() == [0.0, 1.5]


@pytest.mark.parametrize("layer", [ToSparse, ToRagged])
def test_no_value_of_an_unsigned_integer_stands_for_missing(layer: type[ToSparse] | type[ToRagged]) -> None:
    assert layer()(tf.constant([[255, 0, 1]], tf.uint8)).values.numpy().tolist() == [255, 0, 1]


def test_the_published_example_of_hashing() -> None:
    assert Hashing(3)(tf.constant(list("ABCDE"))).numpy().tolist() == [1, 0, 1, 1, 2]


def test_a_vocabulary_comes_from_a_file_and_leaves_as_tokens(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.txt"
    path.write_text("blau\ngrün\n")
    layer = IndexLookup(path)
    path.unlink()
    again = IndexLookup.from_config(layer.get_config())
    assert again(tf.constant([["grün", "blau", "rot"]])).numpy().tolist() == [[1, 0, 2]]
    assert IndexLookup([7, 5])(tf.constant([5, 7, 6])).numpy().tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a\u2028b\nc\x0bd\ne\x85\rf\n", ["a\u2028b", "c\x0bd", "e\x85\rf"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("\ufeffa\nb\ufeff\n", ["a", "b\ufeff"]),
        ("a\n\nb", ["a", "", "b"]),
        ("\n", [""]),
        ("", []),
    ],
)
def test_a_vocabulary_has_a_token_a_line(tmp_path: Path, text: str, tokens: list[str]) -> None:
    path = tmp_path / "vocabulary.txt"
    path.write_bytes(text.encode())
    assert IndexLookup(path).vocabulary == tokens


def test_without_a_vocabulary_all_tokens_are_unknown() -> None:
    layer = IndexLookup(num_oov_tokens=3)
    assert layer.vocab_size() == 3
    assert layer(tf.constant(list("ABCDE"))).numpy().tolist() == [1, 0, 1, 1, 2]


def test_what_is_no_tensor_yet_is_taken_too() -> None:
    assert ToNumber("int64", -1)([["1", ""]]).numpy().tolist() == [[1, -1]]
    assert ToNumber("int64", -1.0)([["1", ""]]).numpy().tolist() == [[1, -1]]
    assert Discretization([1])(np.array([0.5, 1.5])).numpy().tolist() == [0, 1]
    inputs = tf.constant([1])
    assert ConcatenateWithOffset([3])(inputs) is inputs


def test_ids_of_both_integer_types_share_one_space_of_int64() -> None:
    age, word = keras.Input((1,), dtype="int32"), keras.Input((1,), dtype="string")
    ids = ConcatenateWithOffset([0, 2**33])([age, IndexLookup(["red", "green"])(word)])
    result = keras.Model([age, word], ids)([tf.constant([[7]]), tf.constant([["green"]])])
    assert (ids.dtype, result.dtype.name, result.numpy().tolist()) == ("int64", "int64", [[7, 2**33 + 1]])
    assert ConcatenateWithOffset([2**33, 0])([tf.constant([1]), tf.constant([2])]).numpy().tolist() == [2**33 + 1, 2]


@pytest.fixture
def half_precision() -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def test_numbers_keep_their_precision_whatever_the_policy(half_precision: None) -> None:
    assert int(RoundIdentity(2**40)(tf.constant([2**33 + 1]))[0]) == 2**33 + 1
    assert Normalizer(2**20, 1)(tf.constant([2.0**20 + 1])).numpy().tolist() == [1.0]


@pytest.mark.parametrize("dtype", ["int32", "int64", "float64"])
def test_times_in_seconds_keep_their_digits(dtype: str) -> None:
    seconds = keras.Input((1,), dtype=dtype)
    layer = Normalizer(1_700_000_000, 10)
    model = keras.Model(seconds, layer(seconds))
    for normalized in (layer, model):
        result = normalized(tf.constant([[1_700_000_007], [1_699_999_999]], dtype))
        assert result.dtype == tf.float32
        np.testing.assert_array_equal(result, np.array([[0.7], [-0.1]], np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_bucket_is_the_same_with_and_without_xla(dtype: str) -> None:
    layer = Discretization([0.1, 0.7])
    values = tf.constant([[0.1, 0.7], [np.nan, -np.inf]], dtype)
    compiled = tf.function(layer, jit_compile=True)
    assert layer(values).numpy().tolist() == compiled(values).numpy().tolist() == [[1, 2], [2, 0]]
    graph = tf.function(layer)
    for none in (values[:0], values[:, :0]):
        assert compiled(none).shape == graph(none).shape == none.shape
    assert Discretization([])(values).numpy().tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("combiner", "expected"), [("sum", 3000), ("mean", 1), ("sqrtn", 3000**0.5)])
def test_combiners_count_in_float32_whatever_the_policy(half_precision: None, combiner: str, expected: float) -> None:
    vectors = SparseEmbedding(5, 1, "ones", combiner=combiner)(tf.ones([1, 3000], tf.int64))
    assert vectors.dtype == tf.float16
    assert float(vectors[0, 0]) == pytest.approx(expected, rel=1e-3)


LAYERS = {
    "normalizer": (Normalizer(1, 2), "float32"),
    "hashing": (Hashing(5), "string"),
    "to_sparse": (ToSparse(), "int64"),
    "to_ragged": (ToRagged(), "string"),
    "embedding": (SparseEmbedding(5, 3), "int64"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_keras_knows_the_shapes_of_results(name: str) -> None:
    layer, dtype = LAYERS[name]
    symbolic = layer(keras.Input((4,), dtype=dtype))
    result = layer(tf.constant([["1"] * 4] * 2) if dtype == "string" else tf.ones([2, 4], dtype))
    assert symbolic.dtype == result.dtype.name
    assert symbolic.sparse == isinstance(result, tf.SparseTensor)
    assert symbolic.ragged == isinstance(result, tf.RaggedTensor)
    assert all(known in (None, size) for known, size in zip(symbolic.shape, result.shape, strict=True))
