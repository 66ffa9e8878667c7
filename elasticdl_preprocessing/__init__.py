"""Keras layers that turn raw columns into inputs of a model, and functions that read statistics of the columns.

    age = Discretization(get_bucket_boundaries("age", default=[18, 30, 65]))
    job = IndexLookup(get_vocabulary("job", default=["clerk", "nurse"]))

The layers are part of the model, so that training and serving preprocess in the same way.  They accept dense, sparse
and ragged tensors; ids are int64.
"""

from elasticdl_preprocessing.analyzer import (
    get_avg,
    get_bucket_boundaries,
    get_distinct_count,
    get_max,
    get_min,
    get_stddev,
    get_vocabulary,
)
from elasticdl_preprocessing.categorical import ConcatenateWithOffset, Hashing, IndexLookup
from elasticdl_preprocessing.conversions import ToNumber, ToRagged, ToSparse
from elasticdl_preprocessing.numeric import Discretization, LogRound, Normalizer, RoundIdentity
from elasticdl_preprocessing.sparse_embedding import SparseEmbedding

__all__ = [
    "ConcatenateWithOffset",
    "Discretization",
    "Hashing",
    "IndexLookup",
    "LogRound",
    "Normalizer",
    "RoundIdentity",
    "SparseEmbedding",
    "ToNumber",
    "ToRagged",
    "ToSparse",
    "get_avg",
    "get_bucket_boundaries",
    "get_distinct_count",
    "get_max",
    "get_min",
    "get_stddev",
    "get_vocabulary",
]
