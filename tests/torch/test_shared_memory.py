"""The memory that a worker shares with an input process: objects come back as they were put, and tensors writable."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elasticdl.frameworks.torch.input_processes import MOST_BYTES
from elasticdl.frameworks.torch.shared_memory import TaskMemory
from elasticdl_client.errors import ModelDefinitionError

WHOLE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
TENSORS = {
    "contiguous": WHOLE,
    "with the channels last": WHOLE.to(memory_format=torch.channels_last),
    "with one channel": WHOLE[:, :1].contiguous(memory_format=torch.channels_last),
    "a part of a larger one": WHOLE[1:, :, 1:3],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 1000),
    "transposed": WHOLE[0, 0].T,
    "a number": torch.tensor(7, dtype=torch.int16),
    "empty": torch.empty(0, 3, dtype=torch.uint8),
    "boolean": torch.tensor([True, False]),
    "of 16 bits": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j]),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "with a gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_with_its_values_type_and_strides(name: str) -> None:
    memory = TaskMemory.create()
    tensor = TENSORS[name]
    found = memory.get(memory.put(tensor))
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(found.to_dense(), tensor.to_dense())
    if tensor.layout == torch.strided:
        assert found.stride() == tensor.stride()


def test_any_number_of_tensors_and_of_large_records_has_a_place_that_fits_into_a_datagram() -> None:
    memory = TaskMemory.create()
    tensors = [torch.full((2,), k) for k in range(20_000)]
    of_tensors = memory.put(tensors)
    found = memory.get(of_tensors)
    assert torch.equal(torch.stack(found), torch.stack(tensors))
    for one in (found[0], found[-1]):
        one += 1  # writable
    records = [b"%d" % (k % 10) * 4100 for k in range(8000)]
    of_records = memory.put_records(records)
    assert memory.get_records(of_records) == records
    assert max(len(pickle.dumps(place)) for place in (of_tensors, of_records)) < MOST_BYTES / 2


def test_a_slice_of_a_large_tensor_takes_the_memory_of_the_slice() -> None:
    memory = TaskMemory.create()
    columns = torch.arange(1_000_000).reshape(10, 100_000)
    assert sum(memory.put(columns[3:5]).lengths) < 1_610_000
    of_columns = memory.put(columns[:, 3:5])
    assert sum(of_columns.lengths) < 10_000
    assert torch.equal(memory.get(of_columns), columns[:, 3:5])


def identity(descriptor: int) -> tuple[int, int]:
    """Device and number of a file: a descriptor is given to another file at once."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def open_files() -> set[tuple[int, int]]:
    """The files that this process has open."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            found.add(identity(int(descriptor)))
    return found


def test_objects_share_no_bytes_and_outlive_their_memory() -> None:
    memory = TaskMemory.create()
    values = [{"a": np.arange(5), "b": [torch.ones(3), "text", memoryview(b"bytes"), None, np.empty(0)]} for _ in "12"]
    first, second = (memory.get(place) for place in [memory.put(value) for value in values])
    file = identity(memory.descriptor)
    del memory
    gc.collect()
    assert file not in open_files()
    first["a"][:] = 7
    first["b"][0].fill_(7)
    assert second["a"].tolist() == [0, 1, 2, 3, 4]
    assert second["b"][0].tolist() == [1, 1, 1]
    assert bytes(second["b"][2]) == b"bytes"


def test_the_memory_of_an_object_is_unmapped_with_its_last_tensor() -> None:
    memory = TaskMemory.create()
    found = memory.get(memory.put(torch.ones(1000)))
    view = found[10:20]
    del found
    assert num_mappings(memory) == 2  # the first page, which says whether the task is cancelled, is the other one
    assert view.sum() == 10
    del view
    assert num_mappings(memory) == 1


def num_mappings(memory: TaskMemory) -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count(f" {os.fstat(memory.descriptor).st_ino} ")


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: {"a": [1, (k for k in "ab")]}, r"\['a'\]\[1\] is a generator"),
        (lambda: [lambda: 1], r"\[0\] is a function"),
    ],
)
def test_an_object_that_cannot_be_pickled_is_named(made: Callable[[], Any], name: str) -> None:
    with pytest.raises(ModelDefinitionError, match=rf"cannot send: {name} \(.+\)"):
        TaskMemory.create().put(made())
