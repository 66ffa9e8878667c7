"""Replay a schedule: python -m tests.engine [KIND] SEED; or search: python -m tests.engine [KIND] FIRST LAST.

KIND is one of `KINDS`.
"""

from __future__ import annotations

import gc
import logging
import sys
import time

from tests.engine.aimed_schedules import play_aimed
from tests.engine.hostile_schedules import HostileRun, play_hostile
from tests.engine.schedules import play, play_end, play_killed_end, play_lost_end, play_small, play_user_code

KINDS = {
    "play": play,
    "end": play_end,
    "killed_end": play_killed_end,
    "lost_end": play_lost_end,
    "small": play_small,
    "hostile": play_hostile,
    "aimed": play_aimed,
    "user_code": play_user_code,
}

if __name__ == "__main__":
    run = KINDS[sys.argv.pop(1)] if sys.argv[1] in KINDS else play
    first, last = int(sys.argv[1]), int(sys.argv[-1])
    is_one = first == last
    logging.basicConfig(level=logging.DEBUG if is_one else logging.CRITICAL, format="%(message)s", stream=sys.stdout)
    gc.freeze()  # the collector need not look at the imported modules
    begun, failed = time.process_time(), 0
    hostile: list[HostileRun] = []
    for seed in range(first, last + 1):
        try:
            result = run(seed)
        except AssertionError as error:
            failed += 1
            print(str(error) if is_one else "\n".join(str(error).splitlines()[:2]), flush=True)
        else:
            hostile += [result] if isinstance(result, HostileRun) else []
    if hostile:
        moved = sum(one.num_moved + one.num_restored > 0 for one in hostile) / len(hostile)
        older = sum(one.num_restored > 0 for one in hostile) / len(hostile)
        print(f"a model moved in {moved:.0%} of them, and became an older one in {older:.0%}")
    print(f"{last + 1 - first} schedules, {failed} failed, {time.process_time() - begun:.1f} CPU s", flush=True)
    sys.exit(failed > 0)
