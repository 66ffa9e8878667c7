"""The processes of a `tf.distribute.ParameterServerStrategy`: servers as children, the coordinator in this process."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from benchmarks.peers.environment import ROOT, environment


def serve(options: argparse.Namespace) -> None:
    """A server's process: never returns."""
    role, index = options.serve.split(":")
    cluster = tf.train.ClusterSpec(json.loads(options.cluster))
    tf.distribute.Server(cluster, job_name=role, task_index=int(index), protocol="grpc", start=True).join()


@contextlib.contextmanager
def strategy(options: argparse.Namespace, module: str) -> Iterator[Any]:
    """The strategy over servers that run `module` with `--serve`."""
    counts = {"chief": 1, "ps": options.num_ps, "worker": options.num_workers}
    cluster = {role: [f"127.0.0.1:{_free_port()}" for _ in range(count)] for role, count in counts.items()}
    base = [
        sys.executable,
        "-m",
        module,
        options.tfrecord,
        "--batch=0",
        "--seconds=0",
        f"--cluster={json.dumps(cluster)}",
    ]
    servers = [
        subprocess.Popen([*base, f"--serve={role}:{index}"], cwd=ROOT, env=environment())
        for role in ("ps", "worker")
        for index in range(counts[role])
    ]
    try:
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), rpc_layer="grpc", task_type="chief", task_id=0
        )
        yield tf.distribute.ParameterServerStrategy(resolver)
    finally:
        for server in servers:
            server.kill()
            server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
