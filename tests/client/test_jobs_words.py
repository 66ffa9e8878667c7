"""How jobs look: tables, ages, the page of a job, and what a pod's JSON says."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from elasticdl_client.choices import Runtime
from elasticdl_client.job_status import (
    DeviceStatus,
    EpochCoverage,
    JobPhase,
    JobStatus,
    PodStatus,
    PsStatus,
    StandingWorker,
    UncreatedPods,
)
from elasticdl_client.jobs import cluster_objects, words
from elasticdl_client.jobs.store import JobInfo, Phase, phase_of
from elasticdl_client.progress import age

NOW = 1_700_000_000.0
STATUS = JobStatus(
    "digits",
    JobPhase.RUNNING,
    generation=2,
    epoch=2,
    num_epochs=3,
    records_done=4_500,
    records_total=10_000,
    records_per_second=1234.5,
    workers_alive=3,
    workers_wanted=4,
    ps_alive=2,
    ps_wanted=2,
    model_version=70,
    loss=0.34567,
    metrics={"accuracy": 0.91},
    metrics_step=64,
    coverage=(EpochCoverage(1, 3334, 3334),),
    tasks_done=9,
    tasks_total=20,
    pods=(
        PodStatus("elasticdl-digits-master", "master", "Running", restarts=1),
        PodStatus("elasticdl-digits-worker-4", "worker", "Pending", "Unschedulable: 0/1 nodes are available"),
    ),
    started_at=NOW - 300,
    updated_at=NOW - 1,
)
JOB = JobInfo("digits", Runtime.KUBERNETES, Phase.RUNNING, STATUS, namespace="team", created_at=NOW - 310)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-3, "0s"),
        (119, "119s"),
        (120, "2m"),
        (303, "5m3s"),
        (3720, "62m"),
        (3 * 3600 + 300, "3h5m"),
        (26 * 3600, "26h"),
        (76 * 3600, "3d4h"),
        (400 * 86400, "400d"),
    ],
)
def test_ages_are_kubectls(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_the_table_has_a_column_for_each_thing_and_no_blanks_in_a_cell() -> None:
    heads, row = words.job_table([JOB], with_namespace=False, wide=False).splitlines()
    assert heads.split() == ["NAME", "RUNTIME", "PHASE", "WORKERS", "PS", "RECORDS", "AGE"]
    assert row.split()[:6] == ["digits", "kubernetes", "Running", "3/4", "2/2", "45%"]
    assert words.job_table([JOB], with_namespace=True, wide=False).splitlines()[1].split()[0] == "team"
    wide = words.job_table([JOB], with_namespace=False, wide=True).splitlines()[1].split()
    assert wide[7:] == ["2/3", "70", "0.3457", "1,234/s", "<none>"]


def test_the_page_of_a_job_says_all_that_is_known() -> None:
    page = words.page(JOB, NOW)
    for line in (
        "Namespace:    team",
        "Phase:        Running",
        "Records:      4,500/10,000 (45%), 1,234 records/s",
        "Tasks:        9 done, 11 left",
        "Epoch:        2/3",
        "Model:        step 70, loss 0.3457",
        "Evaluation:   accuracy 0.91 at step 64",
        "Restarts:     1 (of the master)",
        "Logs:         elasticdl logs digits --namespace=team",
        "  epoch 1: records 3334, committed 3334, repeated 0, lost 0",
        "  elasticdl-digits-master     Running   1",
        "  elasticdl-digits-worker-4   Pending   0          Unschedulable: 0/1 nodes are available",
    ):
        assert line in page.splitlines(), page
    assert "Directory" not in page
    assert "Time:" not in page  # of a master that does not say it
    assert "No worker runs" not in page


SERVER = PsStatus(0, 410.2, 411.0, 12_300_000.0, 13_400_000.0, 0.62, 512_334, 92_000_000)


def test_the_page_of_a_job_says_what_its_servers_do_and_how_stale_gradients_are() -> None:
    status = dataclasses.replace(
        STATUS, ps=(SERVER, PsStatus(1)), staleness=(41, 52, 0, 7), gradients_refused=3, records_skipped=64
    )
    page = words.page(dataclasses.replace(JOB, status=status), NOW)
    assert "Staleness:    0 41%, 1 52%, 3-4 7%; refused 3" in page
    assert "(45%), skipped 64, 1,234 records/s" in page
    lines = page.splitlines()
    start = lines.index("Parameter servers:")
    assert lines[start + 2].split() == ["0", "62%", "410", "411", "12.3", "MB/s", "13.4", "MB/s", "512,334", "92", "MB"]
    assert lines[start + 3].split()[:2] == ["1", "0%"]
    over = words.page(dataclasses.replace(JOB, phase=Phase.SUCCEEDED, status=status), NOW)
    assert "Parameter servers" not in over
    assert "Staleness" in over


def test_of_many_servers_the_sum_and_the_busiest_are_shown() -> None:
    servers = tuple(PsStatus(k, pushes_per_second=10.0, busy=k / 100, rows=1000) for k in range(50))
    page = words.page(dataclasses.replace(JOB, status=dataclasses.replace(STATUS, ps=servers)), NOW)
    lines = page.splitlines()
    start, end = lines.index("Parameter servers:"), lines.index("Pods:")
    assert [line.split()[0] for line in lines[start + 2 : end]] == ["all", "49", "48", "47", "46", "45"]
    assert lines[start + 2].split()[1:3] == ["24%", "500"]
    assert "50,000" in lines[start + 2]


def test_the_page_of_a_job_says_what_its_models_are_on_and_the_most_memory_that_one_takes() -> None:
    devices = (
        DeviceStatus(0, "cuda:0", "NVIDIA H100 80GB HBM3", 12 << 30, 85_000_000_000),
        DeviceStatus(1, "cuda:1", "NVIDIA H100 80GB HBM3", 13 << 30, 85_000_000_000),
        DeviceStatus(2, "GPU:0", "Tesla T4", 3 << 29),
    )
    on_devices = dataclasses.replace(JOB, status=dataclasses.replace(STATUS, devices=devices))
    assert (
        "Devices:      2 workers on NVIDIA H100 80GB HBM3, up to 13.0 of 79.2 GiB in use by each; "
        "1 worker on Tesla T4, 1.5 GiB in use\n"
    ) in words.page(on_devices, NOW)
    plain = on_devices.to_plain()["devices"]
    assert plain[2] == {
        "worker": 2,
        "name": "GPU:0",
        "kind": "Tesla T4",
        "used_bytes": 3 << 29,
        "total_bytes": 0,
        "process": 0,
    }
    assert "Devices" not in words.page(JOB, NOW)
    assert "Devices" not in words.page(dataclasses.replace(on_devices, phase=Phase.SUCCEEDED), NOW)


def test_the_page_of_a_job_says_which_workers_are_in_its_group_and_what_sums() -> None:
    def page(**fields: Any) -> str:
        return words.page(dataclasses.replace(JOB, status=dataclasses.replace(STATUS, **fields)), NOW)

    assert "Group:        number 3, of workers 0, 2; it sums by NCCL 2.28.9\n" in page(
        num_worlds=3, world=(0, 2), engine="NCCL 2.28.9"
    )
    assert "Group:        number 1, of worker 4\n" in page(num_worlds=1, world=(4,))
    assert "Group:        none stands, 2 have formed\n" in page(num_worlds=2)
    assert "Group:" not in page()


def test_of_many_epochs_the_older_ones_are_summed() -> None:
    coverage = tuple(EpochCoverage(epoch, 100, 100 - (epoch == 2), lost=int(epoch == 2)) for epoch in range(1, 10))
    page = words.page(dataclasses.replace(JOB, status=dataclasses.replace(STATUS, coverage=coverage)), NOW)
    assert "  epochs 1 to 4: records 400, committed 399, repeated 0, lost 1\n  epoch 5: records 100" in page


def test_repeats_that_cannot_be_counted_are_shown_as_a_bound() -> None:
    coverage = tuple(EpochCoverage(epoch, 100, 100, repeated=64, is_bound=True) for epoch in range(1, 10))
    page = words.page(dataclasses.replace(JOB, status=dataclasses.replace(STATUS, coverage=coverage)), NOW)
    assert "repeated at most 256, lost 0\n  epoch 5: records 100, committed 100, repeated at most 64, lost 0" in page


def test_a_job_without_room_for_a_worker_says_why() -> None:
    waiting = dataclasses.replace(JOB, status=dataclasses.replace(STATUS, workers_alive=0))
    assert "No worker runs yet; pending worker: Unschedulable: 0/1 nodes are available" in words.page(waiting, NOW)
    assert "Unschedulable" in words.job_table([waiting], with_namespace=False, wide=True)


def test_a_stopped_job_says_how_it_continues_and_a_failed_one_why_it_failed() -> None:
    stopped = dataclasses.replace(JOB, phase=Phase.STOPPED, note="Its master's pod is gone.")
    page = words.page(stopped, NOW)
    assert "elasticdl resume digits --namespace=team" in page
    assert "Its master's pod is gone." in page
    assert "records/s" not in page
    traceback = 'feed raised E: x\nTraceback (most recent call last):\n  File "a.py", line 1, in f\nE: x'
    failed = dataclasses.replace(JOB, phase=Phase.FAILED, status=dataclasses.replace(STATUS, message=traceback))
    assert 'Message:      feed raised E: x\n                File "a.py", line 1, in f\n' in words.page(failed, NOW)


def test_a_job_of_which_nothing_is_known_has_a_page_and_a_row() -> None:
    job = JobInfo("new", Runtime.LOCAL, Phase.PENDING, JobStatus("new"), directory="/tmp/jobs/new")
    assert "Logs:         /tmp/jobs/new/logs" in words.page(job, NOW)
    assert words.job_table([job], with_namespace=True, wide=True).splitlines()[1].startswith("<none>")


def test_the_page_of_a_job_counts_workers_and_names_their_processes() -> None:
    status = dataclasses.replace(STATUS, processes_per_worker=4, world=tuple(range(4, 12)), num_worlds=3)
    page = words.page(dataclasses.replace(JOB, status=status), NOW)
    assert "; 4 processes each\n" in page
    assert "Group:        number 3, of 8 processes of workers 1, 2" in page


def test_the_page_of_a_job_says_which_share_of_the_optimizers_state_each_member_holds() -> None:
    status = dataclasses.replace(STATUS, world=(0, 1, 2), num_worlds=1, optimizer_shares=(0.5, 0.75, 0.0))
    assert "; optimizer's state: 50% to 75% in each\n" in words.page(dataclasses.replace(JOB, status=status), NOW)
    assert JobStatus.from_json(status.to_json()) == status


def test_the_json_of_a_job_has_these_keys() -> None:
    plain = json.loads(words.structured(JOB.to_plain(), "json"))
    assert set(plain) == {
        *("name", "runtime", "namespace", "phase", "note", "created_at", "directory", "logs", "message", "generation"),
        *("epoch", "num_epochs", "records_done", "records_total", "records_per_second", "workers_alive"),
        *("workers_wanted", "ps_alive", "ps_wanted", "model_version", "loss", "metrics", "metrics_step", "coverage"),
        *("tasks_done", "tasks_total", "pods", "exit_code", "started_at", "updated_at", "records_skipped"),
        *("ps", "staleness", "gradients_refused", "world", "num_worlds", "lost_pods", "elapsed_seconds", "eta_seconds"),
        *("worker_seconds", "ps_seconds", "records", "records_processed", "learning_rate", "event_counts"),
        *("world_seconds", "pods_lost", "checkpoint_at", "scaling", "devices", "engine", "processes_per_worker"),
        *("optimizer_shares", "standing", "num_standing", "saving_seconds", "not_created"),
    }
    assert plain["pods"][1]["message"].startswith("Unschedulable")
    assert "tasks_total: 20" in words.structured(JOB.to_plain(), "yaml")


def test_the_page_of_a_job_names_the_worker_that_does_the_same_for_long() -> None:
    one = StandingWorker(3, 49.0, "compile", "/zoo/m.py:31 in feed", 1)
    status = dataclasses.replace(STATUS, standing=(one,), processes_per_worker=2)
    assert JobStatus.from_json(status.to_json()) == status
    line = "worker-3 (process 1) has done the same for 49s: its first minibatch, in which it compiles, at /zoo/m.py:31"
    assert f"Standing:     {line} in feed\n" in words.page(dataclasses.replace(JOB, status=status), NOW)
    many = dataclasses.replace(status, num_standing=985)
    assert "984 more processes have not changed" in words.page(dataclasses.replace(JOB, status=many), NOW)
    ended = dataclasses.replace(JOB, status=dataclasses.replace(status, exit_code=1), phase=Phase.FAILED)
    assert "Standing" not in words.page(ended, NOW)


def test_a_status_of_another_version_is_read() -> None:
    old = json.loads(STATUS.to_json())
    for name in ("pods", "tasks_done", "tasks_total"):
        del old[name]
    assert JobStatus.from_json(json.dumps(old)) == dataclasses.replace(STATUS, pods=(), tasks_done=0, tasks_total=0)
    new = json.loads(STATUS.to_json())
    new["pods"][0]["node"] = new["weather"] = "fine"
    assert JobStatus.from_json(json.dumps(new)) == STATUS
    with_servers = dataclasses.replace(STATUS, ps=(SERVER,), staleness=(1, 2))
    assert JobStatus.from_json(with_servers.to_json()) == with_servers


@pytest.mark.parametrize(
    ("phase", "exit_code", "runs", "expected"),
    [
        (JobPhase.PENDING, None, True, Phase.PENDING),
        (JobPhase.RUNNING, None, True, Phase.RUNNING),
        (JobPhase.RUNNING, None, False, Phase.STOPPED),
        (JobPhase.SUCCEEDED, 0, True, Phase.SUCCEEDED),
        (JobPhase.FAILED, 1, False, Phase.FAILED),
    ],
)
def test_a_job_has_ended_when_it_has_an_exit_code(
    phase: JobPhase, exit_code: int | None, runs: bool, expected: Phase
) -> None:
    assert phase_of(JobStatus("j", phase, exit_code=exit_code), runs=runs) is expected


def pod(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    labels = {"elasticdl-replica-type": "worker", "elasticdl-replica-index": "3"}
    spec = {"containers": [{"name": "main"}]}
    return {"metadata": {"name": "w", "labels": labels, **metadata}, "spec": spec, "status": status}


def container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "sidecar", "state": {}}, {"name": "main", "restartCount": 2, **state}]}


@pytest.mark.parametrize(
    ("found", "phase", "message"),
    [
        (pod({}), "Pending", ""),
        (pod({"phase": "Running"}), "Running", ""),
        (pod({"phase": "Running"}, deletionTimestamp="now"), "Running", "Terminating"),
        (
            pod({"phase": "Pending", **container(state={"waiting": {"reason": "ErrImagePull", "message": "no such"}})}),
            "Pending",
            "ErrImagePull: no such",
        ),
        (
            pod({"phase": "Failed", **container(state={"terminated": {"reason": "OOMKilled", "exitCode": 137}})}),
            "Failed",
            "OOMKilled, exit code 137",
        ),
        (
            pod({"phase": "Succeeded", **container(state={"terminated": {"reason": "Completed", "exitCode": 0}})}),
            "Succeeded",
            "Completed",
        ),
        (pod({"phase": "Failed", "reason": "Evicted", "message": "disk"}), "Failed", "Evicted: disk"),
        (
            pod(
                {
                    "phase": "Pending",
                    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
                }
            ),
            "Pending",
            "Unschedulable",
        ),
        (
            pod(
                {
                    "phase": "Running",
                    **container(
                        state={"waiting": {"reason": "CrashLoopBackOff"}},
                        lastState={"terminated": {"reason": "Error", "exitCode": 1}},
                    ),
                }
            ),
            "Running",
            "CrashLoopBackOff; before: Error, exit code 1",
        ),
        (
            pod(
                {
                    "phase": "Running",
                    **container(
                        state={"running": {}}, lastState={"terminated": {"reason": "OOMKilled", "exitCode": 137}}
                    ),
                }
            ),
            "Running",
            "started again; before: OOMKilled, exit code 137",
        ),
    ],
)
def test_a_pod_says_why_it_is_pending_or_has_ended(found: dict[str, Any], phase: str, message: str) -> None:
    status = cluster_objects.pod_status(found)
    assert (status.role, status.phase, status.message) == ("worker", phase, message)


def test_a_job_says_how_long_it_has_run_and_what_the_rest_takes() -> None:
    timed = dataclasses.replace(STATUS, elapsed_seconds=299.2, eta_seconds=366.0)
    running = dataclasses.replace(JOB, status=timed)
    assert "Time:         elapsed 4m59s, ETA 6m6s" in words.page(running, NOW).splitlines()
    assert running.to_plain()["eta_seconds"] == 366.0
    for phase in (Phase.STOPPED, Phase.SUCCEEDED):
        over = dataclasses.replace(running, phase=phase)
        assert "Time:         elapsed 4m59s" in words.page(over, NOW).splitlines()
        assert over.to_plain()["eta_seconds"] is None


def test_json_has_null_for_what_is_no_number() -> None:
    values = {"metrics": {"auc": math.nan, "accuracy": 0.5}, "bounds": (math.inf, -math.inf, 1), "text": "NaN"}

    def refuse(text: str) -> None:
        raise AssertionError(text)

    found = json.loads(words.structured(values, "json"), parse_constant=refuse)
    assert found == {"metrics": {"auc": None, "accuracy": 0.5}, "bounds": [None, None, 1], "text": "NaN"}


REFUSED = 'pods "elasticdl-digits-worker-5" is forbidden: exceeded quota: pods, requested: pods=1, used: pods=4'


@pytest.mark.parametrize(("phase", "is_shown"), [(Phase.RUNNING, True), (Phase.STOPPED, False), (Phase.FAILED, False)])
def test_pods_that_the_api_server_refuses_are_named_with_its_reason(phase: Phase, is_shown: bool) -> None:
    refused = UncreatedPods("worker", 2, "elasticdl-digits-worker-5", REFUSED)
    status = dataclasses.replace(STATUS, workers_wanted=6, not_created=(refused,))
    assert JobStatus.from_json(status.to_json()) == status
    page = words.page(dataclasses.replace(JOB, phase=phase, status=status), NOW)
    line = next(line for line in page.splitlines() if line.startswith("Workers:"))
    assert line.startswith("Workers:      3/6 running, 1 pending")
    assert line.endswith(f", 2 not created ({REFUSED})") is is_shown
    alone = dataclasses.replace(status, workers_alive=0, pods=STATUS.pods[:1])
    job = dataclasses.replace(JOB, phase=phase, status=alone)
    assert words.waiting_for(job) == (f"No worker runs yet; worker not created: {REFUSED}" if is_shown else "")
