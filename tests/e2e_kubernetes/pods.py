"""A pod as these tests see it."""

from __future__ import annotations

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
    def of(cls, pod: Any) -> PodView:
        labels = pod.metadata.labels or {}
        containers = pod.status.container_statuses or []
        states = [container.state for container in containers]
        ended = [state.terminated for state in states if state.terminated]
        return cls(
            name=pod.metadata.name,
            uid=pod.metadata.uid,
            role=labels.get(ROLE_LABEL, ""),
            index=int(labels.get(INDEX_LABEL, "0")),
            state="Terminating" if pod.metadata.deletion_timestamp else pod.status.phase,
            node=pod.spec.node_name or "",
            restarts=sum(container.restart_count for container in containers),
            container_running=any(state.running for state in states),
            container_ended=bool(ended),
            reason=pod.status.reason or (ended[0].reason if ended else ""),
        )
