"""A worker's report of the device that its PyTorch model is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elasticdl.frameworks.devices import cpu_text
from elasticdl.frameworks.torch.computation import device_meter

Make = Callable[..., Any]


def test_a_model_on_the_cpu_has_its_threads_and_no_device(framework: Make, digits: Any, minibatches: Make) -> None:
    tested = framework()
    meter = tested.device_meter
    assert meter.text == cpu_text(torch.get_num_threads())
    tested.train(minibatches(tested, digits)[0], 0)
    assert meter.last() is None
    assert tested.device_meter is meter


@pytest.mark.gpu
def test_a_model_on_a_gpu_has_its_name_its_settings_and_the_memory_that_pytorch_has_taken(framework: Make) -> None:
    tested = framework()
    found, properties = tested.device_meter.last(), torch.cuda.get_device_properties(0)
    assert (found.name, found.kind, found.total_bytes) == ("cuda:0", properties.name, properties.total_memory)
    assert sum(p.nbytes for p in tested._built().parameters.values()) <= found.used_bytes < found.total_bytes
    assert tested.device_meter.text.startswith(f"cuda:0 ({properties.name}, ")
    torch.backends.cuda.matmul.allow_tf32, before = True, torch.backends.cuda.matmul.allow_tf32
    try:
        assert "TF32 matrix products on" in device_meter(torch.device("cuda:0")).text
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_a_device_of_another_kind_has_its_name_alone() -> None:
    meter = device_meter(torch.device("meta"))
    assert (meter.text, meter.last()) == ("meta", None)
