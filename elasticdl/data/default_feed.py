"""The default feed, for modules without one: which columns are features, which one is the label.

The feeds themselves are in `elasticdl.frameworks`, one for each framework.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticdl.data.reader import Metadata
from elasticdl.data.text import common_type
from elasticdl_client.errors import DataError, ModelDefinitionError

_SHOWN = 200  # characters of a wrong row or field


@dataclass(frozen=True, slots=True)
class FeedColumns:
    """A source's columns as the default feed takes them.

    Attributes:
        dtypes: name to "int64", "float64", "string" or "image", of all columns of a record, in order.
        shapes: name to the shape of its values; (-1,): it varies.
        features: names of those that the model is given.
        label: name of the label's column; empty: for prediction.
        delimiter: of CSV rows; empty: records are tf.train.Example.
    """

    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    features: tuple[str, ...]
    label: str
    delimiter: str

    @property
    def used(self) -> tuple[str, ...]:
        """Features and label."""
        return (*self.features, self.label) if self.label else self.features

    @property
    def lists(self) -> tuple[str, ...]:
        """Those of `used` that hold lists of any length."""
        return tuple(name for name in self.used if -1 in self.shapes.get(name, ()))

    @property
    def is_one_image(self) -> bool:
        """The model is given the image itself, not a dictionary of columns."""
        return len(self.features) == 1 and self.dtypes[self.features[0]] == "image"


def table_of(metadata: Metadata, is_prediction: bool, path: str) -> FeedColumns:
    """How to make samples of a source with columns.

    Args:
        is_prediction: the label, if there is one, is left out.
        path: of the user's module, for messages.

    Raises:
        ModelDefinitionError: the source has no columns, or no label is named.
    """
    dtypes = dict(metadata.column_dtypes)
    if not metadata.column_names or not dtypes:
        raise ModelDefinitionError(
            f"{path} has no feed, and the data have no columns.",
            "Define feed(dataset, mode, metadata), or train on tables (CSV with a header, Parquet, SQL, …); a CSV file "
            "whose name does not end in .csv needs --data_reader_params=reader_type=CSV.",
        )
    if not is_prediction and not metadata.label_column:
        raise ModelDefinitionError(
            f"{path} has no feed, and --label_column names no column of the data.",
            f"Define feed, or give --label_column, one of {', '.join(metadata.column_names)}.",
        )
    features = metadata.features or metadata.column_names
    shapes = dict(metadata.column_shapes)
    for name in features:
        if dtypes[name] == "image" and not shapes.get(name):
            raise ModelDefinitionError(
                f"{path} has no feed, and images may be of any size.",
                "Give --data_reader_params='image_size=[224,224]' (height, width), or define feed.",
            )
    return FeedColumns(
        {name: dtypes[name] for name in metadata.column_names},
        shapes,
        tuple(name for name in features if name != metadata.label_column),
        "" if is_prediction else metadata.label_column,
        metadata.delimiter,
    )


def wrong_cell(column: str, dtype: str, value: str) -> DataError:
    """A field of a CSV row that is not of its column's type."""
    if not value.strip():
        what = f"A row has no value in the column {column}, which holds whole numbers"
    else:
        what = f"A row has {value[:_SHOWN]!r} in the column {column}, which is read as {dtype}"
    is_fraction = not value.strip() or common_type((value,)) == "float64"
    wider = "float64" if dtype == "int64" and is_fraction else "string"
    missing = ", where a missing number is NaN" if wider == "float64" else ""
    return DataError(
        f"{what}: the types of CSV columns are those of the first rows.",
        f'Say --data_reader_params=\'column_dtypes={{"{column}": "{wider}"}}\'{missing}; or repair the row; '
        "--max_bad_records=N leaves such rows out.",
    )


def wrong_row(num_fields: int, num_columns: int, row: str = "") -> DataError:
    """A CSV row with more or fewer fields than the header."""
    return DataError(
        f"A row has {num_fields} fields, the header {num_columns}{row and ': '}{row[:_SHOWN]}",
        "Quote fields that hold the delimiter; --max_bad_records=N leaves such rows out.",
    )


def missing_number(column: str) -> DataError:
    """A record of a typed source without the value of a whole number."""
    return DataError(
        f"A record has no value of the column {column}, which holds whole numbers.",
        "Give it a value, or read it as float64, where missing is NaN; --max_bad_records=N leaves such records out.",
    )
