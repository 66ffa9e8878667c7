"""Native kernels (C++): embedding tables, optimizers, and what moves rows between ids and tensors.

Nothing in here knows of jobs, leases or the wire.  The module `_native` is built with the package and is required; its
oracle in NumPy, for the tests alone, is `elasticdl.kernels.reference`.
"""
