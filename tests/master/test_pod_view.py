"""How the state of a pod is told in one line."""

from __future__ import annotations

import pytest

from elasticdl.master.core.events import PodChanged
from elasticdl.master.core.values import Phase, Role
from elasticdl.master.pod_view import PodView


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ('exit code 1: TypeError: no\n  File "train.py", line 3', "Error, exit code 1: TypeError: no"),
        ("exit code 1; its last lines:\nfirst\nlast", "Error, exit code 1, last"),
        ("", "Error, exit code 1"),
    ],
)
def test_why_a_pod_has_failed_is_one_line(message: str, told: str) -> None:
    view = PodView()
    view.changed(PodChanged("w", Role.WORKER, 0, "u", Phase.FAILED, "Error", 1, message))
    assert [pod.message for pod in view.statuses()] == [told]
