"""Import paths of the original ElasticDL: modules with its names, which resolve to the names of this version.

The table of names is in `elasticdl_client.original_imports`; the other modules of this package define the few classes
and functions that exist only for compatibility.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import Any

from elasticdl_client.original_imports import TABLE, hint_for, successor

_log = logging.getLogger("elasticdl")
_warned: set[str] = set()


class _OriginalModule(ModuleType):
    """A module of the original; each name is resolved at its first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = successor(self.__name__, name)
        if found is None:
            raise ImportError(f"{self.__name__}.{name} does not exist in this version. {hint_for(self.__name__, name)}")
        module, attribute = found
        if self.__name__ not in _warned:
            _warned.add(self.__name__)
            now = (
                "kept for modules of the original ElasticDL"
                if module.startswith(f"{__name__}.")
                else f"{module}.{attribute} now"
            )
            _log.warning("%s.%s is %s (docs/original.md).", self.__name__, name, now)
        return getattr(importlib.import_module(module), attribute)


def install(root: str) -> None:
    """Make all modules of the table below `root` importable; `root` is a package being imported."""
    sys.modules[root].__class__ = _OriginalModule
    for name in TABLE:
        if not name.startswith(f"{root}."):
            continue
        parts = name.split(".")
        for length in range(root.count(".") + 2, len(parts) + 1):
            _add(".".join(parts[:length]))


def _add(name: str) -> None:
    if name in sys.modules:
        return
    module = _OriginalModule(name, f"{name} of the original ElasticDL.")
    module.__path__ = []  # makes it a package: modules may be below it
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[parent], last, module)
