"""bench.io: what is moved, fio's output, peers in processes, the summary."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.harness.peer_process import PeerProcess
from bench.harness.rounds import ContenderError, Rounds
from bench.io import summarize
from bench.work.fio import FIO_PATTERN, SETTINGS, Fio, figures, fio_version
from bench.work.transfers import (
    IN_FLIGHT,
    PATTERNS,
    HeteroTransfers,
    Shape,
    measured_file,
)

KIB = 1 << 10
MIB = 1 << 20
SMALL = Shape.of(4 * MIB, 64 * KIB, 4)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    try:
        with measured_file(str(tmp_path), 4096):
            return tmp_path
    except ValueError as no_direct:
        pytest.skip(str(no_direct))


def test_the_default_shape() -> None:
    shape = Shape.of(2 << 30, MIB, 16, 4 << 30)
    assert (shape.size_bytes, shape.request_bytes, shape.in_flight) == (2 << 30, 64 * MIB, 4)
    assert {pattern: shape.passes(pattern) for pattern in PATTERNS} == {
        "read": 2,
        "write": 2,
        "mixed": 1,
    }
    assert {shape.moved_bytes(pattern) for pattern in PATTERNS} == {4 << 30}


@given(st.integers(1, 1 << 34), st.integers(1, 512), st.integers(1, 256), st.integers(1, 1 << 34))
def test_any_shape_is_whole_or_refused(size: int, pages: int, depth: int, sample: int) -> None:
    try:
        shape = Shape.of(size, pages * 4096, depth, sample)
    except ValueError:
        return
    assert 0 < shape.size_bytes <= size
    assert shape.size_bytes % shape.request_bytes == 0
    assert shape.request_bytes % shape.block_bytes == 0
    # Four times all buffers, and enough requests in flight to fill the queue in either direction.
    assert shape.size_bytes >= 4 * IN_FLIGHT * shape.request_bytes
    assert IN_FLIGHT // 2 * shape.request_bytes >= depth * shape.block_bytes
    for pattern in PATTERNS:
        moved = shape.moved_bytes(pattern)
        assert sample <= moved < sample + 2 * shape.size_bytes


def test_the_least_size_named_in_the_refusal_is_accepted() -> None:
    with pytest.raises(ValueError, match="--size of 8.0 MiB is too small .* the least is 128.0 Mi"):
        Shape.of(8 * MIB, MIB, 16)
    Shape.of(128 * MIB, MIB, 16)
    with pytest.raises(ValueError, match="--size"):
        Shape.of(128 * MIB - 1, MIB, 16)
    with pytest.raises(ValueError, match=r"256 blocks .* lower --depth or --block"):
        Shape.of(1 << 40, MIB, 256)


def test_the_file_is_written_and_goes_away(directory: Path) -> None:
    size = 3 * MIB + 4096
    with measured_file(str(directory), size) as path:
        data = Path(path).read_bytes()
        assert os.stat(path).st_blocks * 512 >= size
    assert len(data) == size
    pages = [data[at : at + 4096] for at in range(0, size, 4096)]
    assert len(set(pages)) == len(pages)  # nothing to store only once
    assert not list(directory.iterdir())


def test_the_file_goes_away_after_a_failure(directory: Path) -> None:
    with pytest.raises(ZeroDivisionError), measured_file(str(directory), MIB):
        raise ZeroDivisionError
    assert not list(directory.iterdir())


@pytest.mark.parametrize("kind", ["threads", "io_uring"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_hetero_moves_every_byte_of_the_file(directory: Path, kind: str, pattern: str) -> None:
    shape = Shape.of(4 * MIB, 64 * KIB, 4, 5 * MIB)
    with measured_file(str(directory), shape.size_bytes) as path:
        before = Path(path).read_bytes()
        try:
            transfers = HeteroTransfers(kind, path, shape)
        except (OSError, ValueError) as refusal:
            pytest.skip(str(refusal))
        with transfers:
            sample = transfers.sample(pattern)
            stats = transfers.engine.stats
        after = Path(path).read_bytes()
    assert sample["gbps"] > 0
    assert sample["cpu_s_per_gb"] >= 0
    moved = shape.moved_bytes(pattern)
    assert moved == 8 * MIB
    expected = {"read": (moved, 0), "write": (0, moved), "mixed": (moved // 2, moved // 2)}
    assert (stats["read_bytes"], stats["written_bytes"]) == expected[pattern]
    if pattern == "write":
        requests = range(0, shape.size_bytes, shape.request_bytes)
        assert all(before[at : at + 4096] != after[at : at + 4096] for at in requests)
    else:  # mixed writes back what it read, to where it was
        assert before == after


class LazyEngine:
    """An engine whose operations of one kind are as late as an engine may make them, when they are
    waited for, and those of the other at once."""

    notes: tuple[str, ...] = ()

    def __init__(self, late: str) -> None:
        self._late = late
        self.done: list[tuple[str, int]] = []

    def add_file(self, fd: int, path: str) -> int:
        self._fd = os.open(path, os.O_RDWR)
        return 0

    def register(self, arena: object) -> None: ...

    def close(self) -> None:
        os.close(self._fd)

    def read(self, file: int, address: int, nbytes: int, offset: int) -> SimpleNamespace:
        def transfer() -> None:
            ctypes.memmove(address, os.pread(self._fd, nbytes, offset), nbytes)

        return self._start("read", offset, transfer)

    def write(self, file: int, address: int, nbytes: int, offset: int) -> SimpleNamespace:
        def transfer() -> None:
            os.pwrite(self._fd, ctypes.string_at(address, nbytes), offset)

        return self._start("write", offset, transfer)

    def _start(self, op: str, offset: int, transfer: Callable[[], None]) -> SimpleNamespace:
        @functools.cache
        def wait() -> None:
            transfer()
            self.done.append((op, offset))

        if op != self._late:
            wait()
        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize("late", ["read", "write"])
def test_mixed_waits_for_what_it_uses_next(
    directory: Path, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write begins after its extent was read, and a buffer is read into after it was written."""
    engine = LazyEngine(late)
    monkeypatch.setattr("bench.work.transfers.IoEngine", lambda *_: engine)
    with measured_file(str(directory), SMALL.size_bytes) as path:
        before = Path(path).read_bytes()
        with HeteroTransfers("lazy", path, SMALL) as transfers:
            transfers.sample("mixed")
        assert Path(path).read_bytes() == before
    extents = range(0, SMALL.size_bytes, SMALL.request_bytes)
    for op in ("read", "write"):
        assert [offset for done, offset in engine.done if done == op] == list(extents)


def fio_output(**changes: Any) -> str:
    job = {
        "error": 0,
        "usr_cpu": 10.0,
        "sys_cpu": 15.0,
        "job_runtime": 4000,
        "read": {"io_bytes": 6 * 10**9, "runtime": 3000},
        "write": {"io_bytes": 2 * 10**9, "runtime": 4000},
    }
    return "note: a remark\n" + json.dumps({"jobs": [job | changes]})


def test_fio_figures_by_its_own_clock() -> None:
    # 8 GB in the 4 s of the longer direction; a quarter of 4 s of CPU for them.
    assert figures(fio_output()) == {"gbps": 2.0, "cpu_s_per_gb": 0.125}


@pytest.mark.parametrize("output", ["", "no brace", "{}", '{"jobs": []}', fio_output(error=5)])
def test_fio_output_that_is_none(output: str) -> None:
    with pytest.raises(ContenderError, match="fio"):
        figures(output)


def test_fio_does_what_the_others_do() -> None:
    shape = Shape.of(2 << 30, MIB, 16, 4 << 30)
    for settings in SETTINGS.values():
        for pattern in PATTERNS:
            command = Fio("/a:b/file", shape, settings).command(pattern)
            assert "--filename=/a\\:b/file" in command
            for option in ("--direct=1", "--ioengine=io_uring", "--bs=1048576", "--iodepth=16",
                           "--size=2147483648", "--io_size=4294967296",
                           f"--rw={FIO_PATTERN[pattern]}"):  # fmt: skip
                assert option in command
            assert set(settings) <= set(command)


def test_fio_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fio_version() is None
    with pytest.raises(ContenderError, match="install fio"):
        Fio(str(tmp_path / "f"), SMALL, ()).sample("read")


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_fio_runs_on_the_same_file(directory: Path, settings: tuple[str, ...]) -> None:
    with measured_file(str(directory), SMALL.size_bytes) as path:
        for pattern in PATTERNS:
            try:
                assert Fio(path, SMALL, settings).sample(pattern)["gbps"] > 0
            except ContenderError as refusal:
                pytest.skip(str(refusal))  # a kernel without io_uring
        assert os.path.getsize(path) == SMALL.size_bytes


@pytest.mark.parametrize("peer", ["aiofiles", "1 thread", "4 threads"])
def test_a_peer_moves_every_byte(directory: Path, peer: str) -> None:
    setup: dict[str, Any] = {"path": str(directory / "file"), "shape": SMALL.to_dict()}
    command = (sys.executable, "-m", "bench.peers.io", "aiofiles")
    if peer == "aiofiles":
        pytest.importorskip("aiofiles")
    elif python := os.environ.get("BENCH_PEER_PYTHON"):
        setup["threads"] = int(peer[0])
        command = (python, "-m", "bench.peers.io", "deepspeed")
    else:
        pytest.skip("BENCH_PEER_PYTHON names no Python with DeepSpeed")
    path = directory / "file"
    before = os.urandom(SMALL.size_bytes)
    path.write_bytes(before)
    with PeerProcess(command, setup, "") as reader, PeerProcess(command, setup, "") as writer:
        for pattern in ("read", "mixed"):
            assert reader.sample(pattern=pattern)["gbps"] > 0
            assert path.read_bytes() == before
        writer.sample(pattern="write")
    after = path.read_bytes()
    assert len(after) == len(before)
    for at in range(0, SMALL.size_bytes, SMALL.request_bytes):
        assert after[at : at + 64] != before[at : at + 64]


PEER = """
import sys
from bench.peers.serve import serve
class Peer:
    info = {"version": 7}
    def __init__(self, setup):
        self.setup = setup
        print("a library prints to stdout")
    def sample(self, request):
        BODY
        return {"x": request["x"] + self.setup["x"]}
sys.exit(serve(Peer))
"""


def peer_process(body: str = "pass", timeout_s: float = 300, program: str = PEER) -> PeerProcess:
    command = (sys.executable, "-c", program.replace("BODY", body))
    return PeerProcess(command, {"x": 1.0}, "pip install it", timeout_s=timeout_s)


def test_a_peer_answers_until_it_is_closed() -> None:
    with peer_process() as peer:
        assert [peer.sample(x=float(x))["x"] for x in (1, 2)] == [2.0, 3.0]
        assert peer.info == {"version": 7}
        child = peer._process
    assert child is not None
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise OSError('disk on fire')", "OSError: disk on fire"),
        ("import os; print('bye', file=sys.stderr, flush=True); os._exit(9)", "exit code 9: bye"),
        ("import no_such_module", "No module named 'no_such_module'; install: pip install it"),
    ],
)
def test_what_goes_wrong_in_a_peer_is_told(body: str, message: str) -> None:
    with peer_process(body) as peer, pytest.raises(ContenderError) as caught:
        peer.sample(x=1.0)
    assert str(caught.value) == message


def test_a_peer_that_hangs_is_ended() -> None:
    with peer_process("import time; time.sleep(600)", timeout_s=0.5) as peer:
        with pytest.raises(ContenderError, match="no answer within 0 s"):
            peer.sample(x=1.0)
        child = peer._process
    assert child is not None
    assert child.returncode is not None


def test_a_peer_that_cannot_start(tmp_path: Path) -> None:
    peer = PeerProcess((str(tmp_path / "none"),), {}, "")
    with peer, pytest.raises(ContenderError, match="cannot start .*none: No such file"):
        peer.sample()


NAMES = {
    "fio_default": "fio default",
    "fio_tuned": "fio tuned",
    "hetero": "hetero io_uring",
}


def rounds(**rates: list[float]) -> Rounds:
    return Rounds(
        {
            NAMES.get(name, name): [{"gbps": rate, "cpu_s_per_gb": 1 / rate} for rate in values]
            for name, values in rates.items()
        }
    )


def test_the_better_fio_counts_for_each_pattern() -> None:
    summary = summarize(
        {
            "read": rounds(x=[1.0] * 3, fio_default=[1.0, 2.0, 4.0], fio_tuned=[2.0, 2.0, 6.0]),
            "write": rounds(
                fio_default=[4.0, 4.0, 4.0], fio_tuned=[1.0, 9.0, 1.0], hetero=[2.0, 4.0, 3.0]
            ),
            "mixed": rounds(x=[1.0] * 3),
        }
    )
    assert summary["share_of_fio"] == {"write": 0.75}
    found = summary["contenders"]
    assert found["fio tuned"]["read_gbps"] == {"median": 2.0, "min": 2.0, "max": 6.0}
    assert found["fio tuned"]["write_cpu_s_per_gb"]["median"] == 1.0
    assert set(found["x"]) == {f"{p}_{m}" for p in ("read", "mixed") for m in METRICS}


METRICS = ("gbps", "cpu_s_per_gb")


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    too_much = measured_file(str(tmp_path), 1 << 60)
    with pytest.raises(ValueError, match="are free; free space or lower --size"), too_much:
        pass
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    refused = measured_file(str(tmp_path), 4096)
    with pytest.raises(ValueError, match="is not writable for this user"), refused:
        pass
