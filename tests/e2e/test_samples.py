"""A user's `feed` that drops or repeats samples: whole jobs, whose coverage says how many, and strict ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos.job import LocalJob
from tests.chaos.jobs import DIGITS
from tests.chaos.kills import Kill, run_life
from tests.chaos.scenarios import LEASE_TIMEOUT_S, coverage_of
from tests.e2e.all_reduce_jobs import KERAS, TORCH, zoo_of

NUM_TRAIN, NUM_TASKS, PER_TASK = 1437, 12, 128
TAKE, REPEAT, FILTER = "take", "repeat", "filter"
FEEDS = {
    KERAS: """
        good_feed = feed

        def feed(dataset, mode, metadata):
            samples = good_feed(dataset, mode, metadata)
            if mode not in {modes}:
                return samples
            return samples.{operation}
        """,
    TORCH: """
        good_feed = feed

        def feed(records, mode, metadata):
            image, label = good_feed(records, mode, metadata)
            if mode not in {modes}:
                return image, label
            chosen = {operation}
            return image[chosen], label[chosen]
        """,
}
OPERATIONS = {
    KERAS: {TAKE: "take(5)", REPEAT: "repeat(2)", FILTER: "filter(lambda image, label: label < 5)"},
    TORCH: {TAKE: "slice(5)", REPEAT: "torch.arange(len(label)).repeat(2)", FILTER: "label < 5"},
}
SYNC = {"use_async": "false"}
ALL_REDUCE = {"distribution_strategy": "AllReduceStrategy", "num_ps_pods": 0, "collective_timeout": 2.0}
FIXED = {**ALL_REDUCE, "fixed_global_batch": 64}
LOCAL = {"distribution_strategy": "Local", "num_ps_pods": 0, "num_workers": 1}
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DIGITS.make_data(tmp_path_factory.mktemp("data"))


def job_of(framework: str, operation: str, directory: Path, data: Path, **flags: object) -> LocalJob:
    """Not started yet."""
    modes = flags.pop("modes", ("training",))
    code = FEEDS[framework].format(operation=OPERATIONS[framework][operation], modes=modes)
    given = {"num_epochs": 1, "validation_data": "", "lease_timeout": LEASE_TIMEOUT_S, **flags}
    zoo = zoo_of(framework, directory, code)
    return DIGITS.local_job(directory / "job", data, model_zoo=zoo, model_def="model.custom_model", **given)


def lines_of(running: LocalJob, beginning: str) -> list[str]:
    """Of the master's log."""
    return re.findall(rf"{beginning}.*", running.master_log(), re.MULTILINE)


def check_counted(running: LocalJob, operation: str) -> None:
    """Every epoch's line says what `feed` has made of the records, and so does the status."""
    for epoch in coverage_of(running):
        filtered, augmented = epoch.filtered, epoch.augmented
        if operation == TAKE:
            assert (filtered, augmented) == (NUM_TRAIN - 5 * NUM_TASKS, 0), running.story()
        elif operation == REPEAT:
            assert (filtered, augmented) == (0, NUM_TRAIN), running.story()
        else:
            assert 0 < filtered < NUM_TRAIN, running.story()
        assert (epoch.records, epoch.committed) == (NUM_TRAIN, NUM_TRAIN - filtered)
        assert (epoch.repeated, epoch.lost) == (0, 0)
        line = f"Epoch {epoch.epoch}: {epoch}"
        assert (f"filtered {filtered}" in line) == bool(filtered)
        assert (f"augmented {augmented}" in line) == bool(augmented)
        assert lines_of(running, line)
    (warning,) = lines_of(running, r"feed(?: \(.*\))? makes ")
    assert "--strict_feed" in warning


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("framework", "operation", "flags"),
    [
        pytest.param(KERAS, TAKE, {"num_workers": 1}, id="keras-take-async"),
        pytest.param(TORCH, REPEAT, ALL_REDUCE, id="torch-repeat-all-reduce"),
        pytest.param(KERAS, FILTER, FIXED, id="keras-filter-fixed"),
        pytest.param(KERAS, REPEAT, SYNC, id="keras-repeat-sync", marks=FULL),
        pytest.param(KERAS, REPEAT, LOCAL, id="keras-repeat-local", marks=FULL),
        pytest.param(KERAS, FILTER, ALL_REDUCE, id="keras-filter-all-reduce", marks=FULL),
        pytest.param(TORCH, FILTER, ALL_REDUCE, id="torch-filter-all-reduce", marks=FULL),
        pytest.param(TORCH, TAKE, FIXED, id="torch-take-fixed", marks=FULL),
        pytest.param(TORCH, TAKE, LOCAL, id="torch-take-local", marks=FULL),
    ],
)
def test_samples_that_feed_drops_or_repeats_stand_in_the_coverage(
    framework: str, operation: str, flags: dict[str, object], tmp_path: Path, digits: Path
) -> None:
    running = job_of(framework, operation, tmp_path, digits, **flags).start()
    assert running.wait(200) == 0, running.story()
    check_counted(running, operation)
    if framework == KERAS:
        assert lines_of(running, re.escape(f"feed ({operation} in it) makes "))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [{}, SYNC, ALL_REDUCE, FIXED], ids=["async", "sync", "all-reduce", "fixed"])
def test_the_counts_are_exact_though_workers_servers_and_the_master_are_killed(
    flags: dict[str, object], tmp_path: Path, digits: Path
) -> None:
    job = replace(DIGITS, num_epochs=30)
    running = job_of(KERAS, FILTER, tmp_path, digits, **{**flags, "num_epochs": job.num_epochs}).start()
    steps = job.num_epochs * NUM_TASKS * 2
    life = [Kill(role, at_version=steps * share // 100) for role, share in _kills("num_ps_pods" not in flags)]
    run_life(running, life)
    assert running.wait(400) == 0, running.story()
    coverage = coverage_of(running)
    assert len(coverage) == job.num_epochs
    assert len({epoch.filtered for epoch in coverage}) == 1, running.story()
    for epoch in coverage:
        assert (epoch.committed + epoch.filtered, epoch.repeated, epoch.lost) == (NUM_TRAIN, 0, 0)


def _kills(has_servers: bool) -> Iterator[tuple[Role, int]]:
    yield from ((Role.WORKER, 15), (Role.MASTER, 30), (Role.WORKER, 45), (Role.MASTER, 60), (Role.WORKER, 75))
    if has_servers:
        yield Role.PS, 50


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("framework", "flags"),
    [
        pytest.param(KERAS, {"num_workers": 1}, id="keras-async"),
        pytest.param(TORCH, LOCAL, id="torch-local"),
        pytest.param(KERAS, FIXED, id="keras-fixed", marks=FULL),
        pytest.param(TORCH, ALL_REDUCE, id="torch-all-reduce", marks=FULL),
    ],
)
def test_a_strict_job_fails_before_a_sample_is_trained_on(
    framework: str, flags: dict[str, object], tmp_path: Path, digits: Path
) -> None:
    running = job_of(framework, TAKE, tmp_path, digits, strict_feed=True, max_task_failures=1, **flags).start()
    assert running.wait(120) == 1, running.story()
    text = "\n".join(running.output)
    assert "--strict_feed: feed" in text, running.story()
    assert re.search(r"makes 5 samples of (128|29) records", text), running.story()
    assert ("(take in it)" in text) == (framework == KERAS)
    assert "Traceback" not in text
    status = running.status()
    assert status is not None
    assert status.model_version == 0


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_strict_job_with_a_feed_of_one_sample_a_record_is_like_any_other(tmp_path: Path, digits: Path) -> None:
    running = job_of(KERAS, TAKE, tmp_path, digits, modes=("prediction",), strict_feed=True).start()
    assert running.wait(200) == 0, running.story()
    assert lines_of(running, f"Epoch 1: records {NUM_TRAIN}, committed {NUM_TRAIN}, repeated 0, lost 0$")
    assert not lines_of(running, r"feed(?: \(.*\))? makes ")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_steps_that_are_planned_by_records_have_no_place_for_more_samples(tmp_path: Path, digits: Path) -> None:
    running = job_of(KERAS, REPEAT, tmp_path, digits, max_task_failures=1, **FIXED).start()
    assert running.wait(120) == 1, running.story()
    text = "\n".join(running.output)
    assert "feed (repeat in it) makes 256 samples of 128 records: 8 minibatches instead of 4" in text, running.story()
    assert "--fixed_global_batch" in text
    assert "Traceback" not in text


@pytest.mark.full
@pytest.mark.timeout(300)
def test_an_evaluation_beside_training_says_how_many_samples_it_has_measured(tmp_path: Path, digits: Path) -> None:
    flags = {"validation_data": digits / "validation", "modes": ("evaluation",)}
    running = job_of(KERAS, TAKE, tmp_path, digits, **flags).start()
    assert running.wait(200) == 0, running.story()
    (line,) = lines_of(running, r"Evaluation\[")
    assert "measured the 15 samples that feed (its take) makes of 360 records" in line
    assert lines_of(running, f"Epoch 1: records {NUM_TRAIN}, committed {NUM_TRAIN}, repeated 0, lost 0$")
