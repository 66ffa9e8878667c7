"""Statistics of columns against those that plain Python counts, whatever the parts the records came in."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.activities import ActivityClock
from elasticdl.analysis.analysis import Analysis, ColumnSketch
from elasticdl.analysis.cells import Columns, Moments
from elasticdl.data.example import encode_example
from elasticdl.data.reader import Metadata
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.inference.analysis import AnalysisWork, TableInput
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.tasks import HeldLease
from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.job_spec import JobSpec

EXAMPLES = Columns(Metadata(), missing=frozenset("?"))
ROWS = Columns(Metadata(("n", "x", "word"), delimiter=","), missing=frozenset("?"))

words = st.sampled_from(["", "?", "a", "b", "blue, green", "ü"]) | st.text("abcxyz", max_size=3)
numbers = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.sampled_from([0.5, -1.0, 3.0])
rows = st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), numbers, words), min_size=1)


def parts_of(records: list[bytes], cuts: list[int], columns: Columns, exact_distinct: int = 1000) -> Analysis:
    """Each part analysed by itself, written, read, and put together."""
    whole = Analysis(exact_distinct)
    edges = [0, *sorted(cut % (len(records) + 1) for cut in cuts), len(records)]
    for start, end in pairwise(edges):
        part = Analysis(exact_distinct)
        part.add(columns.cells(records[start:end]), end - start)
        whole.merge(Analysis.load(part.dump(), exact_distinct))
    return whole


def of_numbers(values: list[Any], num_buckets: int) -> dict[str, Any]:
    ordered, count = sorted(values), len(values)
    mean = float(statistics.fmean(values)) if isinstance(values[0], float) else float(statistics.mean(values))
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "avg": pytest.approx(mean, rel=1e-12, abs=1e-300),
        "stddev": pytest.approx(statistics.pstdev(values), rel=1e-9, abs=1e-300),
        "boundaries": sorted({ordered[math.ceil(k * count / num_buckets) - 1] for k in range(1, num_buckets)}),
        "distinct_count": len(set(values)),
    }


def of_texts(values: list[str]) -> dict[str, Any]:
    frequent = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    return {"vocab": [value for value, _ in frequent], "vocab_counts": [count for _, count in frequent]}


def check(found: dict[str, Any], table: list[tuple[int, float, str]], num_buckets: int) -> None:
    texts = [word for _, _, word in table if word.strip() and word != "?"]
    assert found["records"] == len(table)
    whole, fractions, strings = (found["columns"][name] for name in ("n", "x", "word"))
    whole_expected = of_numbers([n for n, _, _ in table], num_buckets) | of_texts([str(n) for n, _, _ in table])
    assert {name: whole[name] for name in whole_expected} == whole_expected
    expected = of_numbers([float(x) for _, x, _ in table], num_buckets)
    assert {name: fractions[name] for name in expected} == expected
    assert (strings["count"], strings["missing"]) == (len(texts), len(table) - len(texts))
    assert (whole["count"], whole["missing"]) == (len(table), 0)
    if texts and strings["type"] == "string":
        assert {name: strings[name] for name in ("vocab", "vocab_counts")} == of_texts(texts)
        assert strings["distinct_count"] == len(set(texts))


@settings(max_examples=40)
@given(rows, st.lists(st.integers(0, 100), max_size=3), st.integers(2, 6))
def test_examples_in_any_parts(table: Any, cuts: list[int], num_buckets: int) -> None:
    records = [encode_example({"n": n, "x": x, "word": word}) for n, x, word in table]
    check(parts_of(records, cuts, EXAMPLES).statistics(num_buckets, 1000), table, num_buckets)


@settings(max_examples=40)
@given(rows, st.lists(st.integers(0, 100), max_size=3), st.integers(2, 6))
def test_rows_in_any_parts(table: Any, cuts: list[int], num_buckets: int) -> None:
    table = [(n, x, word.replace(",", ";")) for n, x, word in table]
    records = [f"{n},{x!r},{word}".encode() for n, x, word in table]
    found = parts_of(records, cuts, ROWS).statistics(num_buckets, 1000)
    check(found, table, num_buckets)


@given(rows, st.lists(st.integers(0, 100), max_size=3))
def test_no_bit_of_the_moments_depends_on_the_parts(table: Any, cuts: list[int]) -> None:
    records = [encode_example({"x": x}) for _, x, _ in table]
    whole, parts = (parts_of(records, given, EXAMPLES).sketches["x"].moments for given in ([], cuts))
    assert whole == parts


def test_the_largest_and_the_smallest_floats_have_a_deviation() -> None:
    def moments(*numbers: float) -> Moments:
        found = Moments()
        found.add(np.array(numbers))
        return found

    largest = float(np.finfo(np.float64).max)
    assert moments(largest, -largest).deviation == largest
    assert moments(5e-324, 15e-324).deviation == 5e-324
    assert moments(3.0, 3.0).deviation == 0.0


def test_what_a_column_is_follows_from_all_of_its_values() -> None:
    def types(*fields: str) -> str:
        columns = Columns(Metadata(("c", "d"), delimiter=","))
        records = [f"{text},1".encode() for text in fields]
        return str(parts_of(records, [1, 2], columns).statistics(4, 10)["columns"]["c"]["type"])

    assert types("1", "2", "-3") == "int64"
    assert types("1", "", "2.5") == "float64"
    assert types("1", "2", "three") == "string"
    assert types("one", "2", "3") == "string"
    assert types("1_0", "2") == "string"
    assert types("nan", "2") == "string"
    assert types("", "", "") == "empty"
    assert types("9" * 30, "2") == "string"
    assert types(str(2**63 - 1), "2") == "int64"
    assert types(str(2**63), "2.5") == "string"
    assert types("02134", "10001") == "string"
    assert types("0", "-1", "0.5") == "float64"


def test_ids_beyond_int64_and_codes_with_leading_zeros_stay_apart() -> None:
    columns = Columns(Metadata(("id", "zip"), delimiter=","))
    records = [f"{2**63 + k},{k:05}".encode() for k in range(300)]
    found = parts_of(records, [100], columns).statistics(4, 1000)["columns"]
    for column in found.values():
        assert (column["type"], column["distinct_count"], len(column["vocab"])) == ("string", 300, 300)
    assert "00007" in found["zip"]["vocab"]


def test_texts_of_a_typed_source_are_texts_whatever_they_look_like() -> None:
    records = [encode_example({"zip": f"{k + 10000}", "n": k}) for k in range(10)]
    found = parts_of(records, [3], Columns(Metadata(("zip", "n")))).statistics(2, 10)["columns"]
    assert (found["zip"]["type"], found["n"]["type"]) == ("string", "int64")
    told = Metadata(("zip",), (("zip", "string"),), delimiter=",")  # by column_dtypes
    assert parts_of([b"10001"], [], Columns(told)).statistics(2, 10)["columns"]["zip"]["type"] == "string"


def test_many_different_values_are_sketched_within_their_errors() -> None:
    random = np.random.default_rng(1)
    values = random.permutation(40_000)
    frequent = ["x"] * 3000 + ["y"] * 2000
    texts = [*frequent, *(f"w{k}" for k in range(35_000))]
    records = [encode_example({"n": int(n), "t": texts[n]}) for n in values]
    found = parts_of(records, [10_000, 25_000], EXAMPLES, exact_distinct=5000).statistics(10, 2)["columns"]
    number, text = found["n"], found["t"]
    assert (number["exact"], text["exact"]) == (False, False)
    assert (number["min"], number["max"], number["avg"]) == (0, 39_999, 19_999.5)
    assert number["distinct_count"] == pytest.approx(40_000, rel=0.03)
    assert text["distinct_count"] == pytest.approx(35_002, rel=0.03)
    np.testing.assert_allclose(number["boundaries"], np.arange(1, 10) * 4000, atol=0.01 * 40_000)
    assert text["vocab"] == ["x", "y"]
    np.testing.assert_allclose(text["vocab_counts"], [3000, 2000], rtol=0.05)


def test_numbers_among_which_some_are_missing_are_numbers_though_the_reader_takes_them_for_texts() -> None:
    guessed = Metadata(("age", "zip"), (("age", "string"), ("zip", "string")), delimiter=",")
    columns = Columns(guessed, missing=frozenset("?"), declared_texts=frozenset({"zip"}))
    found = parts_of([b"?,10001", b"7,10002", b"9,?"], [1], columns).statistics(2, 10)["columns"]
    assert (found["age"]["type"], found["age"]["min"], found["age"]["max"]) == ("int64", 7, 9)
    assert (found["zip"]["type"], found["zip"]["missing"]) == ("string", 1)


def test_lists_and_columns_that_are_missing_in_some_records() -> None:
    records = [
        encode_example({"ids": [1, 2, 3], "word": ["a", "b"]}),
        encode_example({"ids": [], "word": ["a"], "late": 1.5}),
        encode_example({"ids": [7], "x": math.nan}),
    ]
    found = parts_of(records, [1], EXAMPLES).statistics(2, 10)["columns"]
    assert {name: (column["count"], column["missing"]) for name, column in found.items()} == {
        "ids": (4, 1),
        "word": (3, 1),
        "late": (1, 2),
        "x": (0, 3),
    }
    assert found["word"]["vocab"] == ["a", "b"]


def test_only_wanted_columns_and_what_has_none() -> None:
    one = Columns(Metadata(("n", "m"), delimiter=","), wanted=("m",))
    assert list(parts_of([b"1,2"], [], one).statistics(2, 10)["columns"]) == ["m"]
    with pytest.raises(DataError, match="no column k"):
        Columns(Metadata(("n", "m"), delimiter=","), wanted=("k",)).cells([b"1,2"])
    with pytest.raises(DataError, match="3 fields, the header 2"):
        one.cells([b"1,2,3"])
    with pytest.raises(DataError, match="column m, which is not UTF-8"):
        one.cells([b"1,\xe9"])
    with pytest.raises(DataError, match="The records have no columns"):
        EXAMPLES.cells([b"just text"])
    with pytest.raises(DataError, match="are damaged"):
        Analysis.load(b"other bytes")


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketches", None)
    with pytest.raises(DataError, match=r"Statistics need the package datasketches.*\n.*pip install 'datasketches'"):
        ColumnSketch()


def test_parts_that_another_job_has_left_are_not_counted_in_silence(tmp_path: Path) -> None:
    class Link:
        clock = ActivityClock()

        def confirm(self, number: int) -> bool:
            return True

    output, directory = tmp_path / "s.json", tmp_path / "s.json.parts"
    spec = JobSpec.from_flags("analyze", {"job_name": "a", "runtime": "local", "data": "d", "output": str(output)})
    directory.mkdir()
    for number in range(2):
        analysis = Analysis()
        analysis.add(ROWS.cells([b"1,2,a"]), 1)
        (directory / f"part-{number:05d}.sketch").write_bytes(analysis.dump())
    failures = SimpleNamespace(link=Link(), clock=Link.clock)
    work = AnalysisWork(spec, cast(TaskFailures, failures), TableInput(ROWS))
    with pytest.raises(DataError, match=r"s\.json\.parts are of 2 records, those of this job are of 1"):
        work.end(HeldLease(pb.Lease(shard=pb.ShardMessage(end=1))))
    assert not output.exists()
    work.end(HeldLease(pb.Lease(shard=pb.ShardMessage(end=2))))
    assert json.loads(output.read_text())["records"] == 2


def test_the_specification_of_an_analysis_survives() -> None:
    flags = {"job_name": "a", "runtime": "local", "data": "t.csv", "output": "s.json", "records_per_task": "7"}
    spec = JobSpec.from_flags("analyze", flags)
    assert (spec.minibatch_size, spec.num_minibatches_per_task, spec.num_ps_pods) == (7, 1, 0)
    assert (spec.prediction_data, spec.prediction_outputs) == ("t.csv", "s.json.parts")
    assert JobSpec.from_json(spec.to_json()) == spec
    for wrong in ({"model_def": "a.b"}, {"num_ps_pods": "1"}, {"num_buckets": "1"}, {"output": ""}):
        with pytest.raises(FlagError):
            JobSpec.from_flags("analyze", flags | wrong)
