"""--checkpoint_dir_for_init: a version or a directory of them, chosen once for all PS and all lives of the master."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.master.actors import MasterJob, running
from tests.master.test_checkpoint_directory import cut_the_part, write


def test_the_newest_whole_version_is_taken_and_stays_the_one(tmp_path: Path) -> None:
    others = tmp_path / "others"
    for version in (8, 9, 10):
        write(others, version)
    cut_the_part(others / "version-10")
    with running(MasterJob(tmp_path, num_ps_pods=2, checkpoint_dir_for_init=str(others))) as job:
        reply = job.ps(0).join()
        assert (reply.restore_from, reply.parameters_only) == (str(others / "version-9"), True)
        log = job.log()
        assert f"The checkpoint {others}/version-10 is skipped: {others}/version-10/ps-0 is 1 bytes" in log
        assert f"The newest whole checkpoint in {others} is version-9" in log
        job.kill()
        write(others, 11)
        job.start()
        assert job.ps(1).join().restore_from == str(others / "version-9")
        job.kill()
        shutil.rmtree(others)
        job.start()
        assert job.ps(0).join().restore_from == str(others / "version-9")


def test_a_version_is_taken_as_it_is_named(tmp_path: Path) -> None:
    others = tmp_path / "others"
    for version in (8, 9):
        write(others, version)
    with running(MasterJob(tmp_path, num_ps_pods=1, checkpoint_dir_for_init=str(others / "version-8"))) as job:
        assert job.ps().join().restore_from == str(others / "version-8")


def test_a_damaged_one_ends_the_job_before_any_pod_is_made(tmp_path: Path) -> None:
    damaged = write(tmp_path / "others", 9)
    write(tmp_path / "others", 8)
    cut_the_part(damaged)
    with running(MasterJob(tmp_path, num_ps_pods=1, checkpoint_dir_for_init=str(damaged))) as job:
        assert job.wait() == 1
        assert f"{damaged}/ps-0 is 1 bytes, its manifest says" in job.status().message
        assert "Traceback" not in job.log()
        assert job.cluster.list() == []


def test_one_of_another_strategy_ends_the_job_before_any_pod_is_made(tmp_path: Path) -> None:
    version = write(tmp_path / "others", 9)
    flags = {"distribution_strategy": "AllReduceStrategy", "num_ps_pods": 0}
    with running(MasterJob(tmp_path, **flags, checkpoint_dir_for_init=str(tmp_path / "others"))) as job:
        assert job.wait() == 1
        assert f"{version} is a checkpoint of parameter servers, and" in job.status().message
        assert job.cluster.list() == []
