"""The server's side of `Exchange`: each message of a worker's stream is answered as the call that it stands for."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc


def answer_each(
    servicer: pb_grpc.MasterServicer, messages: Iterator[pb.WorkerMessage], context: grpc.ServicerContext
) -> Iterator[pb.MasterMessage]:
    """Answer the messages of a stream, one after another, by the methods of a servicer."""
    for message in messages:
        match message.WhichOneof("call"):
            case "heartbeat":
                yield pb.MasterMessage(heartbeat=servicer.Heartbeat(message.heartbeat, context))
            case "progress":
                yield pb.MasterMessage(ack=servicer.ReportProgress(message.progress, context))
            case "finished":
                yield pb.MasterMessage(ack=servicer.FinishTask(message.finished, context))
            case _:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "WorkerMessage: it holds no call")
