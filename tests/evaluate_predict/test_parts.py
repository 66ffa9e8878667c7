"""Parts: one file a task, whole and once, by any worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.inference.output_parts import Parts
from elasticdl.worker.tasks import HeldLease, LeaseLost


def lease(number: int, task: int) -> HeldLease:
    return HeldLease(pb.Lease(id=number, type=pb.PREDICTION, task=task))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_part_gets_its_name_when_the_lease_is_confirmed(tmp_path: Path) -> None:
    seen = []

    def confirm(number: int) -> bool:
        seen.append((number, names(tmp_path)))
        return True

    with Parts(tmp_path, "csv", confirm).writing(lease(7, 3)) as path:
        path.write_text("a\n")
    assert seen == [(7, [".7.part-00003.csv"])]
    assert names(tmp_path) == ["part-00003.csv"]


def test_a_lost_lease_leaves_what_the_successor_wrote(tmp_path: Path) -> None:
    with Parts(tmp_path, "csv", lambda number: True).writing(lease(8, 3)) as path:
        path.write_text("of the successor\n")
    with pytest.raises(LeaseLost), Parts(tmp_path, "csv", lambda number: False).writing(lease(7, 3)) as path:
        path.write_text("late\n")
    assert names(tmp_path) == ["part-00003.csv"]
    assert (tmp_path / "part-00003.csv").read_text() == "of the successor\n"


def test_an_error_leaves_nothing_and_no_rows_no_part(tmp_path: Path) -> None:
    parts = Parts(tmp_path, "csv", lambda number: True)
    with pytest.raises(ValueError, match="is not in list"), parts.writing(lease(7, 3)) as path:
        [path.write_text("half\n")].index(0)
    with parts.writing(lease(8, 4)):
        pass
    assert names(tmp_path) == []


def test_parts_are_found_in_the_order_of_the_data_and_the_rest_is_swept_away(tmp_path: Path) -> None:
    parts = Parts(tmp_path, "csv", lambda number: True)
    for task in (100000, 2, 99999):
        with parts.writing(lease(task, task)) as path:
            path.write_text("")
    for left in (".9.part-00001.csv", "..9.part-00001.recordio.partial"):
        (tmp_path / left).write_text("")
    parts.sweep()
    assert [part.name for part in parts.finished()] == ["part-00002.csv", "part-99999.csv", "part-100000.csv"]
    assert list(parts.contents()) == [b""] * 3
    (tmp_path / "notes").write_text("of another program")
    parts.remove()
    assert names(tmp_path) == ["notes"]


def test_a_directory_of_parts_alone_goes_with_them(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "parts", "csv", lambda number: True)
    with parts.writing(lease(1, 1)) as path:
        path.write_text("")
    for _ in range(2):
        parts.remove()
        assert names(tmp_path) == []
