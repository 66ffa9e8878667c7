"""The worker's side of the parameter servers."""

from elasticdl.ps.client.client import PsClient, check_model
from elasticdl.ps.client.connection import PsUnavailable
from elasticdl.ps.client.exchanges import (
    IdsOutOfRange,
    LeaseRefused,
    LocalDenseValues,
    PsUninitialized,
    Pull,
    Pulled,
    Push,
    TooStale,
)
from elasticdl.ps.optim.initializers import initial_row

__all__ = [
    "IdsOutOfRange",
    "LeaseRefused",
    "LocalDenseValues",
    "PsClient",
    "PsUnavailable",
    "PsUninitialized",
    "Pull",
    "Pulled",
    "Push",
    "TooStale",
    "check_model",
    "initial_row",
]
