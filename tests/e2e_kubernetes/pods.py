"""A pod as these tests see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl_client.kubernetes.names import INDEX_LABEL, ROLE_LABEL


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod in the API at one moment; `state` is its phase, or Terminating."""

    name: str
    uid: str
    role: str
    index: int
    state: str
    node: str
    restarts: int
    container_running: bool
    container_ended: bool
    reason: str

    @property
    def key(self) -> str:
        """Differs between two pods of one name."""
        return f"{self.name}.{self.uid[:5]}"

    @property
    def running(self) -> bool:
        return self.state == "Running" and self.container_running

    @classmethod
    def of(cls, pod: Mapping[str, Any]) -> PodView:
        metadata, status = pod["metadata"], pod["status"]
        labels = metadata.get("labels", {})
        containers = status.get("containerStatuses", [])
        states = [container["state"] for container in containers]
        ended = [state["terminated"] for state in states if "terminated" in state]
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            role=labels.get(ROLE_LABEL, ""),
            index=int(labels.get(INDEX_LABEL, "0")),
            state="Terminating" if "deletionTimestamp" in metadata else status["phase"],
            node=pod["spec"].get("nodeName", ""),
            restarts=sum(container["restartCount"] for container in containers),
            container_running=any("running" in state for state in states),
            container_ended=bool(ended),
            reason=status.get("reason") or (ended[0].get("reason", "") if ended else ""),
        )
