"""A training script that hangs once in a job, in a process of a DataLoader: loader_script.py MARK SIZE METHOD."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from elasticdl.api.data import DataShardService

AFTER = 3  # minibatches


class Images:
    """Of which one is never read."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 4 and not self._mark.exists():
            self._mark.touch()
            while True:
                signal.pause()
        return index


def main() -> None:
    mark, size, method = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    service = DataShardService(batch_size=8, dataset_size=size, num_epochs=1)
    images = None if mark.exists() else loaded(mark, method)
    for count, _ in enumerate(service):
        if count == AFTER and images is not None:
            train_step(images)


def loaded(mark: Path, method: str) -> Iterator[int]:
    from torch.utils.data import DataLoader  # the successor of the worker that hangs has no use for PyTorch

    images = iter(DataLoader(Images(mark), num_workers=1, multiprocessing_context=method))
    next(images)  # its process has imported PyTorch
    return images


def train_step(images: Iterator[int]) -> None:
    for _ in images:
        pass


if __name__ == "__main__":
    main()
