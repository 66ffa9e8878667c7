"""ElasticDL: deep learning on machines that come and go.

gRPC's event engine hands every message from thread to thread.  Its older poller lets the thread that waits do the
reading: with grpcio 1.85 that takes a fifth off a call of 400 kB in each direction, and a quarter off the client's
processor time.  gRPC looks only once, when it is imported; so it is chosen here, before anything else of ours is
imported, unless the environment has chosen already.

While no thread waits in a call, the older poller looks every 5 s whether a connection has come about: too long to wait
for the next start of a master or a PS.

gRPC's preparation of a fork, which lets the child use the parent's channels, crashes the parent now and then
while one of its threads is in a call.  No child of ours does that, and a loader's processes are forked during
heartbeats.
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

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "200")
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
