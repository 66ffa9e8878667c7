"""The digits in NumPy, by user code that takes processor time: BUSY_S seconds of it for a minibatch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from elasticdl.frameworks.framework import Batch, Floats, Parameters, Step
from tests.e2e_kubernetes.zoo.paced import numpy_digits


def custom_model() -> Floats:
    return numpy_digits.custom_model()


def framework(definition: Any, minibatch_size: int, **_: object) -> BusyFramework:
    return BusyFramework(definition.model(), minibatch_size)


class BusyFramework(numpy_digits.NumpyFramework):
    """See `elasticdl.frameworks.framework.Framework`."""

    def gradients(self, batch: Batch, parameters: Parameters, rows: Mapping[str, Floats], seed: int) -> Step:
        begun = time.thread_time()
        while time.thread_time() - begun < float(os.environ["BUSY_S"]):
            pass
        return super().gradients(batch, parameters, rows, seed)
