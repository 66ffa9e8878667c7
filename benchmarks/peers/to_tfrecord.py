"""Copies the records of a RecordIO directory into TFRecord files, for the peers.

python -m benchmarks.peers.to_tfrecord RECORDIO_DIR TFRECORD_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

import tensorflow as tf

from elasticdl.data.factory import create_reader


def main(source: str, target: str) -> None:
    Path(target).mkdir(parents=True)
    reader = create_reader(source)
    for index, shard in enumerate(reader.shards()):
        with tf.io.TFRecordWriter(str(Path(target) / f"data-{index:05d}.tfrecord")) as writer:
            for record in reader.read(shard):
                writer.write(record)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
