"""Modules of model_zoo/, which `import model_zoo` does not find where benchmarks/ is the zoo of a job."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

_DIRECTORY = str(Path(__file__).parents[2] / "model_zoo")


def example(name: str) -> ModuleType:
    """Return a module by its name below model_zoo/."""
    if _DIRECTORY not in sys.path:
        sys.path.append(_DIRECTORY)
    return importlib.import_module(name)
