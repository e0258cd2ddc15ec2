"""Two processes share one run of the tests: `pytest -p tests.two_ends` (`make test`).

The second process is the same command again. The first takes tests in their order, the second takes modules from the
last one backwards, until they meet: whoever claims a test first runs it, so both end within one test of each other and
module fixtures are made twice in the one module where they meet. The first process prints every report, and ends with
one summary and one exit status for all.
"""

import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

SHARED = os.environ.pop("TESTS_TWO_ENDS", None)
"""The second process's folder of claims and reports; not for the processes that tests start."""
ORDINARY = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class End:
    """Claims tests through `folder`, which both processes have, and runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def order(self, items: list[pytest.Item]) -> list[pytest.Item]:
        return items

    def claimed(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """Those of `items` that the other process has not claimed, each claimed when it is asked for."""
        for item in self.order(items):
            name = hashlib.sha256(item.nodeid.encode()).hexdigest()
            try:
                (self.folder / f"{name}.claim").open("x").close()
            except FileExistsError:
                continue
            yield item

    def module_ended(self, session: pytest.Session) -> None:
        """Called between two modules and after the last."""

    def run(self, session: pytest.Session) -> None:
        """All that can be claimed, one ahead: what a test's tear-down leaves standing depends on the next test."""
        claimed = self.claimed(session.items)
        item = next(claimed, None)
        while item is not None:
            following = next(claimed, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if following is None or following.path != item.path:
                self.module_ended(session)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        broken = session.testsfailed and not session.config.option.continue_on_collection_errors
        if broken:
            return None  # pytest's own loop says so
        self.run(session)
        return True


class Second(End):
    """From the last module backwards; its reports go into files, one per module."""

    def __init__(self, folder: Path, config: pytest.Config) -> None:
        super().__init__(folder)
        self._config = config
        self._reports: list[dict[str, Any]] = []
        self._written = 0
        self._parent = os.getppid()
        # what remains on the standard output is what tests write past the capture
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115, as long as the process
        config.pluginmanager.unregister(name="terminalreporter")
        quiet = pytest.TerminalReporter(config, self._nowhere)
        config.pluginmanager.register(quiet, "terminalreporter")

    def order(self, items: list[pytest.Item]) -> list[pytest.Item]:
        modules = [list(module) for _, module in groupby(items, key=lambda item: item.path)]
        return list(chain.from_iterable(reversed(modules)))

    def run(self, session: pytest.Session) -> None:
        try:
            super().run(session)
        finally:
            self.module_ended(session)  # of a module that it stops in

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook.pytest_report_to_serializable
        self._reports.append(hook(config=self._config, report=report))

    def pytest_runtest_logfinish(self) -> None:
        if os.getppid() != self._parent:
            pytest.exit("the first process has ended")

    def module_ended(self, session: pytest.Session) -> None:
        """Whole files only: a name ends in `.reports` once its content is there."""
        part = self.folder / f"{self._written:05}.part"
        part.write_bytes(pickle.dumps(self._reports))
        part.rename(part.with_suffix(".reports"))
        self._reports, self._written = [], self._written + 1


class First(End):
    """From the first test on; starts the other process and reports for both."""

    def __init__(self, config: pytest.Config) -> None:
        self._folder = TemporaryDirectory(prefix="two-ends-")
        super().__init__(Path(self._folder.name))
        self._told = 0
        self._reported: set[str] = set()
        with (self.folder / "log").open("wb") as log:
            self._second = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", *config.invocation_params.args),
                    *("-p", "no:cacheprovider"),
                ],
                cwd=config.invocation_params.dir,
                env={**os.environ, "TESTS_TWO_ENDS": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._reported.add(report.nodeid)

    def module_ended(self, session: pytest.Session) -> None:
        """Passes on what the second process has reported and its tests have written since."""
        hook, config = session.config.hook, session.config
        for path in sorted(self.folder.glob("*.reports")):
            started = None
            for data in pickle.loads(path.read_bytes()):
                report = hook.pytest_report_from_serializable(config=config, data=data)
                if report.nodeid != started:
                    started = report.nodeid
                    hook.pytest_runtest_logstart(nodeid=started, location=report.location)
                hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    hook.pytest_runtest_logfinish(nodeid=started, location=report.location)
            path.unlink()
        log = (self.folder / "log").read_bytes()
        config.get_terminal_writer().write(log[self._told :].decode(errors="replace"))
        self._told = len(log)

    def run(self, session: pytest.Session) -> None:
        super().run(session)
        status = self._second.wait()
        self.module_ended(session)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        for item in session.items:
            if item.nodeid not in self._reported:
                self._fail(item, f"the second process ended with status {status} before its report")
        if session.shouldfail or status not in ORDINARY:
            session.shouldfail = session.shouldfail or f"second process: status {status}"
            raise session.Failed(session.shouldfail)

    def _fail(self, item: pytest.Item, reason: str) -> None:
        log = (self.folder / "log").read_text(errors="replace")
        report = pytest.TestReport(
            nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed",
            longrepr=f"{reason}; it wrote:\n{log[-2000:]}", when="call",
        )  # fmt: skip
        item.config.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        item.config.hook.pytest_runtest_logreport(report=report)

    def pytest_unconfigure(self) -> None:
        """Also after an interrupt or an error."""
        self._second.terminate()
        self._second.wait()
        self._folder.cleanup()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Alone where a second process has no core, would write into the same folder, or would have nothing to run.

    After the terminal, which the second process replaces.
    """
    option = config.option
    if SHARED is not None:
        config.pluginmanager.register(Second(Path(SHARED), config))
    elif not (
        os.cpu_count() == 1
        or option.basetemp
        or option.collectonly
        or option.help
        or option.version
    ):
        config.pluginmanager.register(First(config))
