"""The processes of a loader: a pod's SIGTERM does not end them before their script, and they do not outlast it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from elasticdl.api.data import Minibatch
from elasticdl.api.pytorch.pipeline import LoaderPipeline, cause_of
from elasticdl.frameworks.torch.randomness import seed_script

JOIN_S = 60.0  # on a busy machine; a process that is not ended stays


def test_a_loaders_process_ends_with_its_script_and_not_before() -> None:
    before = set(multiprocessing.active_children())
    pipeline = LoaderPipeline(TensorDataset(torch.arange(8)), None, 0, num_workers=1)
    pipeline.get(Minibatch(1, 0, 0, 0, "", [0, 1]))
    (loader,) = set(multiprocessing.active_children()) - before
    assert loader.pid is not None
    os.kill(loader.pid, signal.SIGTERM)  # of the whole pod
    (batch,) = pipeline.get(Minibatch(1, 0, 0, 1, "", [2, 3]))
    assert batch.tolist() == [2, 3]
    pipeline.close()
    loader.terminate()  # as Python does at the script's end
    loader.join(JOIN_S)
    assert loader.exitcode == 0


class Stuck(TensorDataset):  # type: ignore[misc]
    """No signal and nothing else gets a process out of its record 3."""

    def __init__(self, *columns: torch.Tensor) -> None:
        super().__init__(*columns)
        self.has_begun = multiprocessing.Event()

    def __getitem__(self, index: int) -> object:
        if index == 3:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            self.has_begun.set()
            threading.Event().wait()
        return tuple(column[index] for column in self.tensors)


def test_a_loaders_process_ends_with_its_script_whatever_it_is_doing() -> None:
    before = set(multiprocessing.active_children())
    source = Stuck(torch.arange(8))
    pipeline = LoaderPipeline(source, None, 0, num_workers=1)
    pipeline.ask(Minibatch(1, 0, 0, 0, "", [2, 3]))
    pipeline.start()
    (loader,) = set(multiprocessing.active_children()) - before
    assert source.has_begun.wait(60)
    pipeline.close()
    try:
        loader.terminate()
        loader.join(JOIN_S)
        assert loader.exitcode == 0
    finally:
        loader.kill()


class Torn(TensorDataset):  # type: ignore[misc]
    """Its record 3 cannot be read."""

    def __getitem__(self, index: int) -> object:
        if index == 3:
            raise OSError("the file is torn")
        return tuple(column[index] for column in self.tensors)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_data_set_names_the_record_with_and_without_worker_processes(num_workers: int) -> None:
    pipeline = LoaderPipeline(Torn(torch.arange(8)), None, 0, num_workers=num_workers)
    with pytest.raises(OSError, match="the file is torn") as raised:
        pipeline.get(Minibatch(1, 0, 0, 0, "", [2, 3]))
    assert cause_of(raised.value) == "OSError: the file is torn, in record 3 of Torn"
    pipeline.close()


def test_a_batch_is_found_where_pin_memory_makes_a_list_of_each_tuple() -> None:
    pipeline = LoaderPipeline(TensorDataset(torch.arange(8)), None, 0)
    made: Any = [[[0, 0, 1], "batch"]]  # as PyTorch 2.6 gives it
    pipeline._batches = iter(made)
    minibatch = Minibatch(1, 0, 0, 1, "", [2, 3])
    assert pipeline.get(minibatch) == "batch"
    pipeline.forget(minibatch.name)
    assert not pipeline._made
    assert not pipeline._awaited


def test_seeds_are_those_of_torch_and_without_an_accelerator_no_stack_is_formatted() -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    called: set[str] = set()
    sys.setprofile(lambda frame, *_: called.add(frame.f_code.co_name))
    try:
        seed_script(7)
    finally:
        sys.setprofile(None)
    assert torch.equal(torch.rand(4), expected)
    assert "seed_script" in called
    assert "format_stack" not in called or torch.accelerator.current_accelerator() is not None
