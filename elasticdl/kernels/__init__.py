"""Native kernels (C++): embedding tables, optimizers, what moves rows between ids and tensors, and rules of messages.

Nothing in here knows of jobs or leases.  The module `_native` is built with the package and is required; its
oracles in NumPy are with the tests.
"""

try:
    import elasticdl.kernels._native  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "elasticdl.kernels._native":
        raise
    raise ImportError(
        "The native kernels of ElasticDL are not built for this Python.\n"
        "  Install the wheel of elasticdl2, or in a checkout: make setup (or pip install -e .)."
    ) from None
