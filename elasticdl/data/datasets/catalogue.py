"""The data sets that can be generated, by name."""

from __future__ import annotations

import os
from collections.abc import Callable

from elasticdl.data.datasets.clicks import ClickLog
from elasticdl.data.datasets.images import digits, mnist
from elasticdl.data.datasets.split import Split
from elasticdl.data.datasets.tables import census, frappe, iris
from elasticdl_client.errors import DataError

NAMES = ("digits", "mnist", "frappe", "census", "iris", "clicks")


def open_dataset(name: str, source: str = "", click_log: ClickLog | None = None) -> list[Split]:
    """The splits of a data set.

    Args:
        name: one of `NAMES`.
        source: directory of the original files; digits and clicks need none.
        click_log: what to make, for clicks.

    Raises:
        DataError: if the name is unknown, or the source is missing or not as it should be.
    """
    if name == "digits":
        return digits()
    if name == "clicks":
        return (click_log or ClickLog(num_records=100_000)).splits()
    from_files: dict[str, Callable[[str], list[Split]]] = {
        "mnist": mnist,
        "frappe": frappe,
        "census": census,
        "iris": iris,
    }
    if name not in from_files:
        raise DataError(f"There is no data set {name}.", f"Known are {', '.join(NAMES)}.")
    if not source:
        raise DataError(f"The data set {name} is made from files.", "Name the directory that holds them with --source.")
    if not os.path.isdir(source):
        raise DataError(f"The source directory {source} does not exist.", "Check --source.")
    return from_files[name](source)
