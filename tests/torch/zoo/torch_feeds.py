"""Feeds of all kinds over records that are numbers in words."""

import itertools
import random
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset


def custom_model() -> nn.Module:
    return nn.Linear(1, 10)


def values(records: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.tensor([int(record) for record in records], dtype=torch.int64)
    return whole.to(torch.float32).reshape(-1, 1), whole % 10


def samples(records: list[bytes]) -> list[tuple[torch.Tensor, int]]:
    return [(torch.tensor([float(record)]), int(record) % 10) for record in records]


def feed(records: list[bytes], mode: str, metadata: object) -> object:
    return values(records)[0] if mode == "prediction" else values(records)


def counting_threads(records: list[bytes], mode: str, metadata: object) -> object:
    """How many threads compute here."""
    return torch.full((len(records), 1), float(torch.get_num_threads())), values(records)[1]


def as_columns(records: list[bytes], mode: str, metadata: object) -> object:
    return tuple(column.numpy() for column in values(records))


def as_tensor_dataset(records: list[bytes], mode: str, metadata: object) -> object:
    return TensorDataset(*values(records))


class as_dataset(Dataset):  # noqa: N801
    def __init__(self, records: list[bytes], mode: str, metadata: object) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return samples(self.records[index : index + 1])[0]


class as_iterable(IterableDataset):  # noqa: N801
    def __init__(self, records: list[bytes], mode: str, metadata: object) -> None:
        self.records = records

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return iter(samples(self.records))


def as_generator(records: list[bytes], mode: str, metadata: object) -> object:
    yield from samples(records)


def records_alone(records: list[bytes]) -> object:
    return feed(records, "training", None)


def as_list(records: list[bytes], mode: str, metadata: object) -> object:
    return samples(records)


def even_ones(records: list[bytes], mode: str, metadata: object) -> object:
    return (sample for sample in samples(records) if sample[1] % 2 == 0)


def every_one_twice(records: list[bytes], mode: str, metadata: object) -> object:
    return samples([*records, *records])


def shuffled(records: list[bytes], mode: str, metadata: object) -> object:
    feature, label = values(records)
    order = torch.randperm(len(label))
    return feature[order] + torch.randn(len(label), 1) * 0.01, label[order]


def shuffled_by_python(records: list[bytes], mode: str, metadata: object) -> object:
    found = samples(records)
    random.shuffle(found)
    return found


def shuffled_by_numpy(records: list[bytes], mode: str, metadata: object) -> object:
    feature, label = values(records)
    order = np.random.permutation(len(label))
    return feature[order], label[order]


def raising_at_13(records: list[bytes], mode: str, metadata: object) -> object:
    for sample in samples(records):
        if sample[0] == 13:
            raise ValueError("thirteen")
        yield sample


def endless(records: list[bytes], mode: str, metadata: object) -> object:
    return itertools.cycle(samples(records))


def a_number(records: list[bytes], mode: str, metadata: object) -> object:
    return 5


def unequal(records: list[bytes], mode: str, metadata: object) -> object:
    feature, label = values(records)
    return feature, label[1:]


def without_labels(records: list[bytes], mode: str, metadata: object) -> object:
    return values(records)[0]


def exiting(records: list[bytes], mode: str, metadata: object) -> object:
    sys.exit("out")


def read_only(records: list[bytes], mode: str, metadata: object) -> object:
    feature, label = values(records)
    return np.frombuffer(feature.numpy().tobytes(), np.float32).reshape(-1, 1), label
