"""How the split of a job's time is shown: the share that was useful, and one line."""

from elasticdl_client.goodput import PsState, SlotState, goodput, label, shares, summary
from elasticdl_client.job_status import JobStatus


def test_goodput_is_the_useful_share_of_all_time() -> None:
    assert goodput({SlotState.USEFUL: 30.0, SlotState.STARTING: 10.0}) == 0.75
    assert goodput({}) == 0.0
    assert goodput({SlotState.STARTING: 5.0}) == 0.0


def test_the_line_begins_with_what_is_useful_and_leaves_out_what_is_nothing() -> None:
    seconds = {"starting": 800.0, "useful": 100.0, "waiting_ps": 99.0, "idle": 1.0}
    assert summary(seconds) == "10 % useful, 80 % starting, 10 % waiting for PS"
    assert summary({"useful": 0.0, "starting": 4.0}) == "0 % useful, 100 % starting"
    assert summary({}) == ""


def test_servers_and_states_of_a_newer_version_are_shown_too() -> None:
    assert summary({PsState.BUSY: 1.0, PsState.IDLE: 3.0}) == "75 % idle, 25 % busy"
    assert label("resting") == "resting"
    assert shares({"a": 1.0, "b": 1.0}) == [("a", 0.5), ("b", 0.5)]


def test_the_seconds_are_in_the_json_of_the_status() -> None:
    status = JobStatus("j", worker_seconds={SlotState.USEFUL: 1.5}, ps_seconds={PsState.ABSENT: 2.0})
    assert JobStatus.from_json(status.to_json()) == status
    assert '"worker_seconds": {"useful": 1.5}' in status.to_json()
