"""Name failed tests and their errors at once: `pytest -p tests.named_failures`, for runs that a time limit may cut."""

from typing import Any

import pytest


class Named:
    """Writes a line when a test has failed; with workers, where their reports arrive."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: Any) -> None:
        """First and last line of what a failed test, set-up or tear-down says: compilers name the cause last."""
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(report.longrepr) if crash is None else crash.message
        lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
        said = " .. ".join(dict.fromkeys((lines[0][:300], lines[-1][:300])))
        self._terminal.ensure_newline()
        self._terminal.write_line(f"FAILED at {report.when}: {report.nodeid}: {said}")
        self._terminal.flush()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Once, where the terminal is."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Named(terminal))
