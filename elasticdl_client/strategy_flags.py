"""The flags of a job that matter under one distribution strategy alone: parameter servers, AllReduce."""

from __future__ import annotations

# ruff: noqa: RUF009 (`flag` is `dataclasses.field`)
from dataclasses import dataclass
from functools import partial

from elasticdl_client.checks import above, at_least, between
from elasticdl_client.choices import WireDtype
from elasticdl_client.flags import TRAIN_ONLY, WITH_MODEL, Group, flag, parses
from elasticdl_client.params import parse_size


@dataclass(frozen=True)
class StrategyFlags:
    """The part of `JobSpec` that says how workers agree on a model; the attributes have the flags' names."""

    # Parameter servers
    use_async: bool = flag(
        True,
        "Asynchronous: apply each gradient when it arrives; false: synchronous, in rounds.",
        Group.PARAMETER_SERVER,
        jobs=TRAIN_ONLY,
    )
    grads_to_wait: int = flag(
        1,
        "Synchronous: number of gradients in a round; fewer if fewer workers train.",
        Group.PARAMETER_SERVER,
        jobs=TRAIN_ONLY,
        check=at_least(1),
    )
    sync_version_tolerance: int = flag(
        0,
        "Synchronous: take gradients up to N rounds late; later ones are computed again.",
        Group.PARAMETER_SERVER,
        jobs=TRAIN_ONLY,
        check=at_least(0),
    )
    get_model_steps: int = flag(
        1,
        "Asynchronous: fetch dense parameters every N steps, and update the worker's copy itself between.",
        Group.PARAMETER_SERVER,
        jobs=TRAIN_ONLY,
        check=at_least(1),
    )
    max_staleness: int = flag(
        0,
        "Asynchronous: maximum staleness; a gradient that misses more than N updates is computed again; 0: no limit.",
        Group.PARAMETER_SERVER,
        jobs=TRAIN_ONLY,
        check=at_least(0),
    )
    lr_staleness_modulation: bool = flag(
        False,
        "Asynchronous: divide the learning rate by the gradient's staleness.",
        Group.PARAMETER_SERVER,
        jobs=TRAIN_ONLY,
    )
    wire_dtype: WireDtype = flag(
        WireDtype.FLOAT32,
        "Data type of gradients, parameters and rows on the network: float32, float16 or bfloat16.",
        Group.PARAMETER_SERVER,
        jobs=WITH_MODEL,
    )
    embedding_threshold: str = flag(
        "2MB",
        "Tables of keras.layers.Embedding above this size live on the parameter servers: bytes, KB, MB, GB; 0: all.",
        Group.PARAMETER_SERVER,
        check=parses(partial(parse_size, "embedding_threshold")),
        jobs=WITH_MODEL,
    )

    # AllReduce
    min_workers: int = flag(
        1,
        "Minimum number of workers; below it training waits.",
        Group.ALL_REDUCE,
        jobs=TRAIN_ONLY,
        check=between(1, 100_000),
    )
    fixed_global_batch: int = flag(
        0,
        "Global batch size: records per step of all workers together, however many they are; a multiple of "
        "--minibatch_size; 0: one minibatch per worker.",
        Group.ALL_REDUCE,
        jobs=TRAIN_ONLY,
        check=at_least(0),
    )
    collective_timeout: float = flag(
        5.0,
        "Seconds without a heartbeat after which a worker leaves the group; slow ones that send them are waited for.",
        Group.ALL_REDUCE,
        jobs=TRAIN_ONLY,
        check=above(0),
    )
