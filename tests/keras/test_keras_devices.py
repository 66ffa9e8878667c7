"""A worker's report of the device that its Keras model is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from elasticdl.frameworks.devices import cpu_text
from elasticdl.frameworks.keras.computation import used_bytes


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU, and the model is there")
def test_a_model_on_the_cpu_has_its_threads_and_no_device(
    framework: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "3")
    meter = framework("conv.custom_model").device_meter
    assert (meter.text, meter.last()) == ("the CPU (3 threads)", None)


@pytest.mark.parametrize(("num_threads", "text"), [(1, "the CPU (1 thread)"), (2, "the CPU (2 threads)")])
def test_the_threads_of_a_cpu_are_counted(num_threads: int, text: str) -> None:
    assert cpu_text(num_threads) == text


def test_a_device_of_which_nothing_is_counted_has_no_bytes() -> None:
    """ValueError is also for one that is not there; whether the CPU's bytes are counted depends on the process."""
    assert used_bytes("GPU:7") == 0
