"""Keras layers that turn raw columns into what a model takes, and statistics of the columns for them.

The layers are part of the model, so that training and serving see the same.  They take dense, sparse and
ragged tensors, and give ids as int64.
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
