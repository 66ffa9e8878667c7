"""ElasticDL: elastic, fault-tolerant training for Keras 3 and PyTorch.

    job = elasticdl.train(runtime="local", model_zoo="zoo", model_def="flowers.custom_model", training_data="data.csv")
    job.wait()  # raises JobFailed
    history = elasticdl.fit(model, x, y, epochs=5, num_workers=2)  # a compiled Keras model

`train`, `evaluate` and `predict` take the flags of the commands as arguments and return a `JobHandle`; `get` finds a
job by its name.  Code that runs inside a job uses `elasticdl.api` and `elasticdl.layers`.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticdl.api.keras_fit import fit as fit
    from elasticdl_client.sdk import ElasticDLError as ElasticDLError
    from elasticdl_client.sdk import JobFailed as JobFailed
    from elasticdl_client.sdk import JobHandle as JobHandle
    from elasticdl_client.sdk import JobStatus as JobStatus
    from elasticdl_client.sdk import Phase as Phase
    from elasticdl_client.sdk import evaluate as evaluate
    from elasticdl_client.sdk import get as get
    from elasticdl_client.sdk import predict as predict
    from elasticdl_client.sdk import train as train

# gRPC reads these variables once, when it is imported.  Its event engine passes every message between threads; with the
# older poller the waiting thread reads the message itself: with grpcio 1.85 a call of 400 kB in each direction takes
# 20 % less time, and 25 % less CPU time of the client.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# While no thread waits in a call, the older poller checks connections only every 5 s: too late to notice that a master
# or a PS has restarted.
os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "200")
# gRPC's fork handlers sometimes crash a parent with a thread in a call, and a loader's processes are forked during
# heartbeats.  No child of ours uses the parent's channels, so the handlers are not needed.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_API = ("ElasticDLError", "JobHandle", "JobFailed", "JobStatus", "Phase", "evaluate", "get", "predict", "train")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from elasticdl_client.version import VERSION

        return VERSION
    if name in _API:  # imported on demand: pods import this package, too, and do not need the SDK
        from elasticdl_client import sdk

        return getattr(sdk, name)
    if name == "fit":  # imports TensorFlow
        from elasticdl.api.keras_fit import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_API, "__version__", "fit"})
