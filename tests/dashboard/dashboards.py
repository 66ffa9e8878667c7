"""A dashboard as a user starts it, and requests to it that no browser would make."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class RunningDashboard:
    """``elasticdl dashboard`` as a process with a home of its own."""

    def __init__(self, home: Path, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elasticdl_client.main", "dashboard", "--browser=false", *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "HOME": str(home), "KUBECONFIG": str(home / "no-cluster"), **environment},
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found is not None, line + self.process.stdout.read()
        self.address = found[0]
        parts = urlsplit(self.address)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port = parts.hostname, parts.port
        self.token = parts.query.removeprefix("token=")
        self.base = f"http://{self.host}:{self.port}/"

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """A request with these headers alone; Host is the dashboard's unless it is given."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        connection.close()
        return answer

    def read_until(self, path: str, text: bytes) -> None:
        """Reads a stream that does not end until a text has come, and leaves."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
        response = connection.getresponse()
        found = b""
        while text not in found:
            block = response.read1(1 << 16)
            assert block, found
            found += block
        connection.close()

    def get(self, path: str) -> Any:
        """The JSON at a path, with the token as a script has it."""
        answer = self.ask(path, Authorization=f"Bearer {self.token}")
        assert answer.status == 200, answer.body
        return answer.json()

    def cookie(self) -> str:
        """The state of a browser after it has opened the address."""
        answer = self.ask(f"/?token={self.token}")
        assert answer.status == 303
        return answer.headers["set-cookie"].partition(";")[0]

    def stop(self) -> None:
        """Ends it; a bug has left its traceback."""
        self.process.terminate()
        output, _ = self.process.communicate(timeout=30)
        assert "Traceback" not in output, output
