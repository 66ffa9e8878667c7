"""The device that TensorFlow computes on: its name, its settings, and the memory that tensors take of it.

`limit_threads`: TensorFlow computes with as many threads as this container, not this machine, has processors.
"""

from __future__ import annotations

import os

import tensorflow as tf

from elasticdl.frameworks.devices import DeviceMeter, cpu_text, num_processors
from elasticdl.protocol import Device


def device_meter() -> DeviceMeter:
    """Return the meter of the first GPU, where TensorFlow puts a model, or of the CPU."""
    if not tf.config.list_logical_devices("GPU"):
        return DeviceMeter(cpu_text(_num_threads()), lambda: None)
    name = "GPU:0"
    details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
    kind = str(details.get("device_name", "GPU"))
    tf32 = "on" if tf.config.experimental.tensor_float_32_execution_enabled() else "off"
    return DeviceMeter(f"{name} ({kind}); TF32 matrix products {tf32}", lambda: Device(name, kind, used_bytes(name)))


def used_bytes(name: str) -> int:
    """Return the bytes that tensors take of a device's memory; 0: its allocator does not count."""
    try:
        return int(tf.config.experimental.get_memory_info(name)["current"])
    except ValueError:
        return 0


def _num_threads() -> int:
    """Of one operation: the user's setting, the environment's, or TensorFlow's default."""
    chosen = tf.config.threading.get_intra_op_parallelism_threads()
    return chosen or int(os.environ.get("TF_NUM_INTRAOP_THREADS", "0")) or num_processors()


_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def limit_threads() -> None:
    """Heeds the control group's limit, unless the user has said how many threads there shall be.

    TensorFlow itself counts the machine's processors; it reads the variables at its first operation.
    """
    for name in _VARIABLES:
        os.environ.setdefault(name, str(num_processors()))
