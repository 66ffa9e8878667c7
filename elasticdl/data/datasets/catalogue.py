"""The data sets that can be generated, by name."""

from __future__ import annotations

import os
from collections.abc import Callable

from elasticdl.data.datasets import Split
from elasticdl.data.datasets.clicks import ClickLog, criteo
from elasticdl.data.datasets.imagenet import imagenet
from elasticdl.data.datasets.images import cifar10, digits, mnist
from elasticdl.data.datasets.tables import census, frappe, iris
from elasticdl_client.errors import DataError

NAMES = ("digits", "mnist", "cifar10", "imagenet", "frappe", "census", "criteo", "iris", "clicks")


def open_dataset(name: str, source: str = "", click_log: ClickLog | None = None) -> list[Split]:
    """The splits of a data set.

    Args:
        name: one of `NAMES`.
        source: directory of the original files; digits and clicks need none, and without one cifar10, imagenet and
            criteo are generated.
        click_log: what to make, for clicks.

    Raises:
        DataError: if the name is unknown, or the source is missing or not as it should be.
    """
    if name == "digits":
        return digits()
    if name == "clicks":
        return (click_log or ClickLog(num_records=100_000)).splits()
    generated: dict[str, Callable[[str], list[Split]]] = {"cifar10": cifar10, "imagenet": imagenet, "criteo": criteo}
    if name in generated and not source:
        return generated[name]("")
    from_files: dict[str, Callable[[str], list[Split]]] = {
        **generated,
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
