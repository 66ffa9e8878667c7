"""A worker's Keras does without packages that it would import for nothing; the model definition has them as ever."""

from __future__ import annotations

import subprocess
import sys

_WORKER = """
import sys
from elasticdl.cluster.keras_import import import_less_with_keras
import_less_with_keras()
import keras
print(sorted({"sklearn", "matplotlib"} & set(sys.modules)))
import matplotlib, sklearn
print(keras.layers.Dense(1)(keras.Input((2,))).shape)
"""


def test_keras_imports_no_packages_for_plots_and_estimators() -> None:
    run = subprocess.run([sys.executable, "-c", _WORKER], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "(None, 1)"]
