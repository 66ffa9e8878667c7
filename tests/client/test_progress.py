"""What a user sees of a job's status."""

from __future__ import annotations

import dataclasses
import io

import pytest

from elasticdl_client import report
from elasticdl_client.job_status import Ended, EpochCoverage, JobPhase, JobStatus, LostPod, PodStatus
from elasticdl_client.progress import PlainDisplay, RichDisplay, news, summary

RUNNING = JobStatus(
    "job",
    JobPhase.RUNNING,
    generation=1,
    epoch=1,
    num_epochs=3,
    records_done=1024,
    records_total=27000,
    records_per_second=2345.6,
    workers_alive=1,
    workers_wanted=2,
    ps_alive=2,
    ps_wanted=2,
    model_version=16,
    loss=0.3456789,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_summary_says_where_the_job_is() -> None:
    assert summary(RUNNING) == (
        "records 1,024/27,000 (4%), 2,346 records/s, workers 1/2, ps 2/2, epoch 1/3, step 16, loss 0.3457"
    )
    endless = dataclasses.replace(RUNNING, records_total=0, num_epochs=-1)
    assert summary(endless).startswith("records 1,024, ")
    assert "epoch 1," in summary(endless)
    timed = dataclasses.replace(RUNNING, elapsed_seconds=75.0, eta_seconds=3700.0)
    assert ", 2,346 records/s, elapsed 75s, ETA 61m, workers 1/2, " in summary(timed)
    assert ", elapsed 75s, workers" in summary(dataclasses.replace(timed, eta_seconds=None))


def test_plain_lines_come_when_something_changed_and_not_too_often() -> None:
    stream, now = io.StringIO(), [0.0]
    display = PlainDisplay(stream, lambda: now[0])
    display.update(RUNNING)
    now[0] = 1.0
    display.update(dataclasses.replace(RUNNING, records_done=2048))
    assert len(stream.getvalue().splitlines()) == 1
    now[0] = 2.5
    display.update(dataclasses.replace(RUNNING, records_done=2048))
    now[0] = 5.0
    display.update(dataclasses.replace(RUNNING, records_done=2048, updated_at=5.0, elapsed_seconds=5.0))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "2,048/27,000" in lines[1]


def test_news_are_evaluations_complete_epochs_and_a_new_master() -> None:
    evaluated = dataclasses.replace(RUNNING, metrics={"accuracy": 0.91, "auc": 0.5}, metrics_step=16)
    assert news(RUNNING, evaluated) == ["evaluation at step 16: accuracy 0.91, auc 0.5"]
    assert news(evaluated, evaluated) == []
    incomplete = dataclasses.replace(evaluated, coverage=(EpochCoverage(1, 9000, 8000, lost=1000),))
    assert news(evaluated, incomplete) == []
    complete = dataclasses.replace(evaluated, coverage=(EpochCoverage(1, 9000, 9000),))
    assert news(incomplete, complete) == ["epoch 1: records 9000, committed 9000, repeated 0, lost 0"]
    assert news(complete, dataclasses.replace(complete, generation=2)) == ["master restarted (generation 2)"]
    waiting = dataclasses.replace(RUNNING, message="worker 1 waits for a slot")
    assert news(RUNNING, waiting) == ["worker 1 waits for a slot"]
    assert news(RUNNING, dataclasses.replace(waiting, phase=JobPhase.FAILED)) == []


def test_a_terminal_gets_a_bar_and_the_news_above_it() -> None:
    stream = Terminal()
    display = RichDisplay(stream)
    display.update(dataclasses.replace(RUNNING, elapsed_seconds=75.0, eta_seconds=30.0))
    display.update(dataclasses.replace(RUNNING, metrics={"accuracy": 0.91}, metrics_step=16))
    display.say("[not markup]")
    display.close()
    assert "evaluation at step 16: accuracy 0.91" in stream.getvalue()
    assert "[not markup]" in stream.getvalue()
    assert "1,024/27,000" in stream.getvalue()
    assert "elapsed 75s, ETA 30s, workers 1/2" in stream.getvalue()


def test_the_end_of_a_job_says_what_was_left_out_and_how_stale_gradients_were(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = JobStatus(
        "j",
        JobPhase.SUCCEEDED,
        coverage=(EpochCoverage(1, 100, 86, skipped=10, filtered=4, augmented=7),),
        records_skipped=10,
        staleness=(3, 1),
        gradients_refused=2,
    )
    report.print_end("j", Ended(0, "", status), written="", logs="l", hint="")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "epoch 1: records 100, committed 86, repeated 0, lost 0, skipped 10, filtered 4, augmented 7"
    assert "staleness of gradients: 0 75%, 1 25%; refused 2" in lines
    assert "warning: 10 records were left out by --nan_policy=skip" in lines


def test_each_lost_pod_and_its_successor_are_a_line() -> None:
    def status(*lost: LostPod, **phases: str) -> JobStatus:
        pods = tuple(PodStatus(f"elasticdl-job-{name.replace('_', '-')}", "worker", phases[name]) for name in phases)
        return dataclasses.replace(RUNNING, pods=pods, lost_pods=lost)

    killed = LostPod("elasticdl-job-worker-1", "worker", 10.0, "Killed, exit code 137")
    before = status(worker_0="Running", worker_1="Running")
    assert news(status(worker_0="Running"), before) == []  # as many as were wanted, one by one
    after = status(killed, worker_0="Running", worker_1="Failed")
    assert news(before, after) == ["worker-1 lost: Killed, exit code 137"]
    assert news(None, after) == []
    again = status(killed, worker_0="Running", worker_1="Failed", worker_2="Running")
    assert news(after, again) == ["worker-2 runs"]
    assert news(again, again) == []
    assert news(before, dataclasses.replace(again, exit_code=1)) == []


def test_a_server_that_is_lost_twice_is_told_twice() -> None:
    server = PodStatus("elasticdl-job-ps-0", "ps", "Running")
    first, second = (LostPod("elasticdl-job-ps-0", "ps", at) for at in (10.0, 20.0))
    before = dataclasses.replace(RUNNING, pods=(server,), lost_pods=(first,))
    after = dataclasses.replace(before, lost_pods=(first, second))
    assert news(before, after) == ["ps-0 lost", "ps-0 runs"]
