"""JobJournal: what people read of the journal that a job's master writes: its events and its numbers.

The master's own state, which is most of a journal, is read by masters alone (master/journal.py).
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field

from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_events import from_journal as history_from_journal
from elasticdl_client.job_series import JobSeries


@dataclass(frozen=True, slots=True)
class JobJournal:
    """The events of a job, and its numbers since its start; empty before its master has begun it."""

    history: EventHistory = field(default_factory=EventHistory)
    series: JobSeries = field(default_factory=JobSeries)

    @classmethod
    def read(cls, data: bytes) -> JobJournal:
        """From the bytes of the file ``journal.json``; what an older version did not write is empty.

        Raises:
            ValueError: it is not a journal.
        """
        document = json.loads(data)
        try:
            core = document["snapshot"]["core"]
            history, series = core.get("events"), core.get("series")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a journal: {error!r}") from error
        return cls(
            history_from_journal(history) if history is not None else EventHistory(),
            JobSeries.from_journal(series) if series is not None else JobSeries(),
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
