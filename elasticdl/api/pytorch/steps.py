"""The steps behind an elastic controller: the code between two batches of a script, and around each batch.

Between two batches the script is inside `batches`, which exchanges headers with the other members, enters the next
group when one is planned, and repeats a batch if its step was dropped.  For each batch the script's own code runs,
inside `step`.  A member without work, while others have some, runs it on an earlier batch with weight 0, so that all
members make the same changes to the model, optimizer, scheduler and other registered objects.

`Loop`: the parts of an elastic controller that need its data set.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

from elasticdl.activities import Activity
from elasticdl.api.data import DataShardService, Minibatch
from elasticdl.api.pytorch.alone import StepGroup
from elasticdl.api.pytorch.evaluation import ScriptEvaluation
from elasticdl.api.pytorch.gradients import PartDone, ScriptGradients, StepDropped, StepPosition, items_of
from elasticdl.api.pytorch.pipeline import LoaderPipeline, cause_of, joined
from elasticdl.api.pytorch.plateau import AgreedMetrics, PlateauMetrics
from elasticdl.api.pytorch.registration import OptimizerCheck, named_things
from elasticdl.api.pytorch.shares import ScriptBatchSource
from elasticdl.api.pytorch.state import Arrays, RegisteredState
from elasticdl.api.pytorch.trainers import LightningTrainer
from elasticdl.cluster.cluster import frames_of_user
from elasticdl.frameworks.torch.randomness import seed_script
from elasticdl.protocol import derive_seed
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.channels import MasterGone
from elasticdl.worker.allreduce.group_session import GroupEnded
from elasticdl.worker.allreduce.replica import CheckpointWriter, LastCheckpoint, Replica
from elasticdl.worker.allreduce.step_header import BatchRef, StepFlag, StepPlan
from elasticdl.worker.termination import Termination
from elasticdl_client.errors import CheckpointError, JobError, LastCheckpointError, ModelDefinitionError

_log = logging.getLogger("elasticdl.api")
_PATIENCE_S = 0.1  # wait for minibatches in each round while no member has work
_END_OF_DATA_S = 2.0  # generous: the master replies to both requests immediately
_EMPTY_LOOP = (
    "This loop is empty: the one before, inside scope(), has gone over all epochs. "
    "Write `for epoch in controller.epochs():` around the loop to have one epoch in each."
)
_UNASSIGNED = -1  # epoch of a minibatch that is not assigned to a member


class _Progress:
    """The progress of the script's loops; part of the registered state."""

    def __init__(self) -> None:
        self.begun = -1  # the epoch of the newest loop
        self.evaluated = 0  # number of evaluated epochs, or of evaluated periods of steps
        self.metrics = AgreedMetrics()

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun, "evaluated": self.evaluated, "metrics": self.metrics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.begun, self.evaluated = state["begun"], state["evaluated"]
        self.metrics.load_state_dict(state.get("metrics", {}))  # old checkpoints have none


class ScriptSteps:
    """Makes the steps of a script; `ElasticController` is the public part."""

    def __init__(
        self, state: Any, wire: Callable[[Any, Any, dict[str, Any]], Loop], trainable_only: bool = False
    ) -> None:
        """
        Args:
            state: See `named_things`.
            wire: Creates the parts once the data set is known.
            trainable_only: Frozen parameters of modules are not part of the state.
        """
        self.state = RegisteredState(trainable_only)
        self.progress = _Progress()
        self.state.add(self.progress, "progress")
        for name, thing in named_things(state):
            self.state.add(thing, name)
        self.rank, self.size = 0, 1
        self.is_rehearsal = False
        self.evaluations: list[ScriptEvaluation] = []
        self._wire = wire
        self._loop: Loop | None = None
        self._is_inside = False  # is a member of a group
        self._unbroken: ExitStack | None = None  # context in which SIGTERM waits for this process
        self._has_rehearsed = self._has_entered = False
        self._sampled_epoch = 0  # current epoch of the others while this process rehearses; -1: no worker has the model
        self._num_given = 0  # batches yielded in the script's current loop
        self._trainer: LightningTrainer | None = None  # runs the loop, if there is one
        self._is_over = self._is_closed = False
        self._final_ledger: pb.AppliedSet | None = None
        self._is_idle = False
        self._epoch = -1  # of the script's current loop
        self._spans_epochs = False  # one loop yields all epochs
        self._num_names = 0  # minibatches in the model
        self._plan: StepPlan | None = None
        self._todo: list[tuple[BatchRef | None, Minibatch]] = []  # minibatches of the plan not computed yet
        self._num_ahead = 0  # batches of the plan after the current one
        self._stand_in: Minibatch | None = None
        self._batch: Any = None
        self._stand_in_batch: Any = None
        self._has_stepped = False
        self._after_loop: Arrays | None = None  # the state after the end of the current loop
        self._unchanged: Arrays | None = None  # the state before a batch without an effect
        self._before: dict[str, Any] | None = None  # the state before a step that changes it before its last sum
        self._loss: float | None = None
        self._error: Exception | None = None  # of a batch; it has ended training in this process
        self._has_set_trigger = self._is_triggered = False  # set here, not sent yet; set by any member

    def __reduce__(self) -> Any:
        raise JobError(
            "an elastic controller belongs to its process, and this one would be copied to another",
            "leave out what starts processes that train (Lightning: strategy='ddp_spawn')",
        )

    def get_current_epoch(self) -> int:
        """Return the number of complete epochs in the model."""
        per_epoch = self._parts.data.get_minibatch_count_per_epoch()
        return self._num_names // per_epoch if per_epoch else 0

    @property
    def group(self) -> StepGroup:
        """The group of this process, for work between two batches."""
        return self._parts.group

    def share(self, data: bytes | None) -> bytes | None:
        """Broadcast data from the member with rank 0; all members call it between the same two batches.

        Args:
            data: The data in the member with rank 0; None in the others.

        Returns:
            The data of rank 0; this member's argument if it has no group, or the group was lost meanwhile.
        """
        if not self._is_inside:
            return data
        try:
            with self._parts.data.session.clock.during(Activity.COLLECTIVE):
                return self._parts.group.share(data)
        except GroupEnded:
            self._come_out()
            return data

    def close(self) -> None:
        """Leave the group; called automatically when the process ends."""
        if self._loop is None or self._is_closed:
            return
        if self._is_inside and self._plan is None and self._final_ledger is None:
            self._end_loop()  # a loop that counts its batches does not request another one
            if self._is_closed:
                return
        self._is_closed = self._is_over = True
        if self._is_inside:
            self._loop.group.leave("its script has ended")
            self._loop.data.close()
            self._loop.writer.wait()
        self._come_out_for_good()
        self._loop.optimizers.close()
        self._loop.metrics.close()
        self._loop.stop()

    def final_ledger(self) -> pb.AppliedSet | None:
        """Return the final ledger; None until the model is complete and this process has left its group for good."""
        return self._final_ledger

    def bid_farewell(self, is_idle: bool) -> None:
        """After SIGTERM, in another thread: report the finished work, save, and leave; see `AllReduceLoop.leave`.

        Args:
            is_idle: No step is in progress, so the state is consistent.
        """
        parts = self._parts
        parts.data.reporter.drain(parts.termination.reports_s)
        is_idle = parts.group.shut_out() or is_idle
        is_whole = is_idle and self._unchanged is None  # else the script's loop may have changed the state
        parts.last.save(is_whole)
        if parts.data.session.link is not None:
            parts.data.session.link.say_farewell()
        parts.last.finish(is_whole)

    # Behind them ----------------------------------------------------------------------------------------------------

    @property
    def _parts(self) -> Loop:
        if self._loop is None:
            raise JobError("this controller has no data yet", "call controller.loader(data set) first")
        return self._loop

    def batches(self) -> Iterator[Any]:
        """Return the batches of one epoch, or inside `scope()` of all epochs; see `ElasticLoader`."""
        self._settle()
        return self._loop_over()

    def _loop_over(self) -> Iterator[Any]:
        if self._is_over and self._spans_epochs and self._has_stepped:
            _log.warning(_EMPTY_LOOP)
        while not self._is_through:
            if not self._prepare():
                if self._trainer is not None:
                    self._trainer.end()
                return
            if self._epoch < 0 and not self.is_rehearsal and not self._spans_epochs:
                self._epoch = self.progress.begun = self.get_current_epoch()
            if self._is_through:
                break
            self._has_stepped = False
            self._num_given += 1
            if self._trainer is not None:
                self._trainer.begin_batch(self._epoch, self._parts.group.ledger.steps)
            doing = Activity.COMPILE if self.is_rehearsal else Activity.COMPUTE
            with self._parts.data.session.clock.during(doing):
                try:
                    yield self._batch
                except GeneratorExit:
                    if self._trainer is not None and self._is_through:
                        self._end_loop()  # the Trainer counts batches, and leaves the loop after the last
                    raise
            if not self._has_stepped:
                raise JobError("a batch was not trained in `with controller.step():`", "put the loop's body in there")
            self._undo()
        self._end_loop()

    @property
    def num_batches(self) -> int:
        """See `ElasticLoader.__len__`."""
        parts = self._parts
        if not self._num_given or not self._has_entered:
            return self._most_batches
        per_epoch = parts.data.get_minibatch_count_per_epoch()
        at_once = min(self.size, parts.shares.num_per_step or self.size)
        end = per_epoch * (parts.data.plan.num_epochs if self._spans_epochs else self._epoch + 1)
        planned, ahead = (len(self._plan.all_parts), self._num_ahead) if self._plan is not None else (0, 0)
        left = max(0, end - self._num_names - planned)
        return self._num_given + ahead - (-left // at_once)

    @property
    def _most_batches(self) -> int:
        """The number of batches in a loop if no worker is lost: in a job one more, for the rehearsal."""
        data = self._parts.data
        num_epochs = data.plan.num_epochs if self._spans_epochs else 1
        return data.get_minibatch_count_per_epoch() * max(1, num_epochs) + (data.session.link is not None)

    @property
    def _is_through(self) -> bool:
        """Whether the epoch of the script's loop is completely in the model."""
        return 0 <= self._epoch < self.get_current_epoch()

    def _undo(self) -> None:
        """Revert the changes of the script's loop after a rehearsal or a dropped step."""
        if self._unchanged is not None:
            self.state.load_state(self._unchanged)
        self._unchanged, self.is_rehearsal = None, False

    def _settle(self) -> None:
        """Finish a loop, after the script's code behind it has run."""
        self._parts.data.session.clock.switch(Activity.COMPUTE)
        self._num_given = 0
        if self._after_loop is not None:
            self.state.load_state(self._after_loop)
            self._after_loop = None
        if self._epoch >= 0:
            self._epoch, self.progress.begun = -1, self.get_current_epoch()

    def _end_loop(self) -> None:
        self._parts.data.session.clock.switch(Activity.EVALUATE)  # code after a loop has no time limit
        num_epochs = self._parts.data.plan.num_epochs
        if num_epochs and self.get_current_epoch() >= num_epochs:
            self._finish()

    def _prepare(self) -> bool:
        """Work until there is a batch to compute; return False if there are no more data."""
        if self._error is not None:
            raise JobError(
                f"the script has caught an error of a step, which is lost, and continues: {cause_of(self._error)}",
                "let the error end the script; a bad record is left out by the data set or collate_fn",
            ) from self._error
        while not self._is_over:
            if self._todo:
                return self._fetch()
            if not self._is_inside and not self._enter():
                continue
            try:
                self._round()
            except GroupEnded as ended:
                _log.debug("Left the group: %s", ended)
                self._come_out()
        return False

    def _enter(self) -> bool:
        """Rehearse or enter a group; return False if this process is not in a group yet, or not any more."""
        parts = self._parts
        if not self._has_rehearsed:
            self._has_rehearsed = True
            self._meet_trainer()
            parts.pipeline.start()
            if parts.data.session.link is not None:
                self._rehearse(parts.data.session.link.sample())
                return False
        parts.start()
        try:
            with parts.data.session.clock.during(Activity.JOIN):
                has_entered = parts.group.enter()
        except CheckpointError as error:
            self._end_job(error)
            raise
        if self._unbroken is None:
            self._unbroken = ExitStack()
            self._unbroken.enter_context(parts.termination.unbroken())
        if not has_entered:
            self._is_over = True
            self._come_out_for_good()
            self._end_without_model()
            self._save_after_group()
            return False
        self._is_inside, self._is_idle, self._has_entered = True, False, True
        self.rank, self.size = parts.group.rank, parts.group.size
        parts.data.session.rank = self.rank
        parts.last.begin_group()
        self._num_names = parts.group.ledger.applied.num_names
        if -1 < self._epoch < self.progress.begun:
            # The script of the state's source has run the code after its loop, this script has not.
            self._after_loop = self.state.state()
        parts.shares.confirmed(parts.group.take_confirmed(), None)
        parts.shares.entered()
        parts.metrics.entered()
        parts.writer.begin(parts.group.ledger)
        return True

    def _end_without_model(self) -> None:
        """End this process, whose job is over, unless it has the trained model: its script would use an older one."""
        has_all = self._has_entered and 0 < self._parts.data.plan.num_epochs <= self.get_current_epoch()
        has_final = self._has_entered and not self._parts.group.is_outdated
        if not has_all and not (has_final and self._has_no_more_data()):
            _log.info("The training has ended without this worker: its script ends here, before what follows its loop")
            raise SystemExit(0)

    def _has_no_more_data(self) -> bool:
        """Return whether training was stopped early; the end of the data may arrive shortly after that of the job."""
        shares = self._parts.shares
        if not shares.is_over:
            shares.offer(_END_OF_DATA_S)
        return shares.is_over

    def _save_after_group(self) -> None:
        """Write the last checkpoint if `stop_training` was called, and the job's end broke the group before that."""
        parts = self._parts
        if self.rank != 0 or not parts.group.holds_all:
            return
        with parts.termination.unbroken(), parts.data.session.clock.during(Activity.CHECKPOINT):
            parts.writer.save_last(parts.group.ledger)
        if parts.writer.failure:
            self._fail_unsaved(parts.writer.failure)

    def _meet_trainer(self) -> None:
        """Adapt to Lightning's Trainer, if it runs the loop."""
        trainer = LightningTrainer.of(self.state.modules)
        if trainer is None:
            return
        plan, link = self._parts.data.plan, self._parts.data.session.link
        trainer.check(plan.num_epochs, is_alone=link is None)
        for thing in trainer.state:
            self.state.add(thing)
        self._parts.model.begin()
        self._parts.gradients.raises = not trainer.continues_after_backward
        self._trainer, self._spans_epochs = trainer, False
        trainer.begin()

    def _come_out(self) -> None:
        """Leave a broken group; does not return in a terminating process, unless it is needed in the next group."""
        self._is_inside = False
        if not self._parts.last.needs_group:
            self._come_out_for_good()

    def _come_out_for_good(self) -> None:
        self._is_inside = False
        unbroken, self._unbroken = self._unbroken, None
        if unbroken is not None:
            unbroken.close()

    def _rehearse(self, sample: pb.SampleReply) -> None:
        shard, self._sampled_epoch = sample.shard, sample.epoch
        numbers = list(range(shard.start, shard.end))
        if numbers:
            records = self._parts.data.records_of(shard.name, numbers, shard.identity)
            self._stand_in = Minibatch(0, _UNASSIGNED, 0, 0, shard.name, numbers, records)
            self._todo = [(None, self._stand_in)]
            self.is_rehearsal = True
            self._unchanged = self.state.state()

    def _round(self) -> None:
        """Exchange headers once, and do what the members agree on."""
        parts = self._parts
        self._between_steps()
        clock = parts.data.session.clock
        leaving = parts.last.begin_round()
        offered: Sequence[BatchRef] = ()
        if StepFlag.LEAVING not in leaving:
            with clock.during(Activity.IDLE if self._is_idle else Activity.INPUT):
                offered = parts.shares.offer(_PATIENCE_S if self._is_idle else 0.0)
        with clock.during(Activity.COLLECTIVE):
            plan = parts.group.plan_step(offered, parts.shares.wish | leaving | parts.metrics.wish)
        parts.shares.confirmed(parts.group.take_confirmed(), self._loss)
        if plan.ends_all:
            raise GroupEnded(parts.last.end_with_all())
        if self._exchanges(plan):
            return
        is_step = parts.shares.agree(plan)
        self._is_idle = not is_step
        if is_step:
            self._plan = plan
            self._todo = [(part, parts.shares.minibatch(part)) for part in plan.own]
            if not self._todo:
                self._todo = [(None, self._some_minibatch())]
        elif parts.shares.is_over:
            self._finish()

    def _exchanges(self, plan: StepPlan) -> bool:
        """Exchange metrics or triggers instead of a step, if the plan says so; return whether it does."""
        self._is_triggered |= StepFlag.TRIGGER in plan.wishes
        if StepFlag.METRIC in plan.wishes:
            self._parts.metrics.agree(self._parts.group)
            if self._after_loop is not None:
                self._after_loop = self.state.state()
        return bool(plan.wishes & (StepFlag.METRIC | StepFlag.CHECK))

    def set_trigger(self) -> None:
        """Make the next `check_trigger` return True in all members; does nothing in a rehearsal."""
        self._has_set_trigger |= not self.is_rehearsal

    def check_trigger(self) -> bool:
        """Return whether any member has set the trigger since the last check; all members call it after the same step.

        A member that does not call it then learns it from a header, for its next call.  Returns False without a group:
        in a rehearsal, after a lost step, within a step.
        """
        if self._plan is not None or not (self._is_inside or self._is_over):
            return False
        if self._is_inside and not self._is_triggered:
            wish = StepFlag.CHECK | (StepFlag.TRIGGER if self._has_set_trigger else StepFlag.NOTHING)
            try:
                with self._parts.data.session.clock.during(Activity.COLLECTIVE):
                    self._exchanges(self._parts.group.plan_step((), wish))
            except GroupEnded:
                self._come_out()
                return False
        is_set = self._is_triggered or self._has_set_trigger
        self._is_triggered = self._has_set_trigger = False
        return is_set

    def take_metric(self) -> bool:
        """Agree on the metric that the script has passed to a scheduler, now or before the next step.

        Returns:
            False: The scheduler's change is reverted later, or comes after the last step: it uses its own metric.
        """
        parts = self._parts
        if self._is_over or self._after_loop is not None or self._unchanged is not None:
            return False
        try:
            while self._is_inside and self._plan is None and parts.metrics.wish:
                with parts.data.session.clock.during(Activity.COLLECTIVE):
                    self._exchanges(parts.group.plan_step((), parts.metrics.wish))
        except GroupEnded:
            self._come_out()
        return True

    def tell_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """See evaluation.py."""
        link = self._parts.data.session.link
        if link is not None:
            link.report_metrics(step, metrics)

    def _between_steps(self) -> None:
        parts = self._parts
        for evaluation in self.evaluations:
            per_epoch, clock = parts.data.get_minibatch_count_per_epoch(), parts.data.session.clock
            self.progress.evaluated = evaluation.run_if_due(
                self.progress.evaluated, self._num_names, per_epoch, self, clock
            )
        if self.rank == 0:
            with parts.data.session.clock.during(Activity.CHECKPOINT):
                parts.writer.save_if_due(parts.group.ledger)

    def _finish(self) -> None:
        """Complete training: check with the others that all data are in the model, save and report it."""
        parts = self._parts
        while not self._is_over:
            if not self._is_inside and not self._enter():
                continue
            num_epochs = parts.data.plan.num_epochs
            if not parts.shares.is_over and self.get_current_epoch() < num_epochs:
                return  # the group has started from an older model
            try:
                self._between_steps()
                with parts.data.session.clock.during(Activity.COLLECTIVE):
                    plan = parts.group.plan_step((), parts.metrics.wish)
                    if self._exchanges(plan):
                        continue
                why_unsaved = parts.last.save_with_all()
            except GroupEnded:
                self._come_out()
                continue
            if why_unsaved:
                self._fail_unsaved(why_unsaved)
            # Only now: after the last report training is over for the master, and it ends the group.
            parts.shares.confirmed(parts.group.take_confirmed(), self._loss)
            self._final_ledger = parts.group.ledger.applied.to_message()
            parts.group.part()
            self.close()

    def _fail_unsaved(self, why: str) -> NoReturn:
        error = LastCheckpointError(why)
        self._is_over = True
        if self.rank == 0:
            self._end_job(error)
        raise error

    def _end_job(self, error: CheckpointError) -> None:
        """End the job with an error that a replacement of this worker would meet, too."""
        self._is_over = True
        link = self._parts.data.session.link
        if link is not None:
            link.report_model(pb.ModelReport(error=str(error)))

    def _some_minibatch(self) -> Minibatch:
        """Return a minibatch for a step without work for this member."""
        assert self._stand_in is not None, "a member without work has rehearsed on a sample"
        return self._stand_in

    @property
    def _is_joined(self) -> bool:
        """Whether this member's minibatches of a step form one batch: each `backward()` needs the last sums."""
        return bool(self._parts.gradients.is_several) and len(self._todo) > 1

    def _fetch(self) -> bool:
        """Get the batch of the next minibatch; return True."""
        parts = self._parts
        part, minibatch = self._todo[0]
        self._num_ahead = 0 if self._is_joined else len(self._todo) - 1
        if part is None and not self.is_rehearsal and self._stand_in_batch is not None:
            self._batch = self._stand_in_batch
            return True
        try:
            with parts.data.session.clock.during(Activity.INPUT):
                todo = self._todo if self._is_joined else self._todo[:1]
                batches = [parts.pipeline.get(one) for _, one in todo]
                sizes = [0 if own is None else own.num_records for own, _ in todo]
                self._batch = joined(batches, sizes) if len(batches) > 1 else batches[0]
        except Exception as error:
            self._fail(error)
            raise
        if part is None:
            self._stand_in_batch = self._batch
            parts.pipeline.forget(minibatch.name)
        return True

    # A batch --------------------------------------------------------------------------------------------------------

    def begin_batch(self, num_items: Any = None) -> None:
        """Prepare for the script's code on a batch.

        Args:
            num_items: See `ElasticController.step`.
        """
        parts = self._parts
        if not self._todo or self._has_stepped:
            raise JobError(
                "`with controller.step():` stands where there is no batch",
                "put it into the loop over controller.loader(…), once",
            )
        self._has_stepped = True
        part, minibatch = self._todo[0]
        seed_script(derive_seed(parts.data.session.spec.seed, *(max(0, number) for number in minibatch.name)))
        plan, is_joined = self._plan, self._is_joined
        is_own = plan is None or (self.size == 1 and (is_joined or len(plan.all_parts) == 1))
        is_first = plan is None or part is None or part is plan.own[0]
        is_last = is_joined or len(self._todo) == 1
        if is_first:
            self._before = None if is_own or parts.gradients.is_several is False else self.state.copies()
        try:  # an exception here prevents the script's `with` block, so `end_batch` is not called
            weight = 0.0
            if plan is not None and part is not None:
                weight = sum(map(plan.scale, plan.own if is_joined else [part]))
                if num_items is not None:
                    weight = items_of(num_items) / plan.num_records
            position = StepPosition(weight, is_first, is_last, is_own, num_items is not None)
            parts.gradients.begin(position, parts.group)
        except Exception as error:
            self._fail(error)
            raise
        parts.optimizers.begin()

    def end_batch(self, error: BaseException | None) -> bool:
        """End a batch after the script's code; return whether its exception is ours."""
        before = self._num_names
        self._parts.optimizers.end()
        is_ours = self._end_batch(error or self._parts.gradients.ended_by)
        if self._trainer is not None:
            num_steps, is_cut = self._parts.group.ledger.steps, self._num_given >= self._most_batches
            self._trainer.end_batch(self._num_names > before, num_steps, self._is_through, self.num_batches, is_cut)
            if self._is_through:
                self._num_given = 0  # it may read the length of its next loop before that begins
        return is_ours

    def _end_batch(self, error: BaseException | None) -> bool:
        gradients = self._parts.gradients
        if isinstance(error, PartDone):
            self._todo.pop(0)
            return True
        if isinstance(error, StepDropped):
            gradients.drop()
            self._parts.metrics.drop()
            if self._before is not None:
                self.state.put_back(self._before)
            self._todo.clear()
            self._plan = None
            self._unchanged = self.state.state()
            self._come_out()
            return True
        if error is not None:
            gradients.drop()
            if isinstance(error, Exception):
                self._fail(error)
            return False
        if not gradients.is_complete:
            missing = JobError(
                "a batch has ended without backward()",
                "each worker takes part in every step: make a loss of it, if need be one times zero",
            )
            self._fail(missing)
            raise missing
        gradients.end()
        if self.is_rehearsal:
            self._todo.clear()
        else:
            self._commit()
        return False

    def _commit(self) -> None:
        parts, plan = self._parts, self._plan
        assert plan is not None
        part, _ = self._todo[0]
        self._todo.clear()
        if part is not None:
            self._stand_in_batch = self._batch
        parts.group.commit(plan, parts.shares.reported(plan))
        parts.metrics.num_records += sum(own.num_records for own in plan.own)
        self._num_names += len(plan.all_parts)
        parts.shares.applied(plan)
        self._plan = self._before = None

    def _fail(self, error: Exception) -> None:
        """Abandon the step after the script raised; report the minibatch, or the script, as failed to the master."""
        parts = self._parts
        part, minibatch = self._todo[0]
        self._todo.clear()
        self._is_over, self._error = True, error
        if self._is_inside:
            parts.group.abandon("the script raised", is_model_whole=False)
        self._come_out_for_good()
        link = parts.data.session.link
        if link is None:
            return
        details = frames_of_user("".join(traceback.format_exception(error)))
        is_ours = isinstance(error, ModelDefinitionError | JobError) and not isinstance(error, MasterGone)
        if is_ours:  # an error of the script's loop: each retry would fail, too
            link.report_model(pb.ModelReport(error=str(error), error_details=details))
        elif part is not None and parts.data.holds(minibatch):
            parts.data.failed(minibatch, cause_of(error), details)


@dataclass(frozen=True, slots=True)
class Loop:
    """The parts that `ElasticController` uses; created by `wiring`.

    Attributes:
        start: Starts the threads of the group and the shares; further calls do nothing.
        stop: Ends threads that must not outlive the interpreter.
    """

    data: DataShardService
    group: StepGroup
    shares: ScriptBatchSource
    pipeline: LoaderPipeline
    gradients: ScriptGradients
    optimizers: OptimizerCheck
    metrics: PlateauMetrics
    model: Replica
    writer: CheckpointWriter
    termination: Termination
    last: LastCheckpoint
    start: Callable[[], None]
    stop: Callable[[], None]
