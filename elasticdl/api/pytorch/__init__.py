"""A user's own PyTorch script made elastic: its loop runs in all workers together, while workers join and leave.

    from elasticdl.api.pytorch import create_elastic_controller

    controller = create_elastic_controller(batch_size=64, num_epochs=3, state=[model, optimizer, scheduler])
    loader = controller.loader(dataset, num_workers=2)       # instead of DataLoader(…)
    for epoch in controller.epochs():                        # instead of range(3)
        for images, labels in loader:
            with controller.step():                          # around what was the loop's body
                optimizer.zero_grad()
                loss = criterion(model(images), labels)
                loss.backward()
                optimizer.step()

Launched by `elasticdl run --num_workers=4 train.py …` each worker runs the script; `python train.py` runs it alone,
over all of the data.

Other launchers of processes that train together are refused, for their groups can neither grow nor shrink.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import parent_process
from typing import Any

from elasticdl.cluster.local.framework_import import finalize_at_exit, no_garbage_collection

finalize_at_exit()
with no_garbage_collection():  # at the script's exit, too, collections pass over all that is imported by now
    import torch

    if parent_process() is None:  # a child that only loads data does without
        import torch._dynamo  # which PyTorch imports when the first optimizer is made

    from elasticdl.api.data import DataShardService, Minibatch
    from elasticdl.api.pytorch.controller import ElasticController, ElasticLoader
    from elasticdl.api.pytorch.wiring import TrainingOptions, make_loop
    from elasticdl.api.session import ScriptSession
    from elasticdl_client.errors import JobError

__all__ = ["ElasticController", "ElasticLoader", "Minibatch", "build_data_shard_service", "create_elastic_controller"]

build_data_shard_service = DataShardService


def create_elastic_controller(
    batch_size: int = 0,
    num_epochs: int | None = None,
    dataset_size: int = 0,
    shuffle: bool | None = None,
    *,
    state: Sequence[Any] | Mapping[str, Any] | Any = (),
    num_minibatches_per_shard: int = 0,
    fixed_global_batch: int = 0,
    training_data: str = "",
    checkpoint_dir: str | None = None,
    checkpoint_steps: int = 0,
    trainable_only: bool = False,
    session: ScriptSession | None = None,
) -> ElasticController:
    """Return the controller of a script's training loop, after joining the job if there is one; example above.

    Args:
        batch_size: records of a minibatch; 0: --minibatch_size.
        num_epochs: passes over the data; None: --num_epochs.
        dataset_size: number of records; 0: that of the loader's data set.
        shuffle: permute records within each task (tasks always are); None: --shuffle.
        state: objects equal in all workers, see `ElasticController.register`: models, optimizers, schedulers …; a
            sequence, a mapping from names, or a single one.
        num_minibatches_per_shard: minibatches that a worker is given at once; 0: --num_minibatches_per_task.
        fixed_global_batch: records of every step, however many workers there are; in a job that is the flag's.
        training_data: files that ElasticDL reads; empty: --training_data, or the data set is the script's own.
        checkpoint_dir: None: --checkpoint_dir.
        checkpoint_steps: minibatches between two checkpoints; 0: --checkpoint_steps, or one a minute.
        trainable_only: frozen parameters of registered modules are neither sent to new workers nor written to
            checkpoints: every worker loads the same ones itself, which is checked.
        session: of a script that has joined the job already.

    Raises:
        JobError: the master cannot be reached, or another launcher has started this process.
    """
    joined = join_job(session)
    wishes = TrainingOptions(
        batch_size=batch_size,
        num_epochs=num_epochs,
        dataset_size=dataset_size,
        shuffle=shuffle,
        num_minibatches_per_shard=num_minibatches_per_shard,
        fixed_global_batch=fixed_global_batch,
        training_data=training_data,
        checkpoint_dir=checkpoint_dir,
        checkpoint_steps=checkpoint_steps,
    )
    return ElasticController(
        state,
        lambda controller, dataset, options: make_loop(wishes, joined, controller, dataset, options),
        trainable_only,
    )


def join_job(session: ScriptSession | None = None) -> ScriptSession:
    """Return the script's place in its job, as a script in PyTorch takes it.

    Raises:
        JobError: the master cannot be reached, or another launcher has started this process.
    """
    _show_log()
    refuse_other_launchers()
    joined = session or ScriptSession.join()
    if joined.link is not None:
        refuse_their_group()
    return joined


def _show_log() -> None:
    """Where the script has not said what becomes of logs, send ours to its output."""
    ours = logging.getLogger("elasticdl")
    if not ours.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)


_HINT = (
    "start the script with `python`, without a distributed strategy (Lightning: Trainer(devices=1)): alone it is one "
    "process, and in a job --num_workers says how many train together"
)


def refuse_other_launchers() -> None:
    """Called before the job is joined.

    Raises:
        JobError: this process is one of a launcher's.
    """
    is_another_address = "MASTER_PORT" in os.environ and ":" not in os.environ.get("MASTER_ADDR", ":")
    if is_another_address or os.environ.get("WORLD_SIZE", "1") != "1" or "TORCHELASTIC_RUN_ID" in os.environ:
        names = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
        found = ", ".join(f"{name}={os.environ[name]}" for name in names)
        raise JobError(f"this process was started by torchrun, `accelerate launch` or Lightning ({found})", _HINT)


def refuse_their_group() -> None:
    """From now on PyTorch's default group is refused where it would meet at the address of the master."""
    make: Callable[..., Any] = torch.distributed.init_process_group

    def init_process_group(backend: Any = None, init_method: Any = None, *arguments: Any, **keywords: Any) -> Any:
        if init_method in (None, "env://") and keywords.get("store") is None:
            raise JobError(
                "init_process_group() makes a group of a fixed size, and the workers of a job come and go", _HINT
            )
        return make(backend, init_method, *arguments, **keywords)

    torch.distributed.init_process_group = init_process_group
