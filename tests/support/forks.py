"""A function called in a fork of this process."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

from kvkit.tiers.testing.contract import DEADLINE_S


def fork(work: Callable[[], object]) -> int:
    """The exit status of a fork that does `work`: 0, 1 where that raises, -9 and the like after a signal.

    One that hangs is ended by SIGALRM.
    """
    child = os.fork()
    if not child:
        try:
            signal.alarm(int(DEADLINE_S))
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
