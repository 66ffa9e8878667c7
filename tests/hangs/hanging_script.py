"""A training script that hangs once in a job, in an endless loop of short waits: hanging_script.py MARK SIZE."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from elasticdl.api.data import DataShardService

AFTER = 3  # minibatches


def main() -> None:
    mark, size = Path(sys.argv[1]), int(sys.argv[2])
    for count, _ in enumerate(DataShardService(batch_size=8, dataset_size=size, num_epochs=1)):
        if count == AFTER:
            train_step(mark)


def train_step(mark: Path) -> None:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    threading.Event().wait()


if __name__ == "__main__":
    main()
