"""Every parameter server holds about as many bytes as any other, for each model of the zoo."""

from __future__ import annotations

import numpy as np
import pytest

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import ModelReport
from elasticdl.frameworks.keras.framework import KerasFramework
from elasticdl.model_def import load
from elasticdl.ps.partition import Partition, even_buckets, num_floats
from elasticdl.rpc import elasticdl_pb2 as pb
from tests.zoo.entries import ENTRIES

MODULES = [
    entry.module for entry in ENTRIES if not (entry.script or entry.estimator or entry.module.endswith("_pytorch"))
]
KNOWN_IDS = 100_000  # of a table that takes any id


def sizes(report: ModelReport, num_ps: int) -> list[int]:
    """Bytes of each PS, with the two slots of Adam."""
    counts = [sum(int(np.prod(v.shape)) for v in report.variables if v.trainable is kind) for kind in (True, False)]
    shares = [even_buckets(ps_id, num_ps) for ps_id in range(num_ps)]
    held = [4 * (3 * num_floats(share, counts[0]) + num_floats(share, counts[1])) for share in shares]
    partition = Partition.from_message(pb.Partition(version=1, ps=[pb.PsAddress(ps_id=n) for n in range(num_ps)]))
    for table in report.tables:
        mine = partition.split(np.arange(table.input_dim or KNOWN_IDS, dtype=np.int64))
        held = [size + (8 + 12 * table.dim) * len(part) for size, part in zip(held, mine, strict=True)]
    return held


@pytest.mark.full
@pytest.mark.parametrize("module", MODULES)
def test_the_zoos_models_are_divided_evenly(module: str) -> None:
    definition = load("model_zoo", f"{module}.custom_model")
    report = KerasFramework(definition, 32, 0, Metadata(seed=0), on_parameter_server=True).report()
    for num_ps in (2, 3, 4, 8):
        held = sizes(report, num_ps)
        assert max(held) <= 1.1 * sum(held) / num_ps, (num_ps, held)
