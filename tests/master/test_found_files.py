"""The files of a job's data are listed once when it begins, and anew whenever they are compared."""

from __future__ import annotations

from pathlib import Path

from elasticdl.data.sources import FoundFiles, partition_dtypes
from elasticdl.master.checkpoints import PsCalls
from elasticdl.master.core.events import ShardsListed, ShardsUnreadable
from elasticdl.master.core.values import DataKind
from elasticdl.master.effects import Effects
from elasticdl.master.inbox import Inbox
from elasticdl.master.pod_specs import PodSpecs
from elasticdl_client.job_spec import JobSpec
from tests.master.directory_cluster import DirectoryCluster

ANSWER_S = 60.0


def test_the_lists_of_files_that_decide_on_types_are_those_that_are_counted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for day in (1, 2):
        (data / f"dt={day}").mkdir(parents=True)
    (data / "dt=1" / "rows.csv").write_text("x\n1\n")
    flags = {"job_name": "digits", "model_def": "m.f", "training_data": str(data), "runtime": "local"}
    spec, inbox, found = JobSpec.from_flags("train", flags), Inbox(), FoundFiles()
    assert partition_dtypes(spec, found.find) == {"dt": "int64"}
    (data / "dt=2" / "rows.csv").write_text("x\n2\n")  # comes too late for a second list to have it
    specs, cluster = PodSpecs(spec, "python", "127.0.0.1:1"), DirectoryCluster(tmp_path / "pods")
    effects = Effects(spec, cluster, specs, PsCalls("token", 1), inbox, find_files=found.take)
    effects.list_shards(DataKind.TRAINING)
    listed = inbox.next(ANSWER_S)
    assert isinstance(listed, ShardsListed)
    assert [shard.name for shard in listed.shards] == [str(data / "dt=1" / "rows.csv")]
    effects.verify_shards(DataKind.TRAINING, listed.shards)
    compared = inbox.next(ANSWER_S)
    assert isinstance(compared, ShardsUnreadable)
    assert "dt=2" in compared.message
    effects.close()
    cluster.close()
