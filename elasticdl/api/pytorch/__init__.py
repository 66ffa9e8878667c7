"""Make a PyTorch script elastic: all workers run its training loop together, while workers join and leave.

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

With `elasticdl run --num_workers=4 train.py …` each worker runs the script; `python train.py` runs it in one process,
over all of the data.

Other launchers, such as torchrun, are refused, because their process groups cannot grow or shrink.
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
with no_garbage_collection():  # also freezes the imported objects: collections at the script's exit skip them
    import torch

    if parent_process() is None:  # a child that only loads data does not need it
        import torch._dynamo  # PyTorch would import it when the first optimizer is made

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
    """Join the job, if there is one, and return the controller of the training loop.  See the example of this module.

    Args:
        batch_size: Records per minibatch; 0: --minibatch_size.
        num_epochs: Passes over the data; None: --num_epochs.
        dataset_size: Number of records; 0: the length of the loader's data set.
        shuffle: Permute records within each task (tasks always are permuted); None: --shuffle.
        state: Objects that are equal in all workers, such as models, optimizers and schedulers (see
            `ElasticController.register`): a sequence, a mapping from names to objects, or one object.
        num_minibatches_per_shard: Minibatches assigned to a worker at once; 0: --num_minibatches_per_task.
        fixed_global_batch: Records of every step, for any number of workers; 0: not fixed.  In a job the flag
            --fixed_global_batch decides.
        training_data: Files that ElasticDL reads; empty: --training_data, or the script has its own data set.
        checkpoint_dir: None: --checkpoint_dir.
        checkpoint_steps: Minibatches between two checkpoints; 0: --checkpoint_steps, or one checkpoint per minute.
        trainable_only: Do not send frozen parameters of registered modules to new workers, and do not write them to
            checkpoints.  Every worker must load the same frozen parameters itself; this is checked.
        session: Session of a script that has already joined the job; None: join now.

    Raises:
        JobError: The master cannot be reached, or another launcher has started this process.
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
    """Join the job and return its session, after the checks for a PyTorch script.

    Raises:
        JobError: The master cannot be reached, or another launcher has started this process.
    """
    _show_log()
    refuse_other_launchers()
    joined = session or ScriptSession.join()
    if joined.link is not None:
        refuse_their_group()
    return joined


def _show_log() -> None:
    """Send ElasticDL's log to stdout, unless the script has configured logging."""
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
    """Check that this process was not started by another launcher; called before the job is joined.

    Raises:
        JobError: Another launcher has started this process.
    """
    is_another_address = "MASTER_PORT" in os.environ and ":" not in os.environ.get("MASTER_ADDR", ":")
    if is_another_address or os.environ.get("WORLD_SIZE", "1") != "1" or "TORCHELASTIC_RUN_ID" in os.environ:
        names = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
        found = ", ".join(f"{name}={os.environ[name]}" for name in names)
        raise JobError(f"this process was started by torchrun, `accelerate launch` or Lightning ({found})", _HINT)


def refuse_their_group() -> None:
    """Make `init_process_group` raise JobError if it would use MASTER_ADDR, the address of the job's master."""
    make: Callable[..., Any] = torch.distributed.init_process_group

    def init_process_group(backend: Any = None, init_method: Any = None, *arguments: Any, **keywords: Any) -> Any:
        if init_method in (None, "env://") and keywords.get("store") is None:
            raise JobError(
                "init_process_group() makes a group of a fixed size, and the workers of a job come and go", _HINT
            )
        return make(backend, init_method, *arguments, **keywords)

    torch.distributed.init_process_group = init_process_group
