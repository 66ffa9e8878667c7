"""A user's own reader, and the errors when it breaks its contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from elasticdl.data.custom import CustomTask, adapt_reader
from elasticdl.data.reader import Metadata, Reader
from elasticdl.data.table_encoder import Selection
from elasticdl.model_def import ModelDefinition
from elasticdl.protocol import Shard
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.factories import Readers
from elasticdl_client.errors import DataError, ElasticDLError, ModelDefinitionError
from elasticdl_client.job_spec import JobSpec


class Original:
    """A reader of the original's form over the numbers below 100 of table t."""

    def __init__(self, shards: object = (("t", 0, 100),), extra: int = 0, record: object = None) -> None:
        self._shards = shards
        self._extra = extra
        self._record = record

    def create_shards(self) -> object:
        return self._shards

    def read_records(self, task: CustomTask) -> Iterator[object]:
        for number in range(task.shard.start, task.shard.end + self._extra):
            yield f"{task.shard.name}{number}" if self._record is None else self._record


class Port:
    """A reader of the port's form."""

    def __init__(self, *shards: Shard) -> None:
        self._shards = list(shards)

    def shards(self) -> list[Shard]:
        return self._shards

    def read(self, shard: Shard) -> list[bytes]:
        return [b"x"] * len(shard)

    def metadata(self) -> Metadata:
        return Metadata()


def adapt(reader: object) -> Reader:
    return adapt_reader(lambda data_origin: reader, "origin")


def test_the_function_gets_origin_task_size_and_params() -> None:
    seen: dict[str, object] = {}

    def custom_data_reader(data_origin: str, records_per_task: int | None = None, **kwargs: object) -> Original:
        seen.update(kwargs, data_origin=data_origin, records_per_task=records_per_task)
        return Original()

    adapt_reader(custom_data_reader, "origin", 32, {"partition": "p"})
    assert seen == {"data_origin": "origin", "records_per_task": 32, "partition": "p"}


def test_a_function_that_does_not_take_the_params_is_refused_with_its_signature() -> None:
    with pytest.raises(ModelDefinitionError, match=r"custom_data_reader\(data_origin\) cannot be called .*partition"):
        adapt_reader(lambda data_origin: Original(), "origin", 32, {"partition": "p"})


def test_something_that_is_no_reader_is_refused_by_its_type() -> None:
    with pytest.raises(ModelDefinitionError, match="returned a dict"):
        adapt({})


def test_the_users_own_exception_passes_unchanged() -> None:
    def custom_data_reader(data_origin: str) -> Original:
        raise KeyError(data_origin)

    with pytest.raises(KeyError, match="origin"):
        adapt_reader(custom_data_reader, "origin")


@pytest.mark.parametrize(
    "shards", [[("t", 50, 50), ("t", 0, 50)], {"t": (0, 100)}, (["t", 0, 100],), [("t", 0, 100), ("t", 100, 0)]]
)
def test_contiguous_slices_become_one_shard(shards: object) -> None:
    reader = adapt(Original(shards))
    assert reader.shards() == [Shard("t", 0, 100)]
    assert reader.read(Shard("t", 49, 51)) == [b"t49", b"t50"]


def test_a_slice_that_does_not_begin_at_zero_counts_from_zero_under_a_name_of_its_own() -> None:
    reader = adapt(Original([("t", 0, 10), ("t", 20, 10)]))
    assert reader.shards() == [Shard("t", 0, 10), Shard("t@20", 0, 10)]
    assert reader.read(Shard("t@20", 1, 3)) == [b"t21", b"t22"]


@pytest.mark.parametrize("shards", [[("t", 0)], [("t", 0, "many")], ["t"], [("t", 0, 10), ("t", 5, 10)]])
def test_shards_that_make_no_sense_are_refused(shards: object) -> None:
    with pytest.raises(ModelDefinitionError, match=r"returned .* as a shard|overlap in t at record 5"):
        adapt(Original(shards)).shards()


def test_no_records_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match="origin has no records"):
        adapt(Original([("t", 0, 0)])).shards()


@pytest.mark.parametrize(("extra", "what"), [(1, "more than 5"), (-2, "only 3")])
def test_a_reader_that_gives_too_many_or_too_few_records_is_found_out(extra: int, what: str) -> None:
    with pytest.raises(DataError, match=f"gave {what} records for t 0 to 5"):
        adapt(Original(extra=extra)).read(Shard("t", 0, 5))


@pytest.mark.parametrize(("record", "seen"), [(b"b", b"b"), ("é", "é".encode()), (bytearray(b"a"), b"a")])
def test_bytes_and_text_are_records(record: object, seen: bytes) -> None:
    assert adapt(Original(record=record)).read(Shard("t", 0, 1)) == [seen]


def test_a_record_of_another_type_is_refused_by_its_type() -> None:
    with pytest.raises(DataError, match="gave a list as a record of t"):
        adapt(Original(record=[1, 2])).read(Shard("t", 0, 1))


def test_the_originals_metadata_becomes_ours() -> None:
    reader = Original()
    reader.metadata = SimpleNamespace(  # type: ignore[attr-defined]
        column_names=["a", "b"], column_dtypes={"a": "bigint", "b": SimpleNamespace(name="string")}
    )
    expected = Metadata(("a", "b"), (("a", "int64"), ("b", "string")), seed=3)
    assert adapt_reader(lambda data_origin: reader, "origin", seed=3).metadata() == expected


@pytest.mark.parametrize("shards", [[Shard("t", 1, 3)], [Shard("t", 0, 3), Shard("t", 0, 4)]])
def test_shards_that_break_the_port_are_refused(shards: list[Shard]) -> None:
    with pytest.raises(ElasticDLError, match="start at 0") as caught:
        adapt(Port(*shards)).shards()
    assert "shards() of the custom data reader" in caught.value.what


@pytest.mark.parametrize(("named", "own", "label"), [("b", "", "b"), ("c", "", ""), ("b", "a", "a")])
def test_a_label_column_of_the_flags_is_in_the_metadata_where_the_reader_has_it(
    named: str, own: str, label: str
) -> None:
    reader = Port(Shard("t", 0, 3))
    reader.metadata = lambda: Metadata(("a", "b"), label_column=own)  # type: ignore[method-assign]
    adapted = adapt_reader(lambda data_origin: reader, "origin", selection=Selection(label=named))
    assert adapted.metadata() == Metadata(("a", "b"), label_column=label)


def test_a_job_gives_its_label_column_to_the_reader_of_the_module() -> None:
    reader = Port(Shard("t", 0, 3))
    reader.metadata = lambda: Metadata(("a", "b"))  # type: ignore[method-assign]
    definition = ModelDefinition("m.py", "Model", object, custom_data_reader=lambda data_origin: reader)
    spec = JobSpec(job_name="j", training_data="t", label_column="b")
    assert Readers(spec, definition).of(pb.TRAINING).metadata().label_column == "b"


def test_a_job_gives_its_columns_to_the_reader_of_the_module() -> None:
    reader = Port(Shard("t", 0, 3))
    reader.metadata = lambda: Metadata(("a", "b", "c"), features=("a", "b"))  # type: ignore[method-assign]
    definition = ModelDefinition("m.py", "Model", object, custom_data_reader=lambda data_origin: reader)
    spec = JobSpec(job_name="j", training_data="t", label_column="c", columns="b")
    assert Readers(spec, definition).of(pb.TRAINING).metadata() == Metadata(
        ("a", "b", "c"), label_column="c", features=("b",)
    )
    with_label = Readers(dataclasses.replace(spec, columns="b,c"), definition).of(pb.TRAINING)
    assert with_label.metadata().features == ("b",)
    without_label = dataclasses.replace(spec, columns="b,y", label_column="y", prediction_data="t")
    assert Readers(without_label, definition).of(pb.PREDICTION).metadata().features == ("b",)
    reader.metadata = lambda: Metadata(("a", "b", "y"), label_column="y")  # type: ignore[method-assign]
    with_its_own = Readers(dataclasses.replace(spec, columns="a,y", label_column=""), definition).of(pb.TRAINING)
    assert with_its_own.metadata().features == ("a",)
    unknown = Readers(dataclasses.replace(spec, columns="b,d"), definition).of(pb.TRAINING)
    with pytest.raises(DataError, match="The custom data reader has no column d, which --columns names"):
        unknown.metadata()
