"""Models with Keras's own embeddings, in every shape.  A record is six ids in text, after a label."""

import keras
import numpy as np
import tensorflow as tf

from elasticdl.layers import Embedding

NUM_IDS = 40
DIM = 3


def _embedding(name: str, dim: int = DIM, **options: object) -> keras.layers.Embedding:
    return keras.layers.Embedding(NUM_IDS, dim, name=name, **options)


def _ids() -> keras.KerasTensor:
    return keras.Input((6,), dtype="int64", name="ids")


def _scored(ids: keras.KerasTensor, vectors: keras.KerasTensor) -> keras.Model:
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(vectors))[:, 0])


def functional() -> keras.Model:
    ids = _ids()
    shared = _embedding("shared", embeddings_initializer="glorot_uniform")
    both = keras.layers.Concatenate()([shared(ids[:, :2]), shared(ids[:, 2:4])])
    return _scored(ids, keras.layers.Concatenate(axis=1)([both, _embedding("wide", 6)(ids)]))


def adapted() -> keras.Model:
    """Its first layer has a counter that training leaves alone."""
    ids = _ids()
    normalization = keras.layers.Normalization(axis=None)
    normalization.adapt(np.arange(40.0))
    numbers = keras.layers.Dense(DIM)(normalization(ids))
    return _scored(ids, keras.layers.Add()([keras.layers.Reshape((1, DIM))(numbers), _embedding("table")(ids)]))


def column() -> keras.Model:
    ids = _ids()
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(_embedding("table")(ids))))


class Counting(keras.Model):
    """Its outputs follow the number of its training steps, a variable that is not float32."""

    def __init__(self) -> None:
        super().__init__()
        self.scored = column()
        self.num_steps = self.add_weight(name="num_steps", shape=(), dtype="int32", trainable=False)

    def call(self, ids: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:
            self.num_steps.assign_add(1)
        return self.scored(ids) * tf.cast(self.num_steps, tf.float32)


def combined() -> keras.Model:
    """An embedding of ElasticDL's."""
    ids = _ids()
    vectors = Embedding(DIM, input_dim=NUM_IDS, combiner="sum", name="table")(ids)
    return keras.Model(ids, keras.layers.Dense(1)(vectors)[:, 0])


def sequential() -> keras.Model:
    return keras.Sequential(
        [_embedding("table"), keras.layers.Flatten(), keras.layers.Dense(1), keras.layers.Reshape(())]
    )


def masked() -> keras.Model:
    ids = _ids()
    vectors = _embedding("padded", mask_zero=True)(ids)
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(vectors))[:, 0])


def configured() -> keras.Model:
    return keras.Model.from_config(column().get_config())


def cloned() -> keras.Model:
    return keras.models.clone_model(column())


class Cut(keras.layers.Layer):
    """No gradient comes through it."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.stop_gradient(inputs)


def partly_frozen() -> keras.Model:
    ids = _ids()
    return _scored(ids, keras.layers.Concatenate()([_embedding("table")(ids), Cut()(_embedding("frozen")(ids))]))


class Stranger(keras.layers.Layer):
    """Calls a layer that Keras does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = (lambda table: lambda ids: table(ids))(_embedding("hidden"))

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return self.hidden(ids)


def stranger() -> keras.Model:
    ids = _ids()
    return _scored(ids, keras.layers.Concatenate()([_embedding("table")(ids), Stranger()(ids)]))


class Subclass(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = _embedding("table", embeddings_regularizer="l2")
        self.twice = keras.layers.Dense(1, kernel_regularizer="l2")

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return self.twice(tf.reduce_sum(self.table(ids[:, :3]) * self.table(ids[:, 3:]), axis=1))[:, 0]


class Compiled(Subclass):
    """A part of its `call` is a function of its own, with a condition that AutoGraph converts."""

    @tf.function
    def call(self, ids: tf.Tensor) -> tf.Tensor:
        scored = super().call(ids)
        if tf.size(scored) < 0:
            scored = -scored
        return scored


def joined() -> keras.Model:
    """A function of its own stands in a functional model."""
    ids = _ids()
    return _scored(ids, _with_square(_embedding("table")(ids)))


def joined_by_hand() -> keras.Model:
    ids = _ids()
    vectors = _embedding("table")(ids)
    return _scored(ids, vectors + vectors * vectors)


@tf.function
def _with_square(vectors: tf.Tensor) -> tf.Tensor:
    return vectors + tf.square(vectors)


class Sloping(Subclass):
    """A function of its own takes gradients, which it can in a graph alone."""

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return super().call(ids) + self.slope(self.table(ids))

    @tf.function
    def slope(self, vectors: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.gradients(tf.square(self.twice(vectors)), vectors)[0], axis=(1, 2))


class SlopingByHand(Sloping):
    def slope(self, vectors: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(2 * self.twice(vectors) * self.twice.kernel[:, 0], axis=(1, 2))


class Weighing(Subclass):
    """A function of its own takes an array, a list that its signature makes a tensor, and a keyword."""

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        first, second = np.arange(1, 7, dtype="float32"), [1, 2, 3, 4, 5, 6]
        return super().call(ids) + self.summed(ids, function=first) + self.share(second)[0]

    @tf.function
    def summed(self, ids: tf.Tensor, function: tf.Tensor) -> tf.Tensor:
        assert function.shape.rank == 1
        return tf.reduce_sum(self.table(ids) * function[:, None], axis=(1, 2))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def share(self, numbers: tf.Tensor) -> tf.Tensor:
        return numbers / tf.reduce_sum(numbers)


class WeighingPlainly(Weighing):
    def summed(self, ids: tf.Tensor, function: object) -> tf.Tensor:
        return tf.reduce_sum(self.table(ids) * tf.constant(function)[:, None], axis=(1, 2))

    def share(self, numbers: list[int]) -> tf.Tensor:
        return tf.constant(numbers, tf.float32) / sum(numbers)


class WithNothing(keras.Model):
    """Has an output that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.score = _embedding("table"), keras.layers.Dense(1)

    def call(self, ids: tf.Tensor) -> tuple[tf.Tensor, None]:
        return self.score(tf.reduce_sum(self.table(ids), axis=1))[:, 0], None


class Positioned(keras.Model):
    """Looks up positions that it has made as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.places = tf.range(6, dtype=tf.int64)
        self.place = keras.layers.Embedding(6, DIM)
        self.combined = Embedding(DIM, input_dim=6, combiner="sum")

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        rows = tf.RaggedTensor.from_uniform_row_length(self.places, 6)
        return tf.reduce_sum(self.place(self.places) * self.combined(rows)) * tf.cast(ids[:, 0], tf.float32)


def nested() -> keras.Model:
    def tower(name: str) -> keras.Model:
        part = keras.Input((3,), dtype="int64")
        return keras.Model(part, keras.layers.Flatten()(_embedding("table")(part)), name=name)

    ids = _ids()
    left, right = tower("left")(ids[:, :3]), tower("right")(ids[:, 3:])
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()([left, right]))[:, 0])


def ragged() -> keras.Model:
    ids = keras.Input((None,), dtype="int64", ragged=True)
    mean = keras.layers.Lambda(lambda vectors: tf.reduce_mean(vectors, axis=1), output_shape=(DIM,))
    return keras.Model(ids, keras.layers.Dense(1)(mean(_embedding("table")(ids)))[:, 0])


def looked_up() -> keras.Model:
    words = keras.Input((6,), dtype="string")
    names = keras.layers.StringLookup(vocabulary=[str(k) for k in range(30)])(words)
    hashed = keras.layers.Hashing(NUM_IDS)(words)
    vectors = [_embedding("names")(names), _embedding("hashed")(hashed)]
    return _scored(words, keras.layers.Concatenate()(vectors))


def numbered() -> keras.Model:
    """Ids of float numbers, of positions, and of an IntegerLookup."""
    ids = _ids()
    looked = keras.layers.IntegerLookup(vocabulary=list(range(5, 35)))(ids)
    vectors = _embedding("looked")(looked) + _embedding("floats")(keras.ops.cast(ids, "float32"))
    places = keras.layers.Lambda(lambda vectors: tf.range(tf.shape(vectors)[1]), output_shape=(6,))(vectors)
    return _scored(ids, vectors + _embedding("places")(places))


def half() -> keras.Model:
    ids = _ids()
    return _scored(ids, keras.layers.Embedding(NUM_IDS, DIM, name="half", dtype="mixed_float16")(ids))


def tied() -> keras.Model:
    ids = _ids()
    table = _embedding("tied")
    logits = keras.ops.matmul(keras.ops.sum(table(ids), axis=1), keras.ops.transpose(table.embeddings))
    return keras.Model(
        ids, keras.ops.logsumexp(logits + keras.ops.mean(_embedding("free")(ids)), axis=(1,))
    )  # no int: Keras 3.5 wants a sequence


class Tied(keras.Model):
    def __init__(self, only_training: bool = False) -> None:
        super().__init__()
        self.only_training = only_training
        self.table = _embedding("tied")
        self.free = _embedding("free")

    def call(self, ids: tf.Tensor, training: bool = False) -> tf.Tensor:
        vectors = tf.reduce_sum(self.table(ids) + self.free(ids), axis=1)
        if self.only_training and not training:
            return tf.reduce_sum(vectors, axis=1)
        return tf.reduce_logsumexp(tf.matmul(vectors, self.table.embeddings, transpose_b=True), axis=1)


class Tying(keras.layers.Layer):
    """A layer of the user's that reads the table of its embedding when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.table = _embedding("tied")

    def build(self, shape: object) -> None:
        self.table.build(shape)

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return keras.ops.matmul(self.table(ids), keras.ops.transpose(self.table.embeddings))


def tied_inside() -> keras.Model:
    ids = _ids()
    return keras.Model(ids, keras.ops.mean(Tying()(ids), axis=(1, 2)))


class Special(keras.layers.Embedding):
    """A subclass."""


OUTSIDE = _embedding("outside")


def kept(kinds: str) -> keras.Model:
    """A model with tables that no parameter server holds, each named after the kind that it is."""
    ids = _ids()
    values = np.ones((NUM_IDS, DIM), "f4")
    made = {
        "subclass": lambda: Special(NUM_IDS, DIM, name="subclass"),
        "reversible": lambda: keras.layers.ReversibleEmbedding(NUM_IDS, DIM, name="reversible"),
        "orthogonal": lambda: _embedding("orthogonal", embeddings_initializer="orthogonal"),
        "array": lambda: _embedding("array", embeddings_initializer=keras.initializers.Constant(values)),
        "weights": lambda: _embedding("weights", weights=[values]),
        "columns": lambda: _embedding("columns", embeddings_constraint=keras.constraints.MaxNorm(1.0)),
        "custom": lambda: _embedding("custom", embeddings_regularizer=keras.regularizers.OrthogonalRegularizer()),
        "frozen": lambda: _embedding("frozen", trainable=False),
        "lora": lambda: _embedding("lora", lora_rank=2),
        "outside": lambda: OUTSIDE,
    }
    layers = {kind: made.get(kind, lambda kind=kind: _embedding(kind))() for kind in kinds.split()}
    first, *others = (layer(ids) for layer in layers.values())
    model = _scored(ids, sum(others, first))
    for kind, layer in layers.items():
        if kind == "set":
            layer.set_weights([values])
        elif kind == "got":
            layer.set_weights([w * 0 + 1 for w in layer.get_weights()])
        elif kind == "model":
            model.set_weights([values, *model.get_weights()[-2:]])
        elif kind == "late":
            layer.enable_lora(2)
        elif kind == "thawed":
            layer.trainable = False
    return model


def constrained() -> keras.Model:
    ids = _ids()
    first = _embedding("first", embeddings_constraint=keras.constraints.MaxNorm(1.5, axis=1))
    second = _embedding("second", embeddings_constraint="non_neg")
    return _scored(ids, first(ids) + second(ids))


def regularized() -> keras.Model:
    ids = _ids()
    return _scored(ids, _embedding("table", embeddings_regularizer=keras.regularizers.L1L2(0.1, 0.2))(ids))


class Dependent(keras.Model):
    """Ids of the second table follow from something else than the features."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = _embedding("first"), _embedding("second")
        self.score, self.chance = keras.layers.Dense(NUM_IDS), keras.random.SeedGenerator(1)

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        vectors, scores = self.first(ids), self.score(tf.cast(ids, tf.float32))
        if self.kind == "recomputed":
            return tf.reduce_sum(vectors + tf.recompute_grad(self.second)(ids), axis=(1, 2))
        if self.kind == "loop":
            return tf.reduce_sum(vectors + tf.map_fn(self.second, ids, fn_output_signature=tf.float32), axis=(1, 2))
        chosen = {
            "rows": lambda: tf.argmax(vectors, axis=2),
            "variable": lambda: tf.argmax(scores, axis=1)[:, None],
            "chance": lambda: keras.random.randint(tf.shape(ids), 0, 9, seed=self.chance),
            "random": lambda: tf.random.uniform(tf.shape(ids), 0, 9, tf.int32),
        }[self.kind]()
        return tf.reduce_sum(vectors + self.second(chosen), axis=(1, 2)) + tf.reduce_sum(scores, axis=1)


def normalized() -> keras.Model:
    """A minibatch's own mean and variance."""
    ids = _ids()
    return _scored(ids, keras.layers.BatchNormalization()(_embedding("table")(ids)))


def contrasted() -> keras.Model:
    """The other samples of the minibatch are negatives."""
    ids = _ids()
    vectors = keras.ops.sum(_embedding("table")(ids), axis=1)
    logits = keras.ops.matmul(vectors, keras.ops.transpose(vectors))
    return keras.Model(ids, keras.ops.logsumexp(logits, axis=(1,)))


def hashed() -> keras.Model:
    ids = _ids()
    return _scored(ids, _embedding("hashed")(keras.layers.Hashing(NUM_IDS)(ids)))


def convolved() -> keras.Model:
    ids = _ids()
    image = keras.layers.Reshape((6, DIM, 1))(_embedding("table")(ids))
    return _scored(ids, keras.layers.Conv2D(2, 2)(image))


class varying(keras.Model):  # noqa: N801
    """Looks up the even ids alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = _embedding("table")

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        vectors = self.table(tf.boolean_mask(ids, ids % 2 == 0))
        return tf.reduce_sum(vectors) + tf.reduce_sum(tf.cast(ids, tf.float32), axis=1)


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return tf.square(labels - tf.cast(predictions, tf.float32))


def loss_of_first(labels: tf.Tensor, predictions: tuple[tf.Tensor, None]) -> tf.Tensor:
    return loss(labels, predictions[0])


def mean_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(loss(labels, predictions))


def mean_of_weighted(labels: tf.Tensor, predictions: tf.Tensor, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
    losses = loss(labels, predictions)
    return tf.reduce_mean(losses if sample_weight is None else losses * sample_weight)


def sum_of_weighted(labels: tf.Tensor, predictions: tf.Tensor, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
    losses = loss(labels, predictions)
    return tf.reduce_sum(losses if sample_weight is None else losses * sample_weight)


keras_loss = keras.losses.MeanSquaredError()
keras_sum = keras.losses.MeanSquaredError(reduction="sum")


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


def decaying() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)


def clipping() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, global_clipnorm=0.5)


def clipping_each() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, clipnorm=0.2)


def _numbers(records: tf.Tensor) -> tf.RaggedTensor:
    return tf.strings.to_number(tf.strings.split(records), tf.int64)


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        numbers = _numbers(records).to_tensor(0, shape=[None, 7])
        return numbers[:, 1:], tf.cast(numbers[:, 0], tf.float32)

    return dataset.batch(16).map(parse).unbatch()


def weighted_feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return feed(dataset, mode, metadata).map(lambda ids, label: (ids, label, tf.cast(ids[0] % 3, tf.float32)))


def ragged_feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[tf.RaggedTensor, tf.Tensor]:
        numbers = _numbers(records)
        return numbers[:, 1:], tf.cast(numbers[:, :1].to_tensor()[:, 0], tf.float32)

    return dataset.batch(16).map(parse).unbatch()


def string_feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        words = tf.strings.split(records).to_tensor("0", shape=[None, 7])
        return words[:, 1:], tf.strings.to_number(words[:, 0])

    return dataset.batch(16).map(parse).unbatch()
