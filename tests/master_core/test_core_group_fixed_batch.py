"""--fixed_global_batch: rank 0 alone holds the tasks, in order, and hears when it holds the last of an epoch."""

from __future__ import annotations

from group_script import GroupScript, standing

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.values import DataKind, ScriptPlan
from elasticdl.protocol import Shard


def test_a_fixed_batch_is_leased_to_rank_0_alone_in_order_and_enough_of_it() -> None:
    script = standing(3, records=200, fixed_global_batch=60)
    assert script.ask_at_once(1) == c.NoLeaseNow()
    leases = []
    while isinstance(answer := script.ask_at_once(0), c.LeaseGranted):
        leases.append(answer.lease)
    order = list(script.job._work.tasks.epochs[0].order)
    assert [lease.task for lease in leases] == order[:4]  # 6 minibatches of a step, and 2 of the next task
    script.progress(leases[0], 0, 1)
    assert script.ask_at_once(0).lease.task == order[4]
    script.kill(0)
    script.all_leave(1, 2)
    script.forms({(0, leases[0].task): (0, 1)})
    assert script.ask_at_once(2) == c.NoLeaseNow()
    tasks = [script.ask_at_once(1).lease.task for _ in range(4)]
    assert tasks == order[:4]


def test_with_input_processes_rank_0_of_a_fixed_batch_holds_a_task_more_for_each() -> None:
    script = standing(1, records=400, fixed_global_batch=20, input_workers=3)
    tasks = []
    while isinstance(answer := script.ask_at_once(0), c.LeaseGranted):
        tasks.append(answer.lease.task)
    assert len(tasks) == 5  # a step is one task


def test_rank_0_of_a_fixed_batch_hears_when_it_holds_all_that_is_left_of_an_epoch() -> None:
    script = standing(2, records=80, fixed_global_batch=40)
    leases = []
    while isinstance(answer := script.ask_at_once(0), c.LeaseGranted):
        leases.append(answer.lease)
    held = tuple(lease.id for lease in leases)
    heard = script.heartbeat(0, held)
    assert (heard.whole_epochs, heard.newest_lease) == (0, leases[-1].id)
    script.progress(leases[0], 0, 1)
    last = script.ask_at_once(0).lease
    heard = script.heartbeat(0, (*held, last.id))
    assert (heard.whole_epochs, heard.newest_lease) == (1, last.id)
    assert script.heartbeat(1).whole_epochs == 0  # it is rank 0 that closes an epoch
    script.kill(0)
    script.all_leave(1)
    assert script.heartbeat(1).whole_epochs == 0  # leased tasks are to be leased again
    script.forms({(0, leases[0].task): (0, 1)})
    again = [script.ask_at_once(1).lease for _ in range(len(order_left(script)))]
    heard = script.heartbeat(1, tuple(lease.id for lease in again))
    assert (heard.whole_epochs, heard.newest_lease) == (1, again[-1].id)


def order_left(script: GroupScript) -> list[int]:
    return script.job._work.tasks.epochs[0].todo()


def test_rank_0_of_a_fixed_batch_hears_when_training_stops_early() -> None:
    script = standing(1, records=200, fixed_global_batch=40)
    lease = script.ask_at_once(0).lease
    assert script.heartbeat(0, (lease.id,)).whole_epochs == 0
    script.job._work.tasks.stop()
    heard = script.heartbeat(0, (lease.id,))
    assert (heard.whole_epochs, heard.newest_lease) == (1, lease.id)


def test_a_fixed_batch_is_counted_in_the_minibatches_of_the_script() -> None:
    script = GroupScript(num_workers=1, runs_command=True, fixed_global_batch=20, minibatch_size=10)
    script.worker_starts(0)
    shards = {DataKind.TRAINING: (Shard("", 0, 60),)}
    script.ask(e.ModelReported, 0, 7, shards=shards, plan=ScriptPlan(2, 1, 1))
    script.ready(0)
    script.forms(steps=0)
    num_leases = 0
    while isinstance(script.ask_at_once(0), c.LeaseGranted):
        num_leases += 1
    assert num_leases == 11  # 10 minibatches of a step, and the next task
