"""A process that forks while a thread of it is in a call to the master, as PyTorch's loaders do, keeps running."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import os, socket, threading
import elasticdl
import grpc

listening = socket.create_server(("127.0.0.1", 0))
channel = grpc.insecure_channel("127.0.0.1:%d" % listening.getsockname()[1])
call = channel.unary_unary("/elasticdl.Master/RequestLease")
threading.Thread(target=call, args=(b"",), kwargs={"wait_for_ready": True}, daemon=True).start()
connection, _ = listening.accept()
connection.recv(1)  # the thread is in its call
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("went on", flush=True)
os._exit(0)
"""


def test_a_fork_beside_a_call_is_none_of_grpcs_business() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("went on\n", "")
