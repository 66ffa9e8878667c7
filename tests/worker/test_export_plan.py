"""Export formats are checked before the job starts; how much memory there is; the stream to the export process."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import numpy as np
import pytest

from elasticdl.frameworks.framework import InitialRow, Table, TableRows
from elasticdl.rpc.resource_use import available_bytes, used_share
from elasticdl.worker.export.exporter import ExportPlan, announce_export, needed_bytes, plan_export
from elasticdl.worker.export.process import ExportReader, ExportWriter, StreamEnded
from elasticdl_client.errors import ModelDefinitionError

GB = 10**9
TABLES = (Table("small", 1, "", 1000), Table("large", 250, "", 10_000_000), Table("endless", 16, ""))  # 10 GB


def test_small_tables_need_no_process_of_their_own() -> None:
    assert plan_export(0, 0) == ExportPlan()
    assert plan_export(50 << 20, 1 << 20) == ExportPlan()


def test_what_does_not_fit_is_left_out() -> None:
    saved_model, model_file = needed_bytes(10 * GB)
    assert 10 * GB < saved_model <= 25 * GB
    assert saved_model < model_file <= 45 * GB
    assert plan_export(10 * GB, int(model_file) + 1) == ExportPlan(True, True, separate=True)
    assert plan_export(10 * GB, int(model_file) - 1) == ExportPlan(True, False, separate=True)
    assert plan_export(10 * GB, int(saved_model) - 1) == ExportPlan(False, False, separate=True)


def test_a_model_that_fits_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    announce_export(TABLES, 100 * GB, "out", "")
    announce_export((), 0, "out", "")
    assert not caplog.records


def test_a_missing_model_file_is_announced_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        announce_export(TABLES, 20 * GB, "out", "")
    (record,) = caplog.records
    assert "model.keras" in record.getMessage()
    assert "'large'" in record.getMessage()
    assert "20.0 GB" in record.getMessage()


def test_the_checkpoint_stays_the_export_of_a_model_that_is_too_large(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        announce_export(TABLES, 5 * GB, "out", "/checkpoints")
    assert "The last checkpoint in /checkpoints, written when training is done, is the trained model" in caplog.text


def test_a_model_that_would_be_lost_is_refused() -> None:
    with pytest.raises(ModelDefinitionError, match=r"'large'.*--checkpoint_dir"):
        announce_export(TABLES, 5 * GB, "out", "")


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_limits_the_machines_memory_counts(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, {"proc/self/cgroup": "0::/\n"})) == 8000 * 1024


def test_the_narrowest_limit_above_the_process_counts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pods/mine\n",
            "sys/fs/cgroup/pods/memory.max": "3000\n",
            "sys/fs/cgroup/pods/memory.current": "1000\n",
            "sys/fs/cgroup/pods/memory.stat": "anon 1\ninactive_file 500\nactive_file 200\n",
            "sys/fs/cgroup/pods/mine/memory.max": "max\n",
            "sys/fs/cgroup/pods/mine/memory.current": "900\n",
        },
    )
    assert available_bytes(root) == 2500
    assert used_share(root) == pytest.approx(300 / 3000)


def test_control_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "7500\n",
        },
    )
    assert available_bytes(root) == 0
    assert used_share(root) > 1
    assert used_share(tmp_path / "nothing") == 0
    assert available_bytes(tmp_path / "nothing") > 10**15


def test_what_is_written_to_the_stream_is_read_from_it() -> None:
    pipe = io.BytesIO()
    writer = ExportWriter(pipe)
    values = np.arange(6, dtype=np.float32)
    chunks = [(np.array([3, -1]), values.reshape(2, 3)), (np.zeros(0, np.int64), np.zeros((0, 3), np.float32))]
    writer.message(path="somewhere")
    writer.array(values)
    writer.array(values[:0])
    drawn = InitialRow("uniform", 2**64 - 1, -0.05, 0.05)
    writer.table(TableRows("deep", 3, 2, iter(chunks), drawn))
    writer.table(TableRows("empty", 1, 0, iter(())))
    writer.end()

    reader = ExportReader(io.BytesIO(pipe.getvalue()))
    assert reader.message() == {"path": "somewhere"}
    np.testing.assert_array_equal(reader.floats(6), values)
    assert reader.floats(0).size == 0
    found = [
        (t.name, t.dim, t.num_rows, [(i.tolist(), r.tolist()) for i, r in t.chunks], t.initial) for t in reader.tables()
    ]
    assert found == [
        ("deep", 3, 2, [([3, -1], [[0, 1, 2], [3, 4, 5]])], drawn),
        ("empty", 1, 0, [], InitialRow()),
    ]

    cut = ExportReader(io.BytesIO(pipe.getvalue()[:-3]))
    cut.message()
    cut.floats(6)
    with pytest.raises(StreamEnded):
        [list(table.chunks) for table in cut.tables()]
