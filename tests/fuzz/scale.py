"""How long a fuzzer runs: `$ELASTICDL_FUZZ_SCALE` of its full length, 1 with `make fuzz`, a twelfth in CI."""

from __future__ import annotations

import math
import os

SCALE = float(os.environ.get("ELASTICDL_FUZZ_SCALE") or 0.08)


def rounds(at_length: int) -> int:
    """How many inputs a fuzzer tries that tries ``at_length`` of them in a whole run; at least one."""
    return max(1, math.ceil(at_length * SCALE))
