"""What the tests of the I/O engines share."""

import errno
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from offload import _native
from tests.support.own_process import native_threads
from tests.support.waiting import in_time, until

# Small, so that few bytes make many blocks.
BLOCK = 1 << 16
MIB = 1 << 20


def io_uring_refusal() -> str:
    try:
        _native.IoEngine("io_uring").close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


NO_URING = io_uring_refusal()
needs_uring = pytest.mark.skipif(bool(NO_URING), reason=NO_URING)
KINDS = [pytest.param("io_uring", marks=needs_uring), "threads"]


class Memory:
    """An arena, and its bytes as a tensor."""

    def __init__(self, nbytes: int) -> None:
        self.arena = _native.Arena(nbytes)
        self.address = self.arena.address
        self.bytes = torch.from_dlpack(self.arena.export(0, self.arena.nbytes))

    def randomise(self) -> torch.Tensor:
        self.bytes.random_(0, 256, generator=torch.Generator().manual_seed(len(self.bytes)))
        return self.bytes.clone()


def add_file(engine, directory, nbytes=0, direct=False) -> int:
    flags = os.O_TMPFILE | os.O_RDWR | (os.O_DIRECT if direct else 0)
    try:
        fd = os.open(directory, flags, 0o600)
    except OSError as error:
        pytest.skip(f"no O_TMPFILE{' with O_DIRECT' if direct else ''} here: {error}")
    try:
        os.truncate(fd, nbytes)
        return engine.add_file(fd, f"{directory}/scratch")
    finally:
        os.close(fd)


def error_of(op: _native.IoOp) -> _native.NativeIoError:
    """What a wait for the operation raises."""
    with pytest.raises(_native.NativeIoError) as caught:
        op.wait()
    return caught.value


class Striped:
    """A file of members without names, one for each weight, that is added to `engine`."""

    def __init__(
        self, engine, directory, weights, unit=4096, nbytes=0, direct=False, checksums=False
    ) -> None:
        self.stripes = _native.StripeMap(weights, unit)
        flags = os.O_TMPFILE | os.O_RDWR | (os.O_DIRECT if direct else 0)
        self.fds = [os.open(directory, flags, 0o600) for _ in weights]
        for member, fd in enumerate(self.fds):
            os.truncate(fd, self.stripes.member_bytes(member, nbytes))
        members = [(fd, f"{directory}/member{m}") for m, fd in enumerate(self.fds)]
        self.file = engine.add_striped_file(members, self.stripes, checksums)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Pipe:
    """A file whose reads stay in flight until they are fed. Threads cannot read it: no offsets."""

    def __init__(self, engine) -> None:
        source, self.sink = os.pipe()
        self.file = engine.add_file(source, "pipe")
        os.close(source)

    def feed(self, nbytes: int) -> None:
        os.write(self.sink, bytes(nbytes))

    def feed_first(self, engine) -> None:
        """One block, until it is back: the next ones are then in flight for certain."""
        self.feed(4096)
        until(lambda: engine.stats["reads"] > 0)

    def close(self) -> None:
        os.close(self.sink)


def thread_names() -> list[str]:
    """Of engines; the optimizer's worker pool belongs to the process."""
    return sorted(name for _, name in native_threads() if name != "hetero-worker")


def threads_since(before: list[str]) -> list[str]:
    """thread_names(), after time for those beyond `before` to go."""
    return in_time(thread_names, before)


def run_script(script: str, timeout: float = 300) -> str:
    """What it prints; where it exits with 77, it may not do here what it has to."""
    env = dict(os.environ)
    if "refuse(" in script:  # LeakSanitizer's tracer dies where system calls are refused
        env["ASAN_OPTIONS"] = env.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
    )
    if done.returncode == 77:
        pytest.skip(f"not permitted here: {done.stderr.strip() or 'seccomp filters'}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def stall(engine, milliseconds: int = 150) -> None:
    """Keeps the next read in flight for about that long: each retry pauses for a millisecond.

    An engine gives a transfer up that makes no progress for longer than its `patience_s`."""
    engine.inject("read", 0, error=errno.EAGAIN, count=milliseconds)


def hold(engine) -> None:
    """Keeps the next read in flight until it is cancelled, or for the engine's `patience_s`."""
    engine.inject("read", 0, error=errno.EAGAIN, count=1 << 40)
