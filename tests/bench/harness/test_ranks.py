"""Ranks as processes: who each one is told to be; all end with the first that fails or hangs."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.harness.ranks import RankError, rank_log, run_ranks, run_trial
from tests.support.waiting import until


def run(
    tmp_path: Path, script: str, ranks: int = 3, timeout_s: float = 300, stdout: str | None = None
) -> None:
    """Runs the script, which knows its `rank` and `folder`, as that many ranks."""
    prelude = f"import os, sys, time\nfolder = {str(tmp_path)!r}\n"
    prelude += "rank = int(os.environ.get('RANK', 0))\n"
    run_ranks(
        (sys.executable, "-c", prelude + textwrap.dedent(script)),
        ranks,
        os.environ,
        tmp_path / "x.log",
        None if stdout is None else tmp_path / stdout,
        timeout_s,
    )


# Says who it is, in a file that has its whole text from its first moment, and stays until it is
# ended.
STAYS = """
with open(f"{folder}/new{rank}", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{folder}/new{rank}", f"{folder}/pid{rank}")
if rank == 1:
    while not all(os.path.exists(f"{folder}/pid{other}") for other in range(3)):
        time.sleep(0.01)
    BODY
time.sleep(600)
"""


def assert_all_have_ended(tmp_path: Path) -> None:
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(3)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_every_rank_is_told_who_it_is(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    run(
        tmp_path,
        f"""
        import json
        who = {{name: os.environ[name] for name in {names!r}}}
        json.dump(who, open(f"{{folder}}/who{{rank}}", "w"))
        print("out", rank)
        print("err", rank, file=sys.stderr)
        """,
        stdout="out",
    )
    told = [json.loads((tmp_path / f"who{rank}").read_text()) for rank in range(3)]
    assert [who["RANK"] for who in told] == [who["LOCAL_RANK"] for who in told] == ["0", "1", "2"]
    for who in told:
        assert (who["WORLD_SIZE"], who["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert (who["MASTER_ADDR"], who["MASTER_PORT"]) == ("127.0.0.1", told[0]["MASTER_PORT"])
    assert (tmp_path / "out").read_text() == "out 0\n"
    logs = [rank_log(tmp_path / "x.log", rank, 3) for rank in range(3)]
    assert logs[0].read_text() == "err 0\n"
    assert sorted(logs[2].read_text().splitlines()) == ["err 2", "out 2"]


def test_a_single_rank_is_told_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run(tmp_path, "print('WORLD_SIZE' in os.environ)", ranks=1)
    assert (tmp_path / "x.log").read_text() == "False\n"


def test_the_peak_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of memory that is free again when one looks."""
    monkeypatch.setattr("bench.harness.ranks.POLL_S", 0.5)
    script = "import time; del (b := bytearray(64 << 20))[:]; time.sleep(0.6); print('{}')"
    assert run_trial((sys.executable, "-c", script), 60)["peak_bytes"] > 64 << 20


@pytest.mark.parametrize(
    ("body", "how", "code"),
    [
        ("sys.exit('no memory left')", "exit code 1: no memory left", 1),
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL: it printed nothing", -signal.SIGKILL),
    ],
)
def test_a_rank_that_dies_ends_the_others(tmp_path: Path, body: str, how: str, code: int) -> None:
    with pytest.raises(RankError) as failure:
        run(tmp_path, STAYS.replace("BODY", body))
    log = rank_log(tmp_path / "x.log", 1, 3)
    assert str(failure.value) == f"rank 1 of 3: {how} (all of it in {log})"
    assert failure.value.exit_code == code
    assert_all_have_ended(tmp_path)


def pids_in(tmp_path: Path) -> list[int]:
    """Those that were written by now, in the ranks' order."""
    paths = [tmp_path / f"pid{rank}" for rank in range(3)]
    return [int(text) for path in paths if path.exists() and (text := path.read_text())]


def late_when(monkeypatch: pytest.MonkeyPatch, holds: Callable[[], bool]) -> None:
    """run_ranks()'s clock stands still until holds() was true when it last looked at processes."""
    held = [False, False]

    def monotonic() -> float:
        held[:] = held[1], holds()
        return 1e6 if held[0] else 0.0

    clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr("bench.harness.ranks.time", clock)


def test_a_rank_that_hangs_is_named_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
    open(f"{folder}/pid{rank}", "w").write(str(os.getpid()))
    if rank == 1:
        time.sleep(600)
    """

    def others_have_ended() -> bool:
        pids = pids_in(tmp_path)
        return len(pids) == 3 and not running(pids[0]) and not running(pids[2])

    late_when(monkeypatch, others_have_ended)
    with pytest.raises(RankError) as failure:
        run(tmp_path, script, timeout_s=3)
    assert str(failure.value) == "rank 1 of 3: not done after 3 s"
    assert failure.value.exit_code is None
    assert_all_have_ended(tmp_path)


def test_what_a_rank_started_is_ended_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(f"{folder}/pid{rank}", "w").write(str(child.pid))
    time.sleep(600)
    """
    late_when(monkeypatch, lambda: len(pids_in(tmp_path)) == 3)
    with pytest.raises(RankError, match="rank 0, 1, 2 of 3: not done"):
        run(tmp_path, script, timeout_s=3)
    for pid in pids_in(tmp_path):
        # It may wait for init to take notice of its end.
        until(lambda pid=pid: not running(pid))  # type: ignore[misc]


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """An interrupt raises here, also in a run in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_all_ranks(tmp_path: Path, interruptible: None) -> None:
    script = f"import signal\n{STAYS}".replace("BODY", "os.kill(os.getppid(), signal.SIGINT)")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, script)
    assert_all_have_ended(tmp_path)
