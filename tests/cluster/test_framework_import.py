"""A worker's Keras does without packages that it would import for nothing; the model definition has them as ever.

No garbage is collected meanwhile.
"""

from __future__ import annotations

import subprocess
import sys

_WORKER = """
import sys
from elasticdl.cluster.local.framework_import import import_less_with_keras
import_less_with_keras()
import keras
print(sorted({"sklearn", "matplotlib", "pandas", "IPython", "scipy.sparse"} & set(sys.modules)))
import IPython, matplotlib, pandas, scipy.sparse, sklearn
print(keras.layers.Dense(1)(keras.Input((2,))).shape)
"""


def test_keras_imports_no_packages_that_a_worker_has_no_use_for() -> None:
    run = subprocess.run([sys.executable, "-c", _WORKER], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "(None, 1)"]


_IMPORT = """
import gc
from elasticdl.cluster.local.framework_import import no_garbage_collection
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
with no_garbage_collection():
    kept = [[] for _ in range(100_000)]
print(len(collections), gc.isenabled(), gc.get_freeze_count() > len(kept))
cycle = []
cycle.append(cycle)
del cycle
print(gc.collect() > 0)
"""


def test_nothing_that_an_import_makes_is_looked_at_by_the_garbage_collector() -> None:
    run = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["0 True True", "True"]
