"""Tests on several processes: `--jobs N`.

One process collects all tests and then forks the workers, so that what tests import, which takes
longer than most of them, is imported once. A worker takes the tests of a file at a time, in the
order of the session, from a pipe that all of them read, and sends what pytest reports to the
process that has forked it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import signal
import traceback
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

_NUMBER_BYTES = 4  # of a file's number in the pipe: read and written as a whole
_PR_SET_PDEATHSIG = 1


class _Worker:
    """A worker as its parent sees it."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.runs: dict[str, Any] | None = None  # the test that it runs: its nodeid and location
        self.error = ""

    def follow(self, hook: str, given: dict[str, Any]) -> None:
        """Notes which test runs."""
        if hook == "pytest_runtest_logstart":
            self.runs = given
        elif hook == "pytest_runtest_logfinish":
            self.runs = None

    def end(self) -> pytest.TestReport | None:
        """Waits for the process; the failure of the test in which it ended, if it was in one."""
        _, status = os.waitpid(self.process, 0)
        if status == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        text = f"the process of this test ended with {code}\n{self.error}"
        where = self.runs or {"nodeid": "tests/support/workers.py", "location": ("", None, "")}
        return pytest.TestReport(
            **where, keywords={}, outcome="failed", longrepr=text, when="call", duration=0.0
        )


class Workers:
    """A plugin that runs a session's tests on forks of its process."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop says what could not be collected
        grouped = itertools.groupby(session.items, lambda item: item.nodeid.partition("::")[0])
        files = [list(items) for _, items in grouped]
        queue, filled = os.pipe()
        numbers = range(len(files))
        os.write(filled, b"".join(n.to_bytes(_NUMBER_BYTES, "big") for n in numbers))
        os.close(filled)
        stop = mmap.mmap(-1, 1)  # all of them see it
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        running: dict[Connection, _Worker] = {}
        try:
            for number in range(min(self._jobs, len(files))):
                ours, theirs = Pipe(duplex=False)
                process = os.fork()
                if process == 0:
                    _work(session, number, _taken(files, queue, stop), stop, theirs)
                os.setpgid(process, process)  # Ctrl-C is for this process, which ends the others
                theirs.close()
                running[ours] = _Worker(process)
            _follow(session, running, stop)
        finally:
            for worker in running.values():
                os.killpg(worker.process, signal.SIGKILL)
                os.waitpid(worker.process, 0)
            os.close(queue)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True


def _follow(session: pytest.Session, running: dict[Connection, _Worker], stop: mmap.mmap) -> None:
    """Reports what workers send, until all have ended, which are then no more in `running`."""
    config = session.config
    while running:
        for connection in wait(list(running)):
            worker = running[connection]
            try:
                hook, given = connection.recv()
            except (EOFError, OSError):  # the latter in the middle of a message
                del running[connection]
                if (failure := worker.end()) is not None:
                    config.hook.pytest_runtest_logreport(report=failure)
                continue
            if hook == "error":
                worker.error = given
                continue
            worker.follow(hook, given)
            if "report" in given:
                given["report"] = config.hook.pytest_report_from_serializable(
                    config=config, data=given["report"]
                )
            caller = getattr(config.hook, hook)
            if caller.is_historic():  # of warnings
                caller.call_historic(kwargs=given)
            else:
                caller(**given)
        stop[0] = bool(session.shouldfail or session.shouldstop)


def _taken(
    files: Sequence[list[pytest.Item]], queue: int, stop: mmap.mmap
) -> Iterator[pytest.Item]:
    """The tests of files that this worker takes from the queue, until that is empty."""
    while not stop[0] and (number := os.read(queue, _NUMBER_BYTES)):
        yield from files[int.from_bytes(number, "big")]


class _Sender:
    """A plugin that sends a worker's reports to its parent."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        given = {"nodeid": nodeid, "location": location}
        self._connection.send(("pytest_runtest_logstart", given))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("pytest_runtest_logreport", {"report": data}))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        given = {"nodeid": nodeid, "location": location}
        self._connection.send(("pytest_runtest_logfinish", given))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        said = warning_message
        text = warnings.WarningMessage(str(said.message), said.category, said.filename, said.lineno)
        given = {
            "warning_message": text, "when": when, "nodeid": nodeid, "location": location,
        }  # fmt: skip
        self._connection.send(("pytest_warning_recorded", given))


def _work(
    session: pytest.Session,
    number: int,
    items: Iterator[pytest.Item],
    stop: mmap.mmap,
    connection: Connection,
) -> None:
    """A worker's process, which ends here."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _leave_parents_files(session.config, number)
        session.config.pluginmanager.register(_Sender(session.config, connection))
        item = next(items, None)
        while item is not None and not stop[0]:
            following = next(items, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
            item = following
        session._setupstate.teardown_exact(None)  # where there was no last test
        status = 0
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    finally:
        os._exit(status)


def _leave_parents_files(config: pytest.Config, number: int) -> None:
    """Output is captured in files of this worker's own, and its tests' folders are in one."""
    config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115 (as long as we are)
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"worker-{number}"
    factory._basetemp.mkdir()
