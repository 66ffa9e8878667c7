"""The Python API: `train`, `evaluate` and `predict` start a job and return its handle, `get` finds one again.

`import elasticdl` has the same names.  Nothing here prints, unless `progress=True`, and nothing exits.
"""

from elasticdl_client.errors import ElasticDLError, JobFailed
from elasticdl_client.job_status import JobStatus
from elasticdl_client.jobs.store import Phase
from elasticdl_client.sdk.job import JobHandle, get
from elasticdl_client.sdk.start import FlagValue, evaluate, predict, train

__all__ = [
    "ElasticDLError",
    "FlagValue",
    "JobFailed",
    "JobHandle",
    "JobStatus",
    "Phase",
    "evaluate",
    "get",
    "predict",
    "train",
]
