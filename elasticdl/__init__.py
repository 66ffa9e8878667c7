"""ElasticDL: elastic, fault-tolerant training for Keras 3 and PyTorch.

    job = elasticdl.train(runtime="local", model_zoo="zoo", model_def="flowers.custom_model", training_data="data.csv")
    job.wait()  # raises JobFailed
    history = elasticdl.fit(model, x, y, epochs=5, num_workers=2)  # a compiled Keras model

`train`, `evaluate` and `predict` take the flags of the commands as arguments and return a `JobHandle`; `get` finds a
job by its name.  Code that runs inside of a job uses `elasticdl.api` and `elasticdl.layers`.
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

# gRPC reads these once, when it is imported.  Its event engine hands every message from thread to thread; in the older
# poller the waiting thread reads: with grpcio 1.85 a call of 400 kB in each direction takes a fifth less time, and a
# quarter less of the client's processor time.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# While no thread waits in a call, the older poller looks every 5 s whether a connection stands: too late for the next
# start of a master or a PS.
os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "200")
# The preparation of a fork crashes a parent with a thread in a call now and then.  No child of ours uses the parent's
# channels, and a loader's processes are forked during heartbeats.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_API = ("ElasticDLError", "JobHandle", "JobFailed", "JobStatus", "Phase", "evaluate", "get", "predict", "train")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from elasticdl_client.version import VERSION

        return VERSION
    if name in _API:  # on demand: pods import this package, too
        from elasticdl_client import sdk

        return getattr(sdk, name)
    if name == "fit":  # imports TensorFlow
        from elasticdl.api.keras_fit import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_API, "__version__", "fit"})
