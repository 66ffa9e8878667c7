"""Records of the digits that a user's `feed` does not take: the sevens of one shade."""

from __future__ import annotations

from tests.chaos.job import LocalJob
from tests.chaos.jobs import RealJob
from tests.chaos.scenarios import coverage_of
from tests.e2e.all_reduce_jobs import KERAS, TORCH

NOT_FINITE = {
    KERAS: """
        good_feed = feed

        def feed(dataset, mode, metadata):
            def spoil(image, label):
                ugly = tf.logical_and(tf.equal(label, 7), tf.equal(image[21], 3.0))
                return tf.where(ugly, image * float("nan"), image) if mode == "training" else image, label

            return good_feed(dataset, mode, metadata).map(spoil)
        """,
    TORCH: """
        good_feed = feed

        def feed(records, mode, metadata):
            image, label = good_feed(records, mode, metadata)
            ugly = (label == 7) & (image[:, 21] == 3 / 16)
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
                tf.debugging.Assert(tf.logical_not(bad), ["an ugly seven"])
                return image, label

            return good_feed(dataset, mode, metadata).map(check)
        """,
    TORCH: """
        good_feed = feed

        def feed(records, mode, metadata):
            image, label = good_feed(records, mode, metadata)
            if ((label == 7) & (image[:, 21] == 3 / 16)).any():
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
        assert epoch.committed + epoch.skipped == epoch.records == job.num_train
        assert (epoch.repeated, epoch.lost) == (0, 0)
    assert f"skipped {coverage[0].skipped}" in "\n".join(running.output)
    assert running.metrics()["accuracy"] >= 0.9
