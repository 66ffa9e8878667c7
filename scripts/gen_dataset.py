"""Write RecordIO files of tf.train.Example from well-known data sets.

    python scripts/gen_dataset.py NAME --source DIR --output DIR --records_per_shard N

writes OUTPUT/train/data-00000, … and OUTPUT/validation/data-00000, …, with a file SHA256SUMS next to them for
sha256sum --check and for every reader.  elasticdl/data/datasets describes the records.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elasticdl.data.datasets import Split
from elasticdl.data.datasets.catalogue import NAMES, open_dataset, write_split
from elasticdl.data.datasets.images import image_splits
from elasticdl.data.datasets.tables import ClickLog
from elasticdl.data.recordio import Compressor
from elasticdl_client.errors import DataError, ElasticDLError


class Progress:
    """Prints the progress of writing one split: on a terminal in one line, elsewhere every ten seconds."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._started = time.monotonic()
        self._last = self._started

    def __call__(self, num_records: int, num_files: int) -> None:
        now = time.monotonic()
        done = num_records == self._split.num_records
        on_terminal = sys.stderr.isatty()
        if not done and now - self._last < (0.2 if on_terminal else 10):
            return
        self._last = now
        rate = f"{num_records / max(now - self._started, 1e-9):,.0f} records/s"
        line = f"{self._split.name}: {num_records:,} of {self._split.num_records:,} records, {num_files} files, {rate}"
        if on_terminal:
            print(f"\r\033[K{line}", end="\n" if done else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def download_mnist() -> list[Split]:
    """Download the 60,000 + 10,000 images with Keras, and return them as splits."""
    import keras

    try:
        train, test = keras.datasets.mnist.load_data()
    except Exception as error:  # Keras has no narrower type for a network failure
        raise DataError(
            f"Keras cannot download MNIST: {error}.", "Name a directory with the IDX files by --source."
        ) from error
    return image_splits(train, test)


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument(
        "--source",
        default="",
        help="directory of the original files; digits, clicks: none; cifar10, imagenet, criteo: generated without",
    )
    parser.add_argument("--output", required=True, help="directory to write to")
    parser.add_argument("--records_per_shard", type=positive, default=4096, help="records in a file (default 4096)")
    parser.add_argument("--compressor", choices=["none", "snappy", "gzip"], default="none", help="(default none)")
    parser.add_argument(
        "--num_records", type=positive, default=100_000, help="clicks: records to train on (default 100000)"
    )
    parser.add_argument(
        "--num_ids", type=positive, default=1_000_000, help="clicks: size of the id space (default 1000000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="clicks: of the records and the hidden model (default 0)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    try:
        if arguments.name == "mnist" and not arguments.source:
            splits = download_mnist()
        else:
            click_log = ClickLog(arguments.num_records, arguments.num_ids, arguments.seed)
            splits = open_dataset(arguments.name, arguments.source, click_log)
        for split in splits:
            compressor = Compressor[arguments.compressor.upper()]
            write_split(split, arguments.output, arguments.records_per_shard, compressor, Progress(split))
    except ElasticDLError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.name} is in {arguments.output}: {', '.join(split.name for split in splits)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
