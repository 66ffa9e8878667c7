"""Data: facts about the model and the job's data sources, from which the tasks are cut.

A source is listed by the worker (a custom reader) or by the shell; this module decides which.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

from elasticdl.master.core.plan.tasks import cut, num_cut
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import DataKind, ScriptPlan
from elasticdl.protocol import Shard

# A journal must fit into a ConfigMap, and contains more than names and identities of files.  An identity takes about
# 11 bytes, a random name up to 30.
MAX_IDENTITIES = 50_000
_MAX_ROWS_BYTES = 704 << 10  # compressed
_FEW_IDENTITIES = 1000  # take negligible room, however many shards their files are cut into


class Data:
    """Facts about model and data; the first report counts."""

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings
        self.has_model = False
        self.has_metrics = False
        self._shards: dict[DataKind, tuple[Shard, ...]] = {}
        self.plan: ScriptPlan | None = None
        self.callbacks: dict[str, Any] = {}  # configuration of the user's callbacks
        sources = {
            DataKind.TRAINING: settings.has_training_data,
            DataKind.VALIDATION: settings.has_validation_data,
            DataKind.PREDICTION: settings.has_prediction_data,
        }
        self._is_identified: bool | None = None  # whether the journal has the identities; None: not decided yet
        self._fingerprint = ""  # computed on demand: that is slow for many shards, and each journal contains it
        self._kinds = [kind for kind, has in sources.items() if has]

    @property
    def is_known(self) -> bool:
        return self.has_model and all(kind in self._shards for kind in self._kinds)

    @property
    def settings(self) -> JobSettings:
        """Settings of the job, with the plan of a user's own script and of callbacks in place of the flags."""
        plan, settings = self.plan, self._settings
        limits = [limit for limit in (settings.max_step, self.callbacks.get("max_steps", 0)) if limit > 0]
        if limits and min(limits) != settings.max_step:
            settings = dataclasses.replace(settings, max_step=min(limits))
        if plan is None:
            return settings
        return dataclasses.replace(
            settings,
            minibatch_size=plan.minibatch_size,
            num_minibatches_per_task=plan.num_minibatches_per_task,
            num_epochs=settings.num_epochs if plan.num_epochs is None else plan.num_epochs,
        )

    def plan_in_force(self) -> ScriptPlan:
        """Return the plan that each worker receives when it registers."""
        settings, shards = self.settings, self.planned_shards()
        size = settings.minibatch_size
        return ScriptPlan(
            size,
            settings.num_minibatches_per_task,
            settings.num_epochs,
            num_records=sum(len(shard) for shard in shards),
            num_minibatches=sum(-(-len(shard) // size) for shard in shards),  # a task's last one counts as whole
        )

    def model_reported(
        self,
        has_metrics: bool,
        shards: Mapping[DataKind, tuple[Shard, ...]],
        plan: ScriptPlan | None = None,
        callbacks: Mapping[str, Any] | None = None,
    ) -> list[DataKind]:
        """Record a worker's report of the model; return the kinds of data that the shell must list."""
        if self.has_model:
            return []
        self.has_model, self.has_metrics, self.plan, self._fingerprint = True, has_metrics, plan, ""
        self.callbacks = dict(callbacks or {})
        for kind in self._kinds:
            if kind in shards:
                self.listed(kind, shards[kind])
        return [kind for kind in self._kinds if kind not in self._shards]

    def unlisted(self) -> list[DataKind]:
        """Return the kinds of data that were requested and not listed before a restart."""
        return [kind for kind in self._kinds if kind not in self._shards] if self.has_model else []

    def listed(self, kind: DataKind, shards: tuple[Shard, ...]) -> None:
        self._shards.setdefault(kind, tuple(sorted(shards)))
        self._fingerprint, self._is_identified = "", None

    def empty_kinds(self) -> list[DataKind]:
        return [kind for kind in self._kinds if not any(len(shard) for shard in self._shards[kind])]

    def num_tasks(self) -> int:
        """Return the number of tasks of the kind of data with the most."""
        return max(num_cut(shards, self.settings.records_per_task) for shards in self._shards.values())

    def planned_shards(self) -> tuple[Shard, ...]:
        """Return the shards of an epoch."""
        kind = DataKind.TRAINING if self._settings.trains else DataKind.PREDICTION
        kind = DataKind.VALIDATION if self._settings.evaluates_alone else kind
        return self._shards.get(kind, ())

    def evaluation_slices(self) -> tuple[Shard, ...]:
        """Return the tasks of an evaluation beside the plan; none if nothing can be evaluated."""
        if self._settings.evaluates_alone:
            return ()
        shards = self._shards.get(DataKind.VALIDATION, ()) if self.has_metrics else ()
        return cut(shards, self.settings.records_per_task)

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the records of a minibatch."""
        if self._fingerprint:
            return self._fingerprint
        settings = self.settings
        shards = self._rows().get(DataKind.TRAINING, [])
        known = [shards, settings.minibatch_size, settings.num_minibatches_per_task, settings.seed]
        self._fingerprint = hashlib.sha256(json.dumps(known).encode()).hexdigest()
        return self._fingerprint

    def snapshot(self) -> dict[str, Any]:
        return {
            "has_model": self.has_model,
            "has_metrics": self.has_metrics,
            "plan": None if self.plan is None else list(dataclasses.astuple(self.plan)),
            "callbacks": self.callbacks,
            "shards": self._rows(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.has_model, self.has_metrics = saved["has_model"], saved["has_metrics"]
        self.callbacks = saved.get("callbacks", {})
        plan = saved.get("plan")
        self.plan = None if plan is None else ScriptPlan(*plan)
        self._shards = {DataKind(k): tuple(Shard(*s) for s in shards) for k, shards in saved["shards"].items()}
        self._fingerprint, self._is_identified = "", None

    def _rows(self) -> dict[DataKind, list[list[str | int]]]:
        """Return the shards in the format of the journal."""
        if self._is_identified is None:
            self._is_identified = self._identities_fit()
        is_identified = self._is_identified
        return {kind: [_row(shard, is_identified) for shard in shards] for kind, shards in self._shards.items()}

    def _identities_fit(self) -> bool:
        identities = {shard.identity for shards in self._shards.values() for shard in shards}
        if not any(identities) or len(identities) > MAX_IDENTITIES:
            return False
        if len(identities) <= _FEW_IDENTITIES:
            return True
        rows = [_row(shard, True) for shards in self._shards.values() for shard in shards]
        return len(zlib.compress(json.dumps(rows, separators=(",", ":")).encode())) <= _MAX_ROWS_BYTES


def _row(shard: Shard, is_identified: bool) -> list[str | int]:
    """Return a shard for the journal; without identity in the format of older versions."""
    row: list[str | int] = [shard.name, shard.start, shard.end]
    return [*row, shard.identity] if is_identified and shard.identity else row
