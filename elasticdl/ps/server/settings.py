"""How a PS takes updates: what the job's flags say of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Flags of the same names.

    Attributes:
        use_async: each gradient is applied as it comes; otherwise in rounds.
        grads_to_wait: gradients in a round.
        sync_version_tolerance: rounds that a gradient may be late.
        max_staleness: updates that a gradient may miss; 0: any number.
        lr_staleness_modulation: the learning rate is divided by the updates that a gradient misses.
    """

    use_async: bool = True
    grads_to_wait: int = 1
    sync_version_tolerance: int = 0
    max_staleness: int = 0
    lr_staleness_modulation: bool = False
