"""AllReduceStrategy: all workers make every step together, in a group whose members may change.

The loop of one member: headers, gradients, reduction, update; evaluation between steps; and the work before and after
groups.  It never waits for a lease while other members wait for it.

`make_all_reduce_loop` builds the parts of a worker, and compiles the step before the worker joins a group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import grpc

from elasticdl.activities import Activity
from elasticdl.collective import ElasticGroup, Reduction
from elasticdl.data.reader import Reader
from elasticdl.frameworks.framework import (
    Batch,
    ComputeGradient,
    FeedError,
    Framework,
    LocalGradient,
    Mode,
    Share,
    TaskRecords,
)
from elasticdl.protocol import Shard, derive_seed
from elasticdl.ps.applied import MinibatchName
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.addresses import own_host
from elasticdl.rpc.job_secret import read_token
from elasticdl.worker.allreduce.batch_source import BatchSource, LeasedBatches
from elasticdl.worker.allreduce.global_batch_source import GlobalBatches
from elasticdl.worker.allreduce.group_session import GroupEnded, GroupSession
from elasticdl.worker.allreduce.prefetchers import BatchPrefetcher, InterruptibleLeases, LeasePrefetcher, LocalLeases
from elasticdl.worker.allreduce.replica import CheckpointWriter, LastCheckpoint, Replica
from elasticdl.worker.allreduce.sharded_session import make_session
from elasticdl.worker.allreduce.step_header import BatchRef, StepFlag, StepPlan
from elasticdl.worker.loop import TrainingTasks, WorkerLoop
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.tasks import HeldLease, LeaseSource, TaskStream
from elasticdl.worker.termination import Termination
from elasticdl_client.errors import DataError, ElasticDLError, LastCheckpointError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")
_PATIENCE_S = 0.1  # between two rounds while no member has work
_WITHOUT_PARTS = StepFlag.LEAVING | StepFlag.OVER
_WISH_FOR = {pb.EVALUATION: StepFlag.EVALUATION, pb.TRAIN_END: StepFlag.LAST}  # work that needs all members


class AllReduceLoop:
    """The work of an AllReduce worker once its model is compiled."""

    def __init__(
        self,
        spec: JobSpec,
        session: GroupSession,
        supply: BatchSource,
        evaluations: TaskStream,
        checkpoints: CheckpointWriter,
        tasks: TrainingTasks,
        termination: Termination,
    ) -> None:
        """
        Args:
            evaluations: The stream of evaluation tasks; it has no other tasks.
            checkpoints: Writes the checkpoints of the trained model.
        """
        failures = tasks.failures
        self._link, self._reporter, self._clock = failures.link, failures.reporter, failures.clock
        self._framework = tasks.model
        self._session = session
        self._supply = supply
        self._evaluations = WorkerLoop(evaluations, tasks.evaluation, termination)
        self._exports = tasks.exports
        self._checkpoints = checkpoints
        self._termination = termination
        self._seed = spec.seed
        self._minibatch_size = spec.minibatch_size
        self._counts_steps = bool(spec.fixed_global_batch)
        self._skips_not_finite = spec.skips_not_finite
        self._is_idle = False  # no member had work in the last round
        self._is_saved = False  # whether this group has written the last checkpoint
        self._why_unsaved = ""  # why the last checkpoint failed, while this member holds the TRAIN_END task
        self._last = LastCheckpoint(session, checkpoints, termination, self._clock)

    def run(self) -> None:
        """Train until the master says that the job is over."""
        self._clock.switch(Activity.COMPUTE)
        self._session.start()
        self._supply.start()
        while not self._supply.is_over and self._enter():
            with self._termination.unbroken():
                self._train_in_groups()
        self._session.leave()
        self._reporter.drain()
        with self._termination.unbroken():
            self._save_last()
        if self.lacks_checkpoint:
            _log.warning(
                "The last checkpoint (%s) lacks the newest steps: members that held a part of them were lost",
                self._checkpoints.newest() or "there is none",
            )

    @property
    def lacks_checkpoint(self) -> bool:
        """Whether this member could not write the last checkpoint, because others have left with parts of the model."""
        session = self._session
        return session.rank == 0 and not session.holds_all and self._checkpoints.is_behind(session.ledger)

    def leave(self, is_idle: bool) -> None:
        """Report the finished work after SIGTERM, save the model, and say goodbye to the master.  In another thread.

        A successor begins with the newest checkpoint as soon as the farewell is received: a checkpoint written later
        would belong to an abandoned branch of the training.

        Args:
            is_idle: Whether no step is being made, so that the model is consistent.
        """
        is_idle = self._session.shut_out() or is_idle  # a master that has ended as well plans no group to agree in
        self._reporter.drain(self._termination.reports_s)
        self._last.save(is_idle)
        self._link.say_farewell()
        self._last.finish(is_idle)
        session = self._session
        is_written = not self._checkpoints.is_behind(session.ledger)
        is_saved = (self._last.is_agreed and (is_written or session.rank != 0)) or (session.is_last and is_written)
        if not is_saved and not session.has_handed_over:
            _log.warning(
                "This worker leaves with a part of the optimizer's state. If no other has it, training continues from "
                "%s, not from step %d",
                self._checkpoints.newest() or "the start",
                session.ledger.steps,
            )

    # -- groups

    def _train_in_groups(self) -> None:
        """Make steps in the group entered, and in later groups that this member must enter in spite of SIGTERM.

        It must if it alone holds a part of the model, or has to agree with the others on the last checkpoint.
        """
        is_inside = True
        while is_inside:
            try:
                self._run_rounds()
            except GroupEnded as ended:
                _log.debug("Left the group: %s", ended)
                must_enter = self._last.needs_group or not self._session.has_handed_over
                is_inside = must_enter and not self._last.is_agreed and self._enter()
            else:
                return

    def _enter(self) -> bool:
        with self._clock.during(Activity.JOIN):
            if not self._session.enter():
                return False
        self._is_idle, self._is_saved, self._why_unsaved = False, False, ""
        self._last.begin_group()
        self._supply.confirmed(self._session.take_confirmed())
        self._supply.entered()
        self._checkpoints.begin(self._session.ledger)
        return True

    def _run_rounds(self) -> None:
        """Run rounds until the group ends (`GroupEnded`) or the job is over."""
        if self._session.is_split:
            while self._round():
                pass
            return
        while not self._supply.is_over:
            self._round()

    def _round(self) -> bool:
        """Exchange headers, and do what they request.

        Returns:
            False in a split group once all members know that the job is over, and the last checkpoint is written.
        """
        wishes = self._last.begin_round() | self._wishes_if_split()
        parts = [] if wishes and wishes & _WITHOUT_PARTS else self._take_parts()
        wishes |= self._supply.wish
        other = self._supply.take_other()
        if other is not None:
            wishes |= _WISH_FOR.get(other.lease.type, StepFlag.NOTHING)
        with self._clock.during(Activity.COLLECTIVE):
            plan = self._session.plan_step(parts, wishes)
        self._supply.confirmed(self._session.take_confirmed())
        if plan.ends_all:
            raise GroupEnded(self._last.end_with_all())
        if self._session.is_split and self._end_or_save(plan):
            return StepFlag.OVER not in plan.wishes_of_each
        is_step = self._supply.agree(plan)
        self._is_idle = not is_step
        if StepFlag.LAST in plan.wishes:
            self._save_with_all()
        elif StepFlag.EVALUATION in plan.wishes:
            self._evaluate()
        elif is_step:
            self._step(plan)
        return True

    def _wishes_if_split(self) -> StepFlag:
        """Return the requests that only a split group has: no member alone can write a checkpoint."""
        wishes = StepFlag.NOTHING
        if not self._session.is_split:
            return wishes
        is_over = self._supply.is_over or self._session.is_over
        if is_over:
            wishes |= StepFlag.OVER
        if self._session.rank == 0:
            ledger = self._session.ledger
            if self._checkpoints.is_behind(ledger) and (is_over or self._checkpoints.is_due(ledger)):
                wishes |= StepFlag.CHECKPOINT
        return wishes

    def _end_or_save(self, plan: StepPlan) -> bool:
        """Write a checkpoint in a split group if its members have agreed on one.

        Returns:
            Whether a member knows that the job is over, so that there are no more steps.
        """
        is_over = StepFlag.OVER in plan.wishes
        is_end = StepFlag.OVER in plan.wishes_of_each
        if StepFlag.CHECKPOINT in plan.wishes:
            with self._clock.during(Activity.CHECKPOINT):
                shards = self._session.collect()
                if self._session.rank == 0:
                    self._checkpoints.save(self._session.ledger, shards, is_last=is_end)
        return is_over

    def _take_parts(self) -> list[BatchRef]:
        with self._clock.during(Activity.INPUT if not self._is_idle else Activity.IDLE):
            parts = self._supply.offer(_PATIENCE_S if self._is_idle else 0.0)
        other = self._supply.take_other()
        is_ready = self._is_saved or bool(self._why_unsaved) or not self._checkpoints.is_wanted
        if other is not None and (other.lease.type == pb.CALLBACK or (other.lease.type == pb.TRAIN_END and is_ready)):
            self._do_alone(other)
        return parts

    # -- a step

    def _step(self, plan: StepPlan) -> None:
        compute: ComputeGradient | None = self._framework.local_gradient
        while compute is not None:
            gradient = self._reduced(plan, compute)
            loss, weight, num_flawed = self._result(gradient)
            flaws = self._flaws(plan, gradient)
            flawed = self._session.all_flawed(plan, flaws) if num_flawed else []
            if flawed and not self._supply.settle(plan, flawed, flaws):
                return
            compute = gradient.repeat()
        if weight > 0 and num_flawed:
            gradient.rescale = 1.0 / weight
            loss /= weight
        self._update(plan, gradient if weight > 0 else None, flawed)
        self._supply.applied(plan, loss)
        self._is_saved = False
        _log.debug("Step %d: loss %.9g", self._session.ledger.steps, loss)
        if self._session.rank == 0 and not self._session.is_split:
            with self._clock.during(Activity.CHECKPOINT):
                self._checkpoints.save_if_due(self._session.ledger)

    def _reduced(self, plan: StepPlan, compute: ComputeGradient) -> LocalGradient:
        reductions: list[Reduction] = []
        try:
            shares = [self._share(plan, plan.own[k]) for k in _present(plan)]
            with self._clock.during(Activity.COMPUTE):
                gradient = compute(shares, lambda buffer: reductions.append(self._session.begin_reduce(buffer)))
                self._run_ahead(plan, gradient)
        except (GroupEnded, ElasticDLError, grpc.RpcError):
            raise
        except Exception as error:
            raise self._failed(error) from error
        flaws = self._flaws(plan, gradient) if self._skips_not_finite else {}
        if flaws and not self._supply.leave_out(flaws):
            raise self._session.abandon("a minibatch that is not finite cannot be left out")
        if gradient.buffers:
            with self._clock.during(Activity.COLLECTIVE):
                reductions.append(self._session.begin_reduce(gradient.buffers[-1]))
                self._session.finish_reduce(reductions)
        return gradient

    def _run_ahead(self, plan: StepPlan, gradient: LocalGradient) -> None:
        """Start the next minibatch on the device while the results of this step are still being copied."""
        following = None if gradient.run_ahead is None else self._supply.next_part()
        if gradient.run_ahead is None or following is None:
            return
        name, batch = following
        try:
            gradient.run_ahead(self._rate(plan), Share(batch, self._seed_of(name), 1.0, is_alone=True))
        except ElasticDLError as error:  # the user's learning rate schedule, as in `_update`
            raise self._failed(error, " in the update of the model") from error

    def _result(self, gradient: LocalGradient) -> tuple[float, float, float]:
        """Return loss, weight and number of flawed parts of a step; this wait also raises errors of the device."""
        try:
            loss, weight, num_flawed = (float(number) for number in gradient.told())
        except Exception as error:
            raise self._failed(error) from error
        return loss, weight, num_flawed

    def _failed(self, error: Exception, where: str = "", is_model_whole: bool = True) -> GroupEnded:
        """Report the exception that user code raised, and abandon the group: the others lose the step as well."""
        ended = self._session.abandon(f"user code raised{where}", is_model_whole)
        self._supply.fail(error)
        return ended

    @staticmethod
    def _flaws(plan: StepPlan, gradient: LocalGradient) -> dict[int, str]:
        """Return the values that are not finite, by position among this member's parts."""
        present = _present(plan)
        return {present[k]: what for k, what in gradient.not_finite.items()}

    def _share(self, plan: StepPlan, part: BatchRef) -> Share:
        is_alone = self._session.size == 1 and plan.all_parts == [part]
        return Share(self._supply.batch(part), self._seed_of(part.name), plan.scale(part), is_alone)

    def _seed_of(self, name: MinibatchName) -> int:
        return derive_seed(self._seed, name.epoch, name.task, name.n)

    def _rate(self, plan: StepPlan) -> float | None:
        """Return the rate of the user's schedule, which counts steps of a fixed number of records, else minibatches."""
        epoch, ledger = min(part.name.epoch for part in plan.all_parts), self._session.ledger
        num_updates = ledger.steps if self._counts_steps else ledger.num_records // self._minibatch_size
        return self._framework.learning_rate(epoch, num_updates)

    def _update(self, plan: StepPlan, gradient: LocalGradient | None, skipped: Collection[BatchRef]) -> None:
        """Apply a step to the model.

        Args:
            gradient: The summed gradient; None if no part of the step is finite: the model stays as it is.
            skipped: The parts that are not in the sum.
        """

        def update() -> None:
            with self._clock.during(Activity.COMPUTE):
                if gradient is not None:
                    self._framework.apply_gradient(gradient, self._rate(plan))
                self._session.commit(plan, self._supply.reported(plan), skipped)

        try:
            with self._clock.during(Activity.COLLECTIVE):
                self._session.complete(update)
        except GroupEnded:
            raise
        except Exception as error:
            raise self._failed(error, " in the update of the model", is_model_whole=False) from error

    # -- between steps

    def _evaluate(self) -> None:
        """Run evaluation tasks until there are none left: the one held, and those that the master still has."""
        other = self._supply.take_other()
        if other is not None:
            self._supply.other_is_done()
        self._evaluations.run_at_once(pb.EVALUATION, other)

    def _do_alone(self, held: HeldLease) -> None:
        """Run a TRAIN_END or CALLBACK task, while the others wait for this member's header."""
        if held.lease.type == pb.CALLBACK:
            self._exports.occasion(held)
        else:
            self._exports.end_training(held, self._check_saved)
        self._supply.other_is_done()

    def _save_with_all(self) -> None:
        """Write the last checkpoint, between the same two steps as all members; return when it is on disk or fails."""
        why_not = self._last.save_with_all()
        self._is_saved = not why_not
        if self._supply.take_other() is not None:
            self._why_unsaved = why_not

    def _check_saved(self) -> None:
        why_not, self._why_unsaved = self._why_unsaved, ""
        if why_not:
            raise LastCheckpointError(why_not)

    def _save_last(self) -> None:
        if self._session.rank != 0:
            return
        with self._clock.during(Activity.CHECKPOINT):
            if self._session.holds_all:
                self._checkpoints.save_last(self._session.ledger)
            else:
                self._checkpoints.wait()  # the end of the process would cut off a running write


def make_all_reduce_loop(
    failures: TaskFailures,
    framework: Framework,
    reader: Callable[[pb.TaskType], Reader],
    spec: JobSpec,
    termination: Termination,
    master_address: str,
) -> AllReduceLoop:
    """Build the loop of a worker.

    Args:
        failures: Reports to the master.
        framework: Holds the compiled model, whose definition the master knows.
        reader: See `Readers.of`.
        spec: The job.
        termination: Of this process.
        master_address: Where the master listens; it tells which of this machine's addresses other members can reach.
    """
    link, clock = failures.link, failures.clock
    checkpoints = CheckpointWriter.of(spec, framework, clock)
    link.on_checkpoint_request(checkpoints.request)
    link.carry_checkpoints(checkpoints.newest_try)
    model = checkpoints.model
    tasks = TrainingTasks.of(spec, failures, framework, model)
    tasks.try_metrics(spec, reader)  # the compilation resets the model
    with clock.during(Activity.COMPILE):
        _compile_on(framework, model, _samples(link.sample().shard, framework, reader, spec), spec.seed)
    group = ElasticGroup(own_host(master_address), read_token(), framework.device, spec.encrypt)
    session = make_session(link, group, model, framework, spec)

    def stream(requests: LeaseSource) -> TaskStream:
        return TaskStream.of(spec, requests, reader, clock)

    supply = _supply(session, stream, tasks, spec)
    termination.at_once(link.announce_end)
    return AllReduceLoop(spec, session, supply, stream(link), checkpoints, tasks, termination)


def _supply(
    session: GroupSession, stream: Callable[[LeaseSource], TaskStream], tasks: TrainingTasks, spec: JobSpec
) -> BatchSource:
    """Return the source of minibatches: of the whole group with --fixed_global_batch, else of this member alone."""
    failures, framework = tasks.failures, tasks.model
    link = failures.link
    if spec.fixed_global_batch:
        local = LocalLeases()
        lease_prefetcher = LeasePrefetcher(InterruptibleLeases(link))
        batch_prefetcher = BatchPrefetcher(stream(local), local, framework)
        return GlobalBatches(
            spec, session, lease_prefetcher, local, batch_prefetcher, failures, link.register().plan.num_minibatches
        )
    requests = InterruptibleLeases(link)
    training = stream(requests)
    batch_prefetcher = BatchPrefetcher(training, requests, framework)
    return LeasedBatches(session, batch_prefetcher, training, failures, spec.skips_not_finite)


def _samples(
    shard: pb.ShardMessage, framework: Framework, reader: Callable[[pb.TaskType], Reader], spec: JobSpec
) -> list[Batch]:
    """Make a full minibatch and a short one; none if that fails, since the task will report the same error."""
    found: list[Batch] = []
    try:
        records = reader(pb.TRAINING).read(Shard(shard.name, shard.start, shard.end, shard.identity))
        for count in (len(records), len(records) // 2):
            task = TaskRecords(0, derive_seed(spec.seed, 0, 0), records[:count])
            found += [batch for batch in framework.batches(Mode.TRAINING, iter([task])) if batch.size][:1]
    except (DataError, FeedError) as error:
        _log.info("The step is not compiled on a sample: %s", error)
    return found


def _compile_on(framework: Framework, model: Replica, samples: Sequence[Batch], seed: int) -> None:
    """Compile the step on samples, and reset the model afterwards.

    Errors of user code are only logged: the same error is reported when the task runs.
    """
    try:
        for batch in samples:
            gradient = framework.local_gradient([Share(batch, seed, 1.0)], lambda buffer: None)
            framework.apply_gradient(gradient, framework.learning_rate(0, 0))
    except Exception as error:  # noqa: BLE001  see above
        _log.info("The step could not be compiled on a sample: %s: %s", type(error).__name__, error)
    model.reset()


def _present(plan: StepPlan) -> list[int]:
    """Return the positions of this member's parts that have records: the user's `filter` may remove all."""
    return [k for k, part in enumerate(plan.own) if part.num_records]
