"""The skips that CI accepts, each with its reason.

A skipped test proves nothing, and a machine without the data of a test shows green all the same.  Where ELASTICDL_SKIPS
is `listed`, which `.ci/run` sets, any other skip fails the run; elsewhere it is a line of pytest's summary.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

VARIABLE = "ELASTICDL_SKIPS"
LISTED = {
    r"there is no GPU": "CI has none; the tests run where there is one",
    r"no control group can be made here": "the machine of CI need not let its tests make one",
    r"OrbaxCheckpoint cannot be made here": "orbax is no dependency of ours",
    r"Estimators need TensorFlow 2\.15": "they run with `make test-estimator`",
    r"needs TensorFlow 2\.15": "the same",
    r"needs peft": "it is no requirement of ours; `make test-versions` has it",
    r"needs (gcsfs|adlfs|azurite|oss2|hdfs-native|pyspark)": "`make test-versions` has them, and the servers",
    r"needs (mlflow|wandb)": "they are no requirements of ours; `make test-versions` has them",
    r"this (Keras|TensorFlow) is older": "CI has newer ones; `make test-versions` has the oldest",
}


def unlisted(reasons: Iterable[str]) -> list[str]:
    """The reasons that are not on the list, each once; none where the variable is not set."""
    if os.environ.get(VARIABLE) != "listed":
        return []
    return sorted({reason for reason in reasons if not any(re.search(listed, reason) for listed in LISTED)})
