"""A master's life over the wire: from its journal to its exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
from pathlib import Path

import grpc
import pytest

from elasticdl.master.master import Master
from elasticdl.protocol import Role
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase
from tests.master.actors import MasterJob, running, wait_until
from tests.master.life import open_environment
from tests.master.small_disk import small_disk

LOCAL: dict[str, object] = {"distribution_strategy": "Local", "num_ps_pods": 0}


def test_a_job_runs_from_its_first_worker_to_exit_code_0(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL, num_epochs=2)) as job:
        worker = job.worker()
        reply = worker.register()
        assert reply.accepted
        assert reply.generation == 1
        assert JobSpec.from_json(reply.job_spec).job_name == "digits"
        assert worker.report_model().accepted
        assert worker.train_all() == 8
        assert job.wait() == 0, job.log()
        status = job.status()
        assert (status.phase, status.exit_code, status.records_done) == (JobPhase.SUCCEEDED, 0, 128)
        assert [str(one) for one in status.coverage] == ["records 64, committed 64, repeated 0, lost 0"] * 2
        log = (job.path / "master.log").read_text()
        for line in ("Starting epoch 1", "Starting epoch 2", "completed, 0 remaining tasks", "--minibatch_size=8"):
            assert line in log, log


def test_a_cluster_that_cannot_raise_memory_limits_says_so_once_and_the_job_runs_on(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        worker = job.worker()
        assert worker.register().accepted
        beat = pb.HeartbeatRequest(role=pb.WORKER, id=0, incarnation=worker.incarnation, memory_share=0.95)
        assert worker.call("Heartbeat", beat).known
        wait_until(lambda: "cannot be raised in place" in job.log(), "the answer of the cluster")
        assert worker.call("Heartbeat", beat).known
        assert worker.report_model().accepted
        worker.train_all()
        assert job.wait() == 0, job.log()
        assert job.log().count("cannot be raised in place") == 1


def test_a_job_with_a_parameter_server_is_covered_and_checkpointed(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, num_ps_pods=1, checkpoint_steps=4, keep_checkpoint_max=1)) as job:
        ps, worker = job.ps(), job.worker()
        ps.join()
        assert worker.register().accepted
        assert worker.report_model(optimizer="{}").accepted
        wait_until(lambda: worker.register().partition.version > 0, "the partition")
        worker.train_all(ps.apply)
        ps.leave()
        assert job.wait() == 0, job.log()
        assert "records 64, committed 64, repeated 0, lost 0" in job.log()
        kept = sorted((tmp_path / "checkpoints").iterdir())
        assert [path.name for path in kept] == ["version-8"]
        manifest = json.loads((kept[0] / "MANIFEST.json").read_text())
        assert manifest["variables"] == [{"name": "kernel", "shape": [2, 3], "trainable": True}]
        (part,) = manifest["parts"]
        assert part["size_bytes"] == (kept[0] / part["file"]).stat().st_size > 1000
        assert (manifest["model_version"], manifest["job_name"], len(manifest["data_fingerprint"])) == (8, "digits", 64)


def test_a_call_without_the_token_is_refused(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        job.worker().register()
        with pytest.raises(grpc.RpcError) as refused:
            job.stub(token="another").RequestLease(pb.LeaseRequest(), timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_pods_get_what_they_need_to_find_the_master(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, num_ps_pods=2, num_workers=2, envs="A=1,B=2")) as job:
        wait_until(lambda: len(job.cluster.list()) == 4, "four pods")
        command, env = job.cluster.spec("elasticdl-digits-ps-1")
        assert command[1:] == ["-P", "-m", "elasticdl.ps"]
        assert env["PS_ID"] == "1"
        command, env = job.cluster.spec("elasticdl-digits-worker-0")
        assert command[1:] == ["-P", "-m", "elasticdl.worker"]
        assert (env["WORKER_ID"], env["MASTER_ADDR"], env["B"]) == ("0", f"127.0.0.1:{job.port}", "2")
        labels = next(pod.labels for pod in job.cluster.list() if pod.role is Role.WORKER)
        assert labels["app"] == "elasticdl"
        assert labels["elasticdl-replica-type"] == "worker"


def test_a_metrics_port_that_is_taken_ends_a_new_job_before_it_has_a_pod(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(MasterJob(tmp_path, **LOCAL, metrics_port=port)) as job:
            assert job.wait() == 1
            assert f"--metrics_port={port} cannot be used: Address already in use" in job.status().message
            assert job.cluster.list() == []


def test_a_killed_master_continues_where_it_was_without_a_new_pod(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        worker = job.ready_worker()
        first = worker.lease()
        assert worker.progress(first, 0).accepted
        pods = {pod.uid for pod in job.cluster.list()}
        job.kill()
        job.start()
        assert worker.register(held=((first, (0,)),)).generation == 2
        assert worker.progress(first, 1).accepted
        assert worker.finish(first).accepted
        second = worker.lease()
        assert second.id >> 32 == 2
        assert second.task != first.task
        assert {pod.uid for pod in job.cluster.list()} == pods
        assert worker.progress(second, 0, 1).accepted
        assert worker.finish(second).accepted
        assert worker.train_all() == 2
        assert job.wait() == 0, job.log()
        assert "records 64, committed 64, repeated 0, lost 0" in job.log()


def test_a_journal_that_is_older_than_the_status_is_reported_and_no_generation_is_used_twice(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        worker = job.worker()
        assert worker.register().generation == 1
        older = (job.path / "journal.json").read_bytes()
        for generation in (2, 3):
            job.kill()
            job.start()
            assert worker.register().generation == generation
            wait_until(lambda: job.status().generation == generation, "its status")  # noqa: B023
        job.kill()
        (job.path / "journal.json").write_bytes(older)
        job.start()
        assert worker.register().generation == 4
        assert "The journal is older than the job's status: it is of generation 1" in job.log()


def test_an_end_that_was_written_in_the_journal_alone_is_written_in_the_status_by_the_next_life(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        worker = job.ready_worker()
        worker.train_all()
        assert job.wait() == 0, job.log()
        ended = job.status()
        unwritten = dataclasses.replace(ended, phase=JobPhase.RUNNING, exit_code=None)
        (job.path / "status.json").write_text(unwritten.to_json())
        job.start()
        assert job.wait() == 0, job.log()
        assert job.status() == ended


def test_a_second_master_on_the_same_job_ends_at_once(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        job.worker().register()
        first, job.process = job.process, None
        job.start()
        assert job.wait() == 3
        assert "another master (process" in job.log()
        job.process = first
        assert job.worker().register().accepted


def test_a_corrupt_journal_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    job = MasterJob(tmp_path, **LOCAL)
    (job.path / "journal.json").write_text('{"format": 1, "snap')
    with running(job):
        assert job.wait() == 1
        assert "is damaged" in job.status().message
        assert job.status().phase is JobPhase.FAILED
        assert (job.path / "journal.json").read_text() == '{"format": 1, "snap'


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return filler


def test_a_master_that_starts_again_waits_while_the_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=512) as disk, running(MasterJob(disk, **LOCAL)) as job:
        worker = job.ready_worker()
        job.kill()
        log = tmp_path / "master.log"
        (job.path / "master.log").rename(job.path / "first.log")
        (job.path / "master.log").symlink_to(log)
        filler = fill(disk)
        job.start()
        wait_until(lambda: "journal.json cannot be written" in log.read_text(), "the journal to be tried")
        filler.unlink()
        assert worker.register().generation == 2
        assert worker.train_all() == 4
        assert job.wait() == 0, job.log()


def test_a_full_disk_holds_the_job_up_and_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=512) as disk, running(MasterJob(disk, **LOCAL)) as job:
        worker = job.worker()
        worker.register()
        filler = fill(disk)
        with pytest.raises(grpc.RpcError) as late:
            worker.report_model()
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        filler.unlink()
        assert worker.report_model().accepted
        assert worker.train_all() == 4
        assert job.wait() == 0, job.log()
        assert "records 64, committed 64, repeated 0, lost 0" in job.log()


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    job = MasterJob(tmp_path, **LOCAL)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", job.port))
        taken.listen()
        with running(job):
            assert job.wait() == 1
            assert f"cannot listen on 127.0.0.1:{job.port}" in job.status().message


def test_data_that_cannot_be_read_fails_the_job_before_any_worker_has_come(tmp_path: Path) -> None:
    job = MasterJob(tmp_path, **LOCAL)
    (job.data / "a.csv").unlink()
    with running(job):
        assert job.wait() == 1
        assert "training data cannot be read" in job.status().message


def test_workers_are_given_the_types_that_the_job_began_with(tmp_path: Path) -> None:
    job = MasterJob(tmp_path, **LOCAL)
    for name, number in (("dt=1", 32), ("dt=2", 32)):
        (job.data / name).mkdir()
        (job.data / name / "a.csv").write_text("x,y\n" + "1,2\n" * number)
    (job.data / "a.csv").unlink()
    with running(job):
        worker = job.worker()
        given = JobSpec.from_json(worker.register().job_spec).data_reader_params_dict()
        assert given == {"partition_dtypes": {"dt": "int64"}}
        worker.report_model()
        worker.lease()  # the journal knows the data: the next life does not need to list them
        job.kill()
        job.data.rename(tmp_path / "elsewhere")
        job.start()
        reply = worker.register()
        assert reply.generation == 2
        assert JobSpec.from_json(reply.job_spec).data_reader_params_dict() == given


def test_data_that_has_changed_stops_the_next_life(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        worker = job.ready_worker()
        worker.lease()
        job.kill()
        (job.data / "a.csv").write_text("x,y\n" + "1,2\n" * 63)
        job.start()
        assert job.wait() == 1
        assert "has changed since the job began" in job.status().message


def test_a_file_with_other_rows_of_the_same_length_stops_the_next_life(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        worker = job.ready_worker()
        file = job.data / "a.csv"
        assert worker.lease().shard.identity.startswith(f"{file.stat().st_size}-")
        job.kill()
        file.write_text(file.read_text()[:-2] + "7\n")
        job.start()
        assert job.wait() == 1
        assert f"{file} has changed since the job began" in job.status().message


def test_a_journal_that_does_not_say_which_content_the_files_have_is_continued_with_a_warning(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        worker = job.ready_worker()
        worker.lease()
        job.kill()
        journal = job.path / "journal.json"
        saved = json.loads(journal.read_text())
        del saved["crc32"]
        (shard,) = saved["snapshot"]["core"]["data"]["shards"]["training"]
        saved["snapshot"]["core"]["data"]["shards"]["training"] = [shard[:3]]
        journal.write_text(json.dumps(saved))
        job.start()
        wait_until(lambda: "The journal does not say which content the training files had" in job.log(), "the warning")
        worker.register()
        assert not worker.lease().shard.identity


def test_data_that_the_next_life_cannot_read_is_left_to_the_workers(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        worker = job.ready_worker()
        lease = worker.lease()
        job.kill()
        (job.data / "a.csv").rename(tmp_path / "a.csv")
        job.start()
        wait_until(lambda: "training data cannot be compared" in job.log(), "a warning")
        assert worker.register(held=((lease, ()),)).generation == 2
        assert worker.finish(lease).accepted
        assert worker.train_all() == 3
        assert job.wait() == 0, job.log()


def test_an_error_in_the_model_definition_ends_the_job_with_its_message(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        worker = job.worker()
        worker.register()
        worker.report_model(error="the metric auc cannot be merged")
        worker.train_all()
        assert job.wait() == 1
        assert "the metric auc cannot be merged" in job.status().message


def test_a_lease_request_whose_caller_leaves_takes_no_task_with_it(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL, num_epochs=1)) as job:
        worker = job.worker()
        worker.register()
        request = pb.LeaseRequest(worker_id=0, incarnation=worker.incarnation)
        call = worker.stub.RequestLease.future(request, timeout=30)  # nothing to give: the model is unknown
        call.cancel()
        worker.report_model()
        assert worker.train_all() == 4
        assert job.wait() == 0


def test_a_checkpoint_that_is_requested_before_the_job_has_begun_is_written_then(tmp_path: Path) -> None:
    job = MasterJob(tmp_path, **LOCAL)
    environment = open_environment(job.path, job.port)
    (job.path / "master.log").touch()  # this life is in no process of its own
    master = Master(environment)
    master.request_checkpoint()
    life = threading.Thread(target=master.run)
    life.start()
    try:
        worker = job.worker()
        worker.register()
        reply = worker.call("Heartbeat", pb.HeartbeatRequest(role=pb.WORKER, id=0, incarnation=worker.incarnation))
        assert reply.checkpoint_request == 1
    finally:
        master.request_stop("the test")
        job.cluster.delete("elasticdl-digits-worker-0")
        life.join()
        environment.cluster.close()
        environment.close()
        job.end()


def test_sigterm_ends_the_job_in_order(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        worker = job.worker()
        worker.register()
        assert job.process is not None
        job.process.terminate()
        assert job.wait() != 0
