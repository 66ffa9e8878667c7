"""The paced digits with 1000 MiB of ballast in each worker: with Python more than 1 GiB, and less than 1.5 GiB."""

import numpy as np

from .numpy_digits import custom_model, framework

__all__ = ["BALLAST", "custom_model", "framework"]

BALLAST = np.ones(1000 << 20, dtype=np.uint8)
