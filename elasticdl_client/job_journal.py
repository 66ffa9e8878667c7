"""JobJournal: the parts for people of the journal that a job's master writes: events, numbers, and the times of pods.

The master's own state, which is most of a journal, is read by masters alone (master/journal.py).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticdl_client.goodput import PodTimes
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_events import from_journal as history_from_journal
from elasticdl_client.job_series import JobSeries


def shown_part(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a master's state that `JobJournal` reads; its size has a bound, whatever the job's."""
    core = snapshot.get("core", {})
    return {"core": {name: core[name] for name in ("events", "series", "accounting") if name in core}}


@dataclass(frozen=True, slots=True)
class JobJournal:
    """The events of a job, and its numbers since its start; empty before its master has begun it.

    Attributes:
        saved_pod_times: as `PodTimes.to_journal` made them; empty: there are none.
        began_at: the moment from which the times of pods count, in seconds since the Unix epoch.
    """

    history: EventHistory = field(default_factory=EventHistory)
    series: JobSeries = field(default_factory=JobSeries)
    saved_pod_times: Mapping[str, Any] = field(default_factory=dict)
    began_at: float = 0.0

    def pod_times(self) -> PodTimes:
        """Parse the times of pods, which only the dashboard needs.

        Raises:
            ValueError: they are damaged.
        """
        return PodTimes.from_journal(self.saved_pod_times) if self.saved_pod_times else PodTimes()

    @classmethod
    def read(cls, data: bytes) -> JobJournal:
        """Parse the bytes of ``journal.json``; fields that an older version did not write are empty.

        Raises:
            ValueError: it is not a journal.
        """
        document = json.loads(data)
        try:
            core = document["snapshot"]["core"]
            history, series, accounting = core.get("events"), core.get("series"), core.get("accounting", {})
            pod_times, began_at = accounting.get("pods", {}), float(accounting.get("began_at", 0.0))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a journal: {error!r}") from error
        return cls(
            history_from_journal(history) if history is not None else EventHistory(),
            JobSeries.from_journal(series) if series is not None else JobSeries(),
            pod_times,
            began_at,
        )

    @classmethod
    def unpack(cls, text: str) -> JobJournal:
        """From a ConfigMap, which holds the same bytes compressed, in base64; empty: there is none yet.

        Raises:
            ValueError: it is not a journal.
        """
        if not text:
            return cls()
        try:
            return cls.read(zlib.decompress(base64.b64decode(text)))
        except zlib.error as error:
            raise ValueError(f"not a journal: {error}") from error
