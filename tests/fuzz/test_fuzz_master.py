"""10,000 calls of any content to a master that runs a job: it answers each, and the job ends with an exact ledger."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.channels import connect
from tests.fuzz.messages import Filler
from tests.fuzz.mutations import damage
from tests.fuzz.scale import rounds
from tests.master.actors import MasterJob, ScriptedWorker, running, wait_until
from tests.master.life import TOKEN

METHODS = [one for one in pb.DESCRIPTOR.services_by_name["Master"].methods if not one.client_streaming]
POLLS = ("RequestLease", "Sample", "WatchGroup")


def any_call(random: Random, liar: ScriptedWorker) -> tuple[Any, bytes]:
    """A method and its message, which may do all but what a member is entitled to do: end the job, or be another."""
    method = random.choice(METHODS)
    message: Any = Filler(random).fill(GetMessageClass(method.input_type)())
    for name in ("worker_id", "id"):
        if hasattr(message, name) and random.random() < 0.7:
            setattr(message, name, liar.id)
    if hasattr(message, "incarnation") and random.random() < 0.7:
        message.incarnation = liar.incarnation
    if isinstance(message, pb.RegisterWorkerRequest):
        message.worker_id = random.choice((liar.id, 7, -1))
        message.incarnation = liar.incarnation
    elif isinstance(message, pb.RegisterPsRequest):
        message.ps_id = random.choice((1, 9, -1))
    elif isinstance(message, pb.PsReadyRequest) or (isinstance(message, pb.HeartbeatRequest) and message.role == pb.PS):
        message.incarnation = max(message.incarnation, 2)
    elif isinstance(message, pb.ModelReport):
        message.error = ""
    elif isinstance(message, pb.HeartbeatRequest):
        message.leaving = False
    elif isinstance(message, pb.LeaseRequest | pb.StopTrainingRequest):
        message.incarnation = 5  # of no process
    return method, message.SerializeToString()


def call_at_random(job: MasterJob, liar: ScriptedWorker, number: int) -> None:
    with connect(f"127.0.0.1:{job.port}", TOKEN) as channel:
        for seed in range(number):
            random = Random(seed)
            method, data = any_call(random, liar)
            if random.random() < 0.2 and data and method.name not in ("ModelReport", "RegisterWorker", "RegisterPs"):
                data = damage(data, random)
            call = channel.unary_unary(f"/elasticdl.Master/{method.name}")
            try:
                call(data, timeout=0.1 if method.name in POLLS else 20)
            except grpc.RpcError as error:
                is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if error.code() is not grpc.StatusCode.INVALID_ARGUMENT and not (is_late and method.name in POLLS):
                    raise AssertionError(f"seed {seed}, {method.name}\n{job.log()[-3000:]}") from error


def test_a_master_answers_any_call_and_its_job_ends_with_an_exact_ledger(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, num_ps_pods=1, num_workers=2, num_epochs=2, max_bad_records=0)) as job:
        ps, worker = job.ps(), job.worker()
        ps.join()
        assert worker.register().accepted
        assert worker.report_model(optimizer="{}").accepted
        wait_until(lambda: worker.register().partition.version > 0, "the partition")
        liar = job.worker(1)
        assert liar.register().accepted
        beating = threading.Event()
        heart = threading.Thread(target=beat, args=(job, worker, ps, liar, beating))
        heart.start()
        try:
            held = worker.lease()
            call_at_random(job, liar, rounds(10_000))
            assert worker.progress(held, 0, 1).accepted
            for n in range(2):
                ps.apply(held, n)
            assert worker.finish(held).accepted
            worker.train_all(ps.apply)
        finally:
            beating.set()
            heart.join()
        liar.leave()
        ps.leave()
        assert job.wait() == 0, job.log()
        log = job.log()
        assert log.count("records 64, committed 64, repeated 0, lost 0") == 2, log[-3000:]
        assert "Traceback" not in log


def beat(job: MasterJob, worker: ScriptedWorker, ps: Any, liar: ScriptedWorker, ended: threading.Event) -> None:
    """Keeps the members alive, and the leases of the honest worker."""
    with connect(f"127.0.0.1:{job.port}", TOKEN) as channel:
        call = channel.unary_unary("/elasticdl.Master/Heartbeat", pb.HeartbeatRequest.SerializeToString)
        first = (1 << 32) + 1
        while not ended.wait(0.5):
            positions = [pb.Position(lease=first + n) for n in range(20)]
            for role, one in ((pb.WORKER, worker), (pb.WORKER, liar), (pb.PS, ps)):
                held = positions if one is worker else []
                call(pb.HeartbeatRequest(role=role, id=one.id, incarnation=one.incarnation, positions=held), timeout=20)
