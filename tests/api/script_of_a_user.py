"""A training script as a user has it: counts what it is given; misbehaves as its arguments say.

script_of_a_user.py NOTES [--size N] [--hold-at K] [--after SECONDS]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path

from script_waits import hold, wait_to_begin

from elasticdl.api.data import DataShardService


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("notes", type=Path)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument(
        "--hold-at",
        type=int,
        default=-1,
        help="worker 0 waits there for a writer of the pipe `go`",
    )
    parser.add_argument("--after", type=float, default=0.0, help="seconds of work after the end of the data")
    given = parser.parse_args()
    worker = os.environ.get("WORKER_ID", "alone")
    data = DataShardService(batch_size=8, dataset_size=given.size, num_epochs=2, num_minibatches_per_shard=2)
    print(f"worker {worker} of {os.environ.get('WORKER_NUM')}: {data.get_minibatch_count_per_epoch()} minibatches")
    wait_to_begin(given.notes, worker)
    with (given.notes / f"worker-{worker}").open("a") as notes:
        for number, minibatch in enumerate(data):
            if worker == "0" and number == given.hold_at:
                data.close()  # trained batches have been reported
                hold(given.notes)
            notes.write(json.dumps([*minibatch.name, len(minibatch), len(minibatch.records)]) + "\n")
            notes.flush()
    threading.Event().wait(given.after)
    (given.notes / f"done-{worker}").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
