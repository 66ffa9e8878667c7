"""benchmarks.gpu keeps up with the code that it measures: parts of it run on the CPU, for a step or a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import gpu, gpu_stall, gpu_steps
from benchmarks.gpu_jobs import steady_rate
from benchmarks.images import random_jpegs
from benchmarks.zoo.torch_resnet50 import SIZE, custom_model, feed_jpeg
from elasticdl.data.example import encode_example


@pytest.mark.parametrize("kind", ["plain", "local", "alone", "member"])
def test_a_step_of_each_kind_changes_the_same_number_of_parameters(kind: str) -> None:
    (workload,) = (one for one in gpu_steps.WORKLOADS["cpu"] if one.autocasts)
    changed: list[torch.optim.Optimizer] = []
    handle = register_optimizer_step_post_hook(lambda *given: changed.append(given[0]))
    try:
        gpu_steps.steps_of(workload)[kind]()
    finally:
        handle.remove()
    (optimizer,) = changed
    parameters = optimizer.param_groups[0]["params"]
    assert sum(one.numel() for one in parameters) == 385_392
    assert all(len(optimizer.state[one]) for one in parameters)
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in parameters if one.dim() == 4)


def test_steps_are_made_until_a_checkpoint_of_the_model_is_whole(tmp_path: Path) -> None:
    training = gpu_stall.Training("cpu", tmp_path)
    training.steps(2)
    assert min(training.steps_of_checkpoint()) > 0
    (checkpoint,) = tmp_path.iterdir()
    assert checkpoint.name == "version-4"
    with np.load(checkpoint / gpu_stall.STATE_FILE) as arrays:
        assert sum(arrays[name].size for name in arrays if name.endswith("/exp_avg")) == 1_581_066


def test_the_network_of_the_aims_is_resnet_50() -> None:
    with torch.device("meta"):
        module = custom_model()
    assert sum(one.numel() for one in module.parameters()) == 25_557_032
    assert sum(isinstance(one, torch.nn.Conv2d) for one in module.modules()) == 53


def test_a_jpeg_file_becomes_a_crop_whose_channels_are_last_in_memory() -> None:
    pytest.importorskip("PIL", reason="the extra images is not installed")
    files, labels = random_jpegs(2)
    pairs = zip(files, labels.tolist(), strict=True)
    images, given = feed_jpeg([encode_example({"image": file, "label": label}) for file, label in pairs], "training", 0)
    assert images.shape == (2, 3, SIZE, SIZE)
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert given.tolist() == labels.tolist()


def test_the_rate_of_steps_in_bursts_is_that_of_whole_bursts() -> None:
    bursts = np.concatenate([second + np.arange(8) * 0.01 for second in (0.0, 2.0, 4.0, 6.0)])
    assert steady_rate(bursts[3:-2]) == pytest.approx(4.0)
    even = np.arange(100) * 0.25
    assert steady_rate(even) == pytest.approx(4.0)
    with_two_hiccups = even + np.where(np.arange(100) >= 50, 3.0, 0.0) + np.where(np.arange(100) >= 52, 3.0, 0.0)
    assert steady_rate(with_two_hiccups) == pytest.approx(99 / (99 * 0.25 + 6))


def test_a_part_that_fails_leaves_the_figures_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"of_another_part": 1.0}
    assert not gpu.measure("that_is_none", "cuda", True, figures)
    assert figures == {"of_another_part": 1.0}
    assert "No module named 'benchmarks.gpu_that_is_none'" in capsys.readouterr().err
