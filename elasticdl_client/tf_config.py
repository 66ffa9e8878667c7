"""TF_CONFIG: where TensorFlow's own chief, workers and parameter servers are, and which of them a pod is.

Slot 0 of the workers is the chief, the others are TensorFlow's workers in order; one slot more is the evaluator, which
is no member of the cluster.  Knows neither how addresses are made nor what listens there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from elasticdl_client.job_spec import JobSpec


def has_evaluator(spec: JobSpec) -> bool:
    """Whether a job of TensorFlow's own servers has a pod that evaluates."""
    return bool(spec.job_command) and spec.need_tf_config and bool(spec.validation_data)


def tf_config(addresses: Mapping[str, Sequence[str]], role: str, number: int) -> str:
    """The value of the variable.

    Args:
        addresses: "worker": by slot, the evaluator's not among them; "ps": by id; each as host:port.
        role: worker or ps.
        number: the worker's slot, or the server's id.
    """
    chief, *workers = addresses["worker"]
    cluster = {"chief": [chief], "worker": workers, "ps": list(addresses.get("ps", ()))}
    members = {kind: hosts for kind, hosts in cluster.items() if hosts}
    return json.dumps({"cluster": members, "task": _task(role, number, len(workers))})


def _task(role: str, number: int, num_workers: int) -> dict[str, object]:
    if role == "ps":
        return {"type": "ps", "index": number}
    if number == 0:
        return {"type": "chief", "index": 0}
    if number <= num_workers:
        return {"type": "worker", "index": number - 1}
    return {"type": "evaluator", "index": 0}
