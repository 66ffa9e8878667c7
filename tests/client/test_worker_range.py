"""The number of workers as a number, a range or auto: on the command line, for a running job, and for people."""

from __future__ import annotations

import dataclasses

import pytest

from elasticdl_client import worker_range
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.errors import FlagError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus, ScalingStatus
from elasticdl_client.worker_range import MAX_WORKERS, WorkerRange, parse

FLAGS = {"job_name": "j", "runtime": "local", "model_def": "m.custom_model", "training_data": "/data"}
GROUPS = {"distribution_strategy": "AllReduceStrategy", "min_workers": "3"}


def train(**flags: str) -> JobSpec:
    return JobSpec.from_flags("train", {**FLAGS, **flags})


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("4", 4, 4), ("2:16", 2, 16), (" 3:3\n", 3, 3), ("auto", 1, MAX_WORKERS), ("AUTO", 1, MAX_WORKERS), ("0", 0, 0)],
)
def test_a_text_is_a_number_a_range_or_auto(text: str, least: int, most: int) -> None:
    assert parse(text) == WorkerRange(least, most)


@pytest.mark.parametrize("text", ["", ":", "2:", ":4", "2-4", "1:2:3", "-1:2", "many", "1:100001", "1:٣", "automatic"])
def test_any_other_text_is_none(text: str) -> None:
    with pytest.raises(FlagError, match="is not a number of workers"):
        parse(text)


def test_a_range_that_is_the_wrong_way_round_or_begins_with_0_is_rejected_with_what_to_write() -> None:
    with pytest.raises(FlagError) as caught:
        parse("16:2")
    assert caught.value.hint == "Give 2:16."
    with pytest.raises(FlagError) as caught:
        parse("0:4")
    assert caught.value.hint == "Give 1:4."


def test_a_range_on_the_command_line_is_two_flags_which_survive_every_form_of_a_job() -> None:
    spec = train(num_workers="2:16", min_gain="0.5", scaling_window="10")
    assert (spec.num_workers, spec.max_workers, spec.min_gain, spec.scaling_window) == (2, 16, 0.5, 10.0)
    assert JobSpec.from_json(spec.to_json()) == spec
    assert train(num_workers="4", max_workers="9") == train(num_workers="4:9")
    assert train(num_workers="4").max_workers == 0


def test_auto_begins_with_the_least_that_can_train() -> None:
    assert (train(num_workers="auto").num_workers, train(num_workers="auto").max_workers) == (1, MAX_WORKERS)
    assert train(num_workers="auto", **GROUPS).num_workers == 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"num_workers": "2:16", "max_workers": "8"}, "so does --max_workers"),
        ({"num_workers": "8", "max_workers": "4"}, "is less than --num_workers=8"),
        ({"num_workers": "1:4", "distribution_strategy": "Local"}, "one worker"),
        ({"num_workers": "2:8", **GROUPS}, "--min_workers=3 is more than"),
        ({"num_workers": "2", "min_gain": "0.5"}, "--min_gain is for a number of workers that follows the gain"),
        ({"num_workers": "2", "scaling_window": "5"}, "--scaling_window is for"),
        ({"num_workers": "2:8", "min_gain": "0"}, "--min_gain"),
        ({"num_workers": "0:8"}, "begins with 0 workers"),
    ],
)
def test_a_range_that_cannot_be_is_rejected_at_once(flags: dict[str, str], says: str) -> None:
    with pytest.raises(FlagError, match=says):
        train(**flags)


def test_the_servers_of_tensorflow_have_a_fixed_number_of_workers() -> None:
    flags = {
        "job_name": "j",
        "runtime": "local",
        "job_command": "python train.py",
        "need_tf_config": "true",
        "num_ps_pods": "1",
    }
    with pytest.raises(FlagError, match="TF_CONFIG names all workers"):
        JobSpec.from_flags("train", {**flags, "num_workers": "1:4"})


def test_a_running_job_gets_a_range_which_keeps_the_present_number_where_it_can() -> None:
    spec = dataclasses.replace(train(num_workers="4"), distribution_strategy=DistributionStrategy.ALL_REDUCE)
    running = JobStatus("j", JobPhase.RUNNING, started_at=1.0, workers_wanted=5)
    assert worker_range.parse_request("2:16", spec) == WorkerRange(2, 16)
    numbers = [worker_range.wanted(text, spec, running) for text in ("2:16", "1:3", "7:9", "6", "", "many")]
    assert numbers == [5, 3, 7, 6, 5, 5]
    fixed = dataclasses.replace(spec, min_workers=3)
    assert worker_range.parse_request("auto", fixed) == WorkerRange(3, MAX_WORKERS)
    with pytest.raises(FlagError, match="fewer than --min_workers"):
        worker_range.parse_request("2:16", fixed)


def test_the_status_says_what_the_number_follows() -> None:
    status = JobStatus("j", scaling=ScalingStatus("2:16", "settled", 0.048, "parameter servers"))
    assert JobStatus.from_json(status.to_json()) == status
    assert worker_range.describe(status) == (
        "2:16, settled, another worker adds 5 % of a worker's rate, bottleneck: parameter servers"
    )
    growing = JobStatus("j", scaling=ScalingStatus("2:16", "growing", 0.97))
    assert worker_range.describe(growing) == "2:16, growing, each of the last workers adds 97 % of a worker's rate"
    assert worker_range.describe(JobStatus("j")) == ""
    assert JobStatus.from_json(JobStatus("j").to_json()).scaling is None
