"""The flags that say how a worker makes minibatches and computes steps, most of them for PyTorch; part of `JobSpec`."""

from __future__ import annotations

# ruff: noqa: RUF009 (`flag` is `dataclasses.field`)
from dataclasses import dataclass

from elasticdl_client.checks import at_least, between
from elasticdl_client.choices import Precision
from elasticdl_client.flags import TRAIN_ONLY, WITH_MODEL, Group, flag

COMPUTATION_DEFAULTS: dict[str, object] = {
    "precision": Precision.FP32,
    "compile": False,
    "channels_last": False,
    "clip_gradient_norm": 0.0,
    "accumulate_steps": 1,
    "shard_optimizer": False,
    "input_workers": 0,
}


@dataclass(frozen=True)
class ComputationFlags:
    """The part of `JobSpec` on making minibatches and computing steps; the attributes have the flags' names."""

    precision: Precision = flag(
        Precision.FP32,
        "Compute in fp32, or in bf16 or fp16, the latter with dynamic loss scaling: PyTorch models by autocast, Keras "
        "models by a mixed policy, with AllReduceStrategy or Local.",
        Group.TRAINING,
        jobs=TRAIN_ONLY,
    )
    compile: bool = flag(
        False, "PyTorch models: compile the model with torch.compile.", Group.TRAINING, jobs=TRAIN_ONLY
    )
    channels_last: bool = flag(
        False,
        "PyTorch models: keep images and the kernels of convolutions in memory with the channels last.",
        Group.TRAINING,
        jobs=TRAIN_ONLY,
    )
    clip_gradient_norm: float = flag(
        0.0,
        "PyTorch models: scale the gradient of a step down to this norm where it is larger; 0: leave it as it is.",
        Group.TRAINING,
        jobs=TRAIN_ONLY,
        check=at_least(0),
    )
    accumulate_steps: int = flag(
        1,
        "PyTorch models: compute each minibatch in N parts, one after the other, and add their gradients up; a divisor "
        "of --minibatch_size.",
        Group.TRAINING,
        jobs=TRAIN_ONLY,
        check=between(1, 2**31 - 1),
    )
    shard_optimizer: bool = flag(
        False,
        "PyTorch models: each worker keeps the optimizer's state of a part of the parameters, two N-ths of it with N "
        "workers (ZeRO-1), and updates that part.",
        Group.ALL_REDUCE,
        jobs=TRAIN_ONLY,
    )
    input_workers: int = flag(
        0,
        "PyTorch models: run `feed` in N processes of each worker; 0: in a thread of the worker.",
        Group.TRAINING,
        jobs=WITH_MODEL,
        check=between(0, 256),
    )
