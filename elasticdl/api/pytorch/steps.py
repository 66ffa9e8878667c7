"""The steps behind an elastic controller: between two batches of a script, and around each of them.

Between two batches the script is inside of `batches`, which exchanges headers with the other members, enters the next
group when one is planned, and gives a batch again whose step was dropped.  On a batch the script's own code runs,
inside of `step`.  A member that has no work while others have runs it on a batch of before, with no weight: so all
members do the same to model, optimizer, scheduler and whatever else is registered.

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
_PATIENCE_S = 0.1  # between two looks while no member has work
_END_OF_DATA_S = 2.0  # the master answers both requests at once
_EMPTY_LOOP = (
    "This loop is empty: the one before, inside scope(), has gone over all epochs. "
    "Write `for epoch in controller.epochs():` around the loop to have one epoch in each."
)
_UNASSIGNED = -1  # epoch of a minibatch that was given to no member


class _Progress:
    """How far the loops of the script are; travels with its state."""

    def __init__(self) -> None:
        self.begun = -1  # the epoch whose loop was begun last
        self.evaluated = 0  # epochs, or periods of steps, that were evaluated
        self.metrics = AgreedMetrics()

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun, "evaluated": self.evaluated, "metrics": self.metrics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.begun, self.evaluated = state["begun"], state["evaluated"]
        self.metrics.load_state_dict(state.get("metrics", {}))  # of a checkpoint before there were any


class ScriptSteps:
    """See above; the user's side of it is `ElasticController`."""

    def __init__(
        self, state: Any, wire: Callable[[Any, Any, dict[str, Any]], Loop], trainable_only: bool = False
    ) -> None:
        """
        Args:
            state: see `named_things`.
            wire: puts the parts together once the data set is known.
            trainable_only: frozen parameters of modules are no part of the state.
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
        self._is_inside = False  # of a group
        self._unbroken: ExitStack | None = None  # while SIGTERM waits for this process
        self._has_rehearsed = self._has_entered = False
        self._sampled_epoch = 0  # in which the others are while this process rehearses; -1: none has the model
        self._num_given = 0  # batches of the script's present loop
        self._trainer: LightningTrainer | None = None  # it owns the loop
        self._is_over = self._is_closed = False
        self._final_ledger: pb.AppliedSet | None = None
        self._is_idle = False
        self._epoch = -1  # of the script's present loop
        self._spans_epochs = False  # a loop goes over all epochs
        self._num_names = 0  # minibatches in the model
        self._plan: StepPlan | None = None
        self._todo: list[tuple[BatchRef | None, Minibatch]] = []  # of the plan, not computed yet
        self._num_ahead = 0  # batches of the plan that follow the one that was given last
        self._stand_in: Minibatch | None = None
        self._batch: Any = None
        self._stand_in_batch: Any = None
        self._has_stepped = False
        self._after_loop: Arrays | None = None  # the state after the end of the present loop
        self._unchanged: Arrays | None = None  # the state before a batch that comes to nothing
        self._before: dict[str, Any] | None = None  # the state before a step that changes it before its last sum
        self._loss: float | None = None
        self._error: Exception | None = None  # of a batch, which has ended training here
        self._has_set_trigger = self._is_triggered = False  # here, not known to others; by some member

    def __reduce__(self) -> Any:
        raise JobError(
            "an elastic controller belongs to its process, and this one would be copied to another",
            "leave out what starts processes that train (Lightning: strategy='ddp_spawn')",
        )

    def get_current_epoch(self) -> int:
        """Return the epochs that the model has seen whole, of this number of minibatches."""
        per_epoch = self._parts.data.get_minibatch_count_per_epoch()
        return self._num_names // per_epoch if per_epoch else 0

    @property
    def group(self) -> StepGroup:
        """Of this process; for what comes between two batches."""
        return self._parts.group

    def share(self, data: bytes | None) -> bytes | None:
        """Return what the member with rank 0 gives to all; called by all of them between the same two batches.

        Args:
            data: of rank 0; None in the others.

        Returns:
            None: the group was lost meanwhile.
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
        """Leaves the group; also done at the end of the process."""
        if self._loop is None or self._is_closed:
            return
        if self._is_inside and self._plan is None and self._final_ledger is None:
            self._end_loop()  # a loop that counts its batches has not asked for one after the last
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
        """The final ledger, once the model is complete and this process has left its group for good."""
        return self._final_ledger

    def bid_farewell(self, is_idle: bool) -> None:
        """After SIGTERM, in another thread: report the finished work, save, and take leave; see `AllReduceLoop.leave`.

        Args:
            is_idle: no step is being made, so the state is whole.
        """
        parts = self._parts
        parts.data.reporter.drain(parts.termination.reports_s)
        is_idle = parts.group.shut_out() or is_idle
        is_whole = is_idle and self._unchanged is None  # else the script's loop may have changed it meanwhile
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
        """The batches of an epoch, or inside `scope()` of all of them; see `ElasticLoader`."""
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
                        self._end_loop()  # it has counted the batches, and continues with something else
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
        """Return the batches of a loop if no worker is lost: in a job one more, for the rehearsal."""
        data = self._parts.data
        num_epochs = data.plan.num_epochs if self._spans_epochs else 1
        return data.get_minibatch_count_per_epoch() * max(1, num_epochs) + (data.session.link is not None)

    @property
    def _is_through(self) -> bool:
        """The epoch of the script's loop is in the model, and more of it would be of the next one."""
        return 0 <= self._epoch < self.get_current_epoch()

    def _undo(self) -> None:
        """After a rehearsal or a dropped step: undo the changes by the script's loop meanwhile."""
        if self._unchanged is not None:
            self.state.load_state(self._unchanged)
        self._unchanged, self.is_rehearsal = None, False

    def _settle(self) -> None:
        """Finish a loop, after the script's code that follows it has run."""
        self._parts.data.session.clock.switch(Activity.COMPUTE)
        self._num_given = 0
        if self._after_loop is not None:
            self.state.load_state(self._after_loop)
            self._after_loop = None
        if self._epoch >= 0:
            self._epoch, self.progress.begun = -1, self.get_current_epoch()

    def _end_loop(self) -> None:
        self._parts.data.session.clock.switch(Activity.EVALUATE)  # code after a loop is no minibatch, however long
        num_epochs = self._parts.data.plan.num_epochs
        if num_epochs and self.get_current_epoch() >= num_epochs:
            self._finish()

    def _prepare(self) -> bool:
        """Work until there is a batch to compute; return False if there are no more."""
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
        """False: not yet, or no more."""
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
            # The source's script has run what comes after its loop, and this one's has not.
            self._after_loop = self.state.state()
        parts.shares.confirmed(parts.group.take_confirmed(), None)
        parts.shares.entered()
        parts.metrics.entered()
        parts.writer.begin(parts.group.ledger)
        return True

    def _end_without_model(self) -> None:
        """End a process whose job is over unless it has the trained model: its script would go on with another one."""
        has_all = self._has_entered and 0 < self._parts.data.plan.num_epochs <= self.get_current_epoch()
        has_final = self._has_entered and not self._parts.group.is_outdated
        if not has_all and not (has_final and self._has_no_more_data()):
            _log.info("The training has ended without this worker: its script ends here, before what follows its loop")
            raise SystemExit(0)

    def _has_no_more_data(self) -> bool:
        """Whether training was stopped early: the end of the data may come a moment after that of the job."""
        shares = self._parts.shares
        if not shares.is_over:
            shares.offer(_END_OF_DATA_S)
        return shares.is_over

    def _save_after_group(self) -> None:
        """Write the last checkpoint if the end of the job has broken the group before: `stop_training` was called."""
        parts = self._parts
        if self.rank != 0 or not parts.group.holds_all:
            return
        with parts.termination.unbroken(), parts.data.session.clock.during(Activity.CHECKPOINT):
            parts.writer.save_last(parts.group.ledger)
        if parts.writer.failure:
            self._fail_unsaved(parts.writer.failure)

    def _meet_trainer(self) -> None:
        """If the loop is one of Lightning's."""
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
        """Do not return if this process is terminating, unless it has to agree with others in the next group."""
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
        """One exchange of headers, and its consequences."""
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
        """Return whether the members exchange something instead of a step, and do so."""
        self._is_triggered |= StepFlag.TRIGGER in plan.wishes
        if StepFlag.METRIC in plan.wishes:
            self._parts.metrics.agree(self._parts.group)
            if self._after_loop is not None:
                self._after_loop = self.state.state()
        return bool(plan.wishes & (StepFlag.METRIC | StepFlag.CHECK))

    def set_trigger(self) -> None:
        """Let the next `check_trigger` return True, in all members; nothing in a rehearsal."""
        self._has_set_trigger |= not self.is_rehearsal

    def check_trigger(self) -> bool:
        """Return whether any member has set the trigger since the last check; called after the same step by all.

        A member that does not call it then learns it from a header, for its next call.  False where there is no group
        to ask: in a rehearsal, after a step that was lost, within a step.
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
        """Agree on the metric that the script has given to a scheduler, or do so before the next step.

        Returns:
            False: what the scheduler does is undone, or follows the last step: it takes the metric as it is.
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
        """All is in the model: check that with the others, report it, and write it down."""
        parts = self._parts
        while not self._is_over:
            if not self._is_inside and not self._enter():
                continue
            num_epochs = parts.data.plan.num_epochs
            if not parts.shares.is_over and self.get_current_epoch() < num_epochs:
                return  # the group has begun with an older model
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
            # Not before: with the last report the training is over for the master, which ends the group.
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
        """A successor of this worker would fare no better."""
        self._is_over = True
        link = self._parts.data.session.link
        if link is not None:
            link.report_model(pb.ModelReport(error=str(error)))

    def _some_minibatch(self) -> Minibatch:
        """For a step in which this member has no part."""
        assert self._stand_in is not None, "a member without work has rehearsed on a sample"
        return self._stand_in

    @property
    def _is_joined(self) -> bool:
        """This member's minibatches of the step are one batch: it is to see each sum before the next `backward()`."""
        return bool(self._parts.gradients.is_several) and len(self._todo) > 1

    def _fetch(self) -> bool:
        """The batch of the next minibatch to compute."""
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
        """The script's code begins.

        Args:
            num_items: see `ElasticController.step`.
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
        try:  # the script is on its way into the block, whose end will not run
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
        """The script's code has ended; whether its exception is ours."""
        before = self._num_names
        self._parts.optimizers.end()
        is_ours = self._end_batch(error or self._parts.gradients.ended_by)
        if self._trainer is not None:
            num_steps, is_cut = self._parts.group.ledger.steps, self._num_given >= self._most_batches
            self._trainer.end_batch(self._num_names > before, num_steps, self._is_through, self.num_batches, is_cut)
            if self._is_through:
                self._num_given = 0  # it may ask for the length of its next loop before that begins
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
        """The script raised: the others lose the step; tell the master of the minibatch, or of the script itself."""
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
        if is_ours:  # of the loop: each try would end so
            link.report_model(pb.ModelReport(error=str(error), error_details=details))
        elif part is not None and parts.data.holds(minibatch):
            parts.data.failed(minibatch, cause_of(error), details)


@dataclass(frozen=True, slots=True)
class Loop:
    """The parts that `ElasticController` drives; put together by `wiring`.

    Attributes:
        start: the threads behind the group and the shares; further calls do nothing.
        stop: ends threads that must not outlive the interpreter.
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
