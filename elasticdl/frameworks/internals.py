"""Check that the installed TensorFlow and Keras have the non-public names that the adapter uses.

A framework is imported only when a check asks for it.  `elasticdl.collective.nccl` checks the names of PyTorch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.util import find_spec
from operator import attrgetter

from elasticdl_client.choices import FrameworkName
from elasticdl_client.errors import ElasticDLError

Name = tuple[str, str]  # module, and dotted attribute in it

KERAS: tuple[Name, ...] = (
    ("keras", "Model._compute_loss"),
    ("keras.src.backend.common.global_state", "get_global_attribute"),
    ("keras.src.backend.common.global_state", "set_global_attribute"),
    ("keras.src.models.functional", "Functional.call"),
    ("keras.src.random.seed_generator", "global_seed_generator"),
    ("keras.src.trainers.compile_utils", "CompileLoss"),
    ("keras.src.trainers.compile_utils", "get_metric"),
)
TENSORFLOW: tuple[Name, ...] = (
    ("tensorflow", "__internal__.autograph.control_status_ctx"),
    ("tensorflow", "__internal__.autograph.tf_convert"),
    ("tensorflow", "__internal__.dispatch.GlobalOpDispatcher"),
    ("tensorflow.python.autograph.core.ag_ctx", "ControlStatusCtx"),
    ("tensorflow.python.autograph.core.ag_ctx", "Status"),
    ("tensorflow.python.data.ops.map_op", "_MapDataset"),
    ("tensorflow.python.eager.polymorphic_function.autograph_util", "py_func_from_autograph"),
    ("tensorflow.python.eager.polymorphic_function.function_type_utils", "bind_function_inputs"),
    ("tensorflow.python.framework.ops", "gradient_registry"),
)


def missing(names: Iterable[Name]) -> list[str]:
    """Return the names that the installed packages lack, as `module.attribute`."""
    absent = []
    for module, attribute in names:
        try:
            attrgetter(attribute)(importlib.import_module(module))
        except (ImportError, AttributeError):
            absent.append(f"{module}.{attribute}")
    return absent


def check_names(package: str, names: Iterable[Name], known_to_work: str) -> None:
    """Raise ElasticDLError if an installed package lacks one of the names.

    Args:
        package: The package of the names; must be importable.
        names: The required names.
        known_to_work: The requirement that installs a version with all of them.
    """
    absent = missing(names)
    if absent:
        version = getattr(importlib.import_module(package), "__version__", "of an unknown version")
        raise ElasticDLError(
            f"ElasticDL cannot work with the installed {package} {version}: it has no {', '.join(absent)}.",
            f"Install a version that it works with: pip install '{known_to_work}'.",
        )


def check_internals(framework: FrameworkName) -> None:
    """Raise ElasticDLError if the installed version of a framework lacks what its adapter uses."""
    if framework is not FrameworkName.TENSORFLOW or find_spec("tensorflow") is None or find_spec("keras") is None:
        return  # the adapter reports a missing package
    check_names("tensorflow", TENSORFLOW, "tensorflow>=2.17,<3")
    check_names("keras", KERAS, "keras>=3.5,<4")
