"""The end of a test run whose worker process dies, as for lack of memory: at once, with the test's name.

pytest-xdist would start another worker with the same tests, which would die again, and the run would not end.
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """Report the test that the worker ran as failed, and end the run with exit status 1.

    Raises:
        pytest.Session.Failed: always.
    """
    session = sched.config.pluginmanager.get_plugin("session")
    session.shouldfail = f"worker died while running {crashitem}"
    sched.config.hook.pytest_runtest_logreport(report=report)
    raise session.Failed(session.shouldfail)
