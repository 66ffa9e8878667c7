"""The layers under the import paths of the original ElasticDL: this package, and one module in it per layer."""

import sys
from types import ModuleType

from elasticdl_preprocessing.categorical import ConcatenateWithOffset, Hashing, IndexLookup
from elasticdl_preprocessing.conversions import ToNumber, ToRagged, ToSparse
from elasticdl_preprocessing.numeric import Discretization, LogRound, Normalizer, RoundIdentity
from elasticdl_preprocessing.sparse_embedding import SparseEmbedding

_MODULES = {
    "concatenate_with_offset": ConcatenateWithOffset,
    "discretization": Discretization,
    "hashing": Hashing,
    "index_lookup": IndexLookup,
    "log_round": LogRound,
    "normalizer": Normalizer,
    "round_identity": RoundIdentity,
    "sparse_embedding": SparseEmbedding,
    "to_number": ToNumber,
    "to_ragged": ToRagged,
    "to_sparse": ToSparse,
}
__all__ = [_layer.__name__ for _layer in _MODULES.values()]

for _name, _layer in _MODULES.items():
    _module = ModuleType(f"{__name__}.{_name}", _layer.__doc__)
    setattr(_module, _layer.__name__, _layer)
    sys.modules[_module.__name__] = globals()[_name] = _module
