"""Records of the digits that spoil a minibatch, or that a user's `feed` does not take: sevens, each of one shade."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chaos.job import LocalJob
from tests.chaos.jobs import RealJob
from tests.chaos.scenarios import coverage_of
from tests.e2e.all_reduce_jobs import KERAS, TORCH

NOT_FINITE = {
    KERAS: """
        finite_feed = feed

        def feed(dataset, mode, metadata):
            def spoil(image, label):
                ugly = tf.logical_and(tf.equal(label, 7), tf.equal(image[21], 4.0))
                return tf.where(ugly, image * float("nan"), image) if mode == "training" else image, label

            return finite_feed(dataset, mode, metadata).map(spoil)
        """,
    TORCH: """
        finite_feed = feed

        def feed(records, mode, metadata):
            image, label = finite_feed(records, mode, metadata)
            ugly = (label == 7) & (image[:, 21] == 4 / 16)
            if mode == "training":
                image[ugly] *= float("nan")
            return image, label
        """,
}
RAISES = {
    KERAS: """
        good_feed = feed

        def feed(dataset, mode, metadata):
            def check(image, label):
                bad = tf.logical_and(tf.equal(label, 7), tf.equal(image[21], 3.0))
                tf.debugging.Assert(tf.logical_or(tf.logical_not(bad), mode != "training"), ["an ugly seven"])
                return image, label

            return good_feed(dataset, mode, metadata).map(check)
        """,
    TORCH: """
        good_feed = feed

        def feed(records, mode, metadata):
            image, label = good_feed(records, mode, metadata)
            if mode == "training" and ((label == 7) & (image[:, 21] == 3 / 16)).any():
                raise ValueError("an ugly seven")
            return image, label
        """,
}


def check_some_are_skipped(running: LocalJob, job: RealJob) -> None:
    """--nan_policy=skip: some minibatches are left out and counted, and the model is good all the same."""
    coverage = coverage_of(running)
    assert len(coverage) == job.num_epochs
    for epoch in coverage:
        assert 0 < epoch.skipped < epoch.records / 2, running.story()
        assert epoch.committed + epoch.skipped + epoch.quarantined == epoch.records == job.num_train
        assert (epoch.repeated, epoch.lost) == (0, 0)
    assert f"skipped {coverage[0].skipped}" in "\n".join(running.output)
    assert running.metrics()["accuracy"] >= 0.9


def records_set_aside(running: LocalJob, job: RealJob) -> list[dict[str, object]]:
    """--max_bad_records: some records are set aside in each epoch. Return the lines of their files."""
    written = [json.loads(line) for file in bad_records(running).iterdir() for line in file.read_text().splitlines()]
    coverage = coverage_of(running)
    assert len(coverage) == job.num_epochs
    for epoch in coverage:
        assert epoch.quarantined == len(written) > 0, running.story()
        assert epoch.committed + epoch.skipped == job.num_train - epoch.quarantined
        assert (epoch.repeated, epoch.lost) == (0, 0)
    return written


def bad_records(running: LocalJob) -> Path:
    return running.job_dir / "bad_records"
