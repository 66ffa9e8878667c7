"""The display of a job's status."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import shlex
import sys

import pytest

from elasticdl.master.core.event_log import MAX_EVENTS, EventLog
from elasticdl_client import report
from elasticdl_client.choices import JobType, Runtime
from elasticdl_client.data_sources import ROW
from elasticdl_client.job_events import EventHistory, EventKind, JobEvent, from_journal, to_journal
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import MASTER_RESTARTED, Ended, EpochCoverage, JobPhase, JobStatus, PodStatus
from elasticdl_client.news import Headline, News
from elasticdl_client.progress import PlainDisplay, RichDisplay, coverage_lines, summary

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
    assert "workers 1/2, ps 2/2, goodput 75%, epoch" in summary(
        dataclasses.replace(RUNNING, worker_seconds={"useful": 3.0, "starting": 1.0})
    )
    assert ", elapsed 75s, workers" in summary(dataclasses.replace(timed, eta_seconds=None))


def test_pods_that_outlive_the_master_run_before_they_have_registered_again() -> None:
    pods = tuple(PodStatus(f"elasticdl-j-{role}-0", role, "Running") for role in ("worker", "ps", "master"))
    restarted = dataclasses.replace(RUNNING, workers_alive=0, ps_alive=0, pods=pods, message=f"{MASTER_RESTARTED}: …")
    assert "workers 1/2, ps 1/2, " in summary(restarted)
    assert "workers 0/2, ps 0/2, " in summary(dataclasses.replace(restarted, message="waiting for workers"))


def test_plain_lines_come_when_something_changed_and_not_too_often() -> None:
    stream, now = io.StringIO(), [0.0]
    display = PlainDisplay(stream, None, lambda: now[0])
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


def news(before: JobStatus | None, now: JobStatus) -> list[str]:
    return [headline.text for headline in News(before).lines(now)]


class Broken(io.StringIO):
    """A stream that cannot be written."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))


def test_a_full_disk_of_the_output_does_not_end_the_job_and_a_closed_pipe_does() -> None:
    PlainDisplay(Broken(errno.ENOSPC)).say("a line")
    with pytest.raises(BrokenPipeError):
        PlainDisplay(Broken(errno.EPIPE)).say("a line")


def test_news_are_evaluations_complete_epochs_and_why_the_job_waits() -> None:
    evaluated = dataclasses.replace(RUNNING, metrics={"accuracy": 0.91, "auc": 0.5}, metrics_step=16)
    assert news(RUNNING, evaluated) == ["evaluation at step 16: accuracy 0.91, auc 0.5"]
    assert news(evaluated, evaluated) == []
    incomplete = dataclasses.replace(evaluated, coverage=(EpochCoverage(1, 9000, 8000, lost=1000),))
    assert news(evaluated, incomplete) == []
    complete = dataclasses.replace(evaluated, coverage=(EpochCoverage(1, 9000, 9000),))
    assert news(incomplete, complete) == ["epoch 1: records 9000, committed 9000, repeated 0, lost 0"]
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
    report.print_end(JobSpec(job_name="j"), Ended(0, "", status), None, logs="l", hint="")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "epoch 1: records 100, committed 86, repeated 0, lost 0, skipped 10, filtered 4, augmented 7"
    assert "staleness of gradients: 0 75%, 1 25%; refused 2" in lines
    assert "warning: 10 records were left out by --nan_policy=skip" in lines


LOST = JobEvent(7, 1.0, EventKind.POD_LOST, "worker-1", "killed by SIGKILL", 0, {"reason": "Killed"})


@pytest.mark.parametrize("display", [PlainDisplay, RichDisplay])
def test_lines_are_shown_as_they_were_printed(display: type[PlainDisplay] | type[RichDisplay]) -> None:
    stream = Terminal()
    shown = display(stream)
    shown.say("std::x::y 1:100:1 [red]red[/red] :smile:")
    shown.close()
    assert "std::x::y 1:100:1 [red]red[/red] :smile:" in stream.getvalue()


@pytest.mark.parametrize("display", [PlainDisplay, RichDisplay])
def test_a_lost_worker_is_a_line_on_every_stream(display: type[PlainDisplay] | type[RichDisplay]) -> None:
    stream = Terminal()
    shown = display(stream)
    shown.update(RUNNING, EventHistory((LOST,)))
    shown.update(RUNNING, EventHistory((LOST,)))
    shown.close()
    assert stream.getvalue().count("worker-1 lost: Killed, killed by SIGKILL") == 1


@pytest.mark.parametrize("minutes", [1, 60])
def test_150_epochs_print_at_most_40_lines(minutes: int, capsys: pytest.CaptureFixture[str]) -> None:
    stream, now = io.StringIO(), [0.0]
    display, status = PlainDisplay(stream, None, lambda: now[0]), dataclasses.replace(RUNNING, num_epochs=150)
    for epoch in range(1, 151):
        now[0] = minutes * 60 * epoch / 150
        coverage = tuple(EpochCoverage(k, 1437, 1437) for k in range(1, epoch + 1))
        values = {"epoch": epoch, "records_done": 1437 * epoch, "coverage": coverage, "updated_at": now[0]}
        status = dataclasses.replace(status, metrics={"accuracy": epoch / 150}, metrics_step=45 * epoch, **values)
        display.update(status)
    report.print_end(JobSpec(job_name="j", output="m"), Ended(0, "", status), None, logs="l", hint="")
    lines = (stream.getvalue() + capsys.readouterr().out).splitlines()
    assert len(lines) <= 40, "\n".join(lines)
    assert "epoch 1: records 1437, committed 1437, repeated 0, lost 0" in lines
    assert "epoch 150: records 1437, committed 1437, repeated 0, lost 0" in lines
    assert f"epochs 1 to 149: records {149 * 1437}, committed {149 * 1437}, repeated 0, lost 0" in lines


def test_epochs_that_take_long_are_shown_each() -> None:
    news, status = News(), dataclasses.replace(RUNNING, num_epochs=30)
    shown = []
    for epoch in range(1, 31):
        coverage = tuple(EpochCoverage(k, 100, 100) for k in range(1, epoch + 1))
        status = dataclasses.replace(status, coverage=coverage, updated_at=3600.0 * epoch)
        shown += news.lines(status)
    assert len(shown) == 30


def test_a_few_epochs_are_all_in_the_report_and_no_sum_of_one() -> None:
    def lines(num_epochs: int, shown: int) -> list[str]:
        return coverage_lines(
            dataclasses.replace(RUNNING, coverage=tuple(EpochCoverage(k + 1, 5, 5) for k in range(num_epochs))), shown
        )

    assert len(lines(10, 10)) == 10
    assert [line.split(":")[0] for line in lines(3, 2)] == ["epoch 1", "epoch 2", "epoch 3"]
    assert [line.split(":")[0] for line in lines(4, 2)] == ["epochs 1 to 2", "epoch 3", "epoch 4"]


def evaluated(step: int, **metrics: float) -> JobEvent:
    return JobEvent(step, 1.0, EventKind.EVALUATION_FINISHED, f"evaluation-{step}", "", 0, metrics)


def test_the_end_is_a_card_of_what_a_user_asks_then(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"model_zoo": "my zoo", "model_def": "m.model", "output": "out", "tensorboard_log_dir": "t"}
    spec = JobSpec(job_name="j", runtime=Runtime.LOCAL, **values)
    seconds = {"useful": 81.0, "starting": 9.0, "waiting_ps": 10.0}
    status = dataclasses.replace(RUNNING, exit_code=0, elapsed_seconds=64.0, worker_seconds=seconds)
    history = EventHistory((LOST, evaluated(10, auc=0.8, loss=0.3), evaluated(20, auc=0.7, loss=0.2)))
    report.print_end(spec, Ended(0, "", status), history, logs="l", hint="")
    printed = capsys.readouterr()
    *lines, predict, logs = printed.out.splitlines()
    assert lines == [
        "Job j succeeded.",
        "best: auc 0.8 at step 10",
        "duration: 64s, 1,024 records, 16 records/s on average",
        "losses: worker-1 lost: Killed, killed by SIGKILL",
        "time of workers: 81 % useful, 10 % waiting for PS, 9 % starting",
        "model: out",
        "next: elasticdl tensorboard j --runtime=local",
    ]
    assert predict.startswith("next: elasticdl predict --runtime=local --job_name=predict-j --model_zoo='my zoo' ")
    assert "--checkpoint_dir_for_init=out" in predict
    assert logs == "logs: l"
    assert printed.err == ""


def test_a_model_that_was_not_exported_has_no_place_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    spec = JobSpec(job_name="j", model_zoo="z", model_def="m.model", output="out")
    why = "no model is exported: it needs up to 5 GB of memory, and there are 3 GB"
    history = EventHistory((JobEvent(1, 1.0, EventKind.MODEL_NOT_EXPORTED, "job", why),))
    report.print_end(spec, Ended(0, "", None), history, logs="l", hint="")
    assert capsys.readouterr().out.splitlines() == ["Job j succeeded.", "logs: l"]
    assert News().lines(RUNNING, history)[0] == Headline(why, is_trouble=True)


def test_predictions_of_a_statement_have_no_place_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """They go to its table, and the files are removed."""
    for columns, lines in (("id", ["predictions: out", "logs: l"]), (ROW, ["logs: l"])):
        spec = JobSpec(job_name="j", job_type=JobType.PREDICT, prediction_outputs="out", prediction_columns=columns)
        report.print_end(spec, Ended(0, "", None), None, logs="l", hint="")
        assert capsys.readouterr().out.splitlines() == ["Job j succeeded.", *lines]


@pytest.mark.parametrize("runtime", Runtime)
def test_the_command_that_uses_the_model_is_complete(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"model_zoo": "zoo", "model_def": "m.model", "output": "out", "image_name": "i:1"}
    spec = JobSpec(job_name="a" * 40, runtime=runtime, **values)
    status = dataclasses.replace(RUNNING, exit_code=0)
    report.print_end(spec, Ended(0, "", status), EventHistory(()), logs="l", hint="")
    command = next(line for line in capsys.readouterr().out.splitlines() if "elasticdl predict" in line)
    flags = dict(word.removeprefix("--").split("=", 1) for word in shlex.split(command)[3:])
    assert JobSpec.from_flags(JobType.PREDICT, flags).image_name == "i:1"


def test_a_job_that_failed_says_its_error_first_and_no_command_that_needs_its_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = dataclasses.replace(RUNNING, phase=JobPhase.FAILED, exit_code=1, elapsed_seconds=64.0)
    spec = JobSpec(job_name="j", model_def="m.model", output="out")
    with contextlib.redirect_stderr(sys.stdout):  # in the order in which a terminal shows them
        report.print_end(spec, Ended(1, "feed raised: broken", status), EventHistory((LOST,)), logs="l", hint="see")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "error: Job j failed: feed raised: broken"
    assert lines[1].startswith("  → `elasticdl explain j ")
    assert lines[1].endswith(" see")
    assert [line.split(":")[0] for line in lines[2:]] == ["duration", "losses", "logs"]


def test_an_error_of_the_users_code_is_shown_with_its_last_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    where = 'File "/zoo/m.py", line 7, in loss'
    frames = f'  File "/x/elasticdl/worker/loop.py", line 1, in run\n    step()\n  {where}\n    return label\n'
    error = "NameError: name 'label' is not defined"
    message = f"failed 3 times, last with: {error}\nTraceback (most recent call last):\n{frames}{error}"
    for text in (message, f"in user code: {where}\n{message}"):
        report.print_end(JobSpec(job_name="j"), Ended(1, text, None), None, logs="l", hint="")
        said = capsys.readouterr().err
        assert said.count(where) == 1
        assert "loop.py" not in said


def test_many_lost_pods_are_counted_by_their_cause() -> None:
    events = [
        JobEvent(k, 1.0, EventKind.POD_LOST, f"worker-{k}", "", 0, {"reason": "Preempted" if k < 4 else "OOMKilled"})
        for k in range(6)
    ]
    assert report.lost_pods(EventHistory(tuple(events))) == "6 pods: 4 Preempted, 2 OOMKilled"
    assert report.lost_pods(EventHistory(tuple(events), {"PodLost": 90})) == (
        "96 pods: 4 Preempted, 2 OOMKilled, 90 earlier"
    )
    assert report.lost_pods(EventHistory()) == ""


def test_the_best_value_of_a_metric_is_named_where_its_name_says_what_is_better() -> None:
    history = EventHistory((evaluated(1, val_mse=0.1, skew=9.0), evaluated(2, val_mse=0.2, skew=1.0)))
    assert report.best_metrics(history) == "val_mse 0.1 at step 1"
    assert report.best_metrics(EventHistory((evaluated(1, auc=0.1), evaluated(2, auc=0.2)))) == ""
    assert report.best_metrics(EventHistory()) == ""


def test_a_sum_of_epochs_is_reported_as_one_and_is_no_news() -> None:
    earlier = EpochCoverage(900, 4500, 4499, lost=1, since=1)
    status = dataclasses.replace(RUNNING, coverage=(earlier, EpochCoverage(901, 5, 5), EpochCoverage(902, 5, 5)))
    assert [line.partition(",")[0] for line in coverage_lines(status, 5)] == [
        "epochs 1 to 900: records 4500",
        "epoch 901: records 5",
        "epoch 902: records 5",
    ]
    assert coverage_lines(status, 1)[0].startswith("epochs 1 to 901: records 4505, committed 4504, repeated 0, lost 1")
    few = dataclasses.replace(status, num_epochs=5, coverage=(EpochCoverage(900, 5, 5, since=1),))
    assert not [line.text for line in News(RUNNING).lines(few) if "epochs" in line.text]


def test_the_best_evaluation_is_known_although_its_event_is_not_kept_any_more() -> None:
    log = EventLog()
    for step in range(1, 4 * MAX_EVENTS):
        auc = 0.9 if step == 17 else math.nan if step % 7 == 0 else 0.5 + step / 1e5
        log.add(EventKind.EVALUATION_FINISHED, f"evaluation-{step}", auc=auc, loss=1 / step)
    again = EventLog()
    again.restore(json.loads(json.dumps(log.snapshot())))
    again.add(EventKind.EVALUATION_FINISHED, f"evaluation-{4 * MAX_EVENTS}", auc=math.nan, loss=0.5)
    history = again.history
    assert not [event for event in history.events if event.subject == "evaluation-17"]
    assert report.best_metrics(history) == f"auc 0.9 at step 17, loss {1 / (4 * MAX_EVENTS - 1):.4g} at step 1599"
    assert report.best_metrics(from_journal(json.loads(json.dumps(to_journal(history))))) == report.best_metrics(
        history
    )


def test_an_evaluation_whose_metric_is_no_number_is_news_once() -> None:
    news = News()
    text = dataclasses.replace(RUNNING, metrics={"auc": math.nan}, metrics_step=8).to_json()
    shown = [line.text for _ in range(5) for line in news.lines(JobStatus.from_json(text))]
    assert shown == ["evaluation at step 8: auc nan"]
