"""native/io_engine: random sequences of calls against a model of files and operations."""

import errno
import gc
import os
import tempfile
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from offload import _native
from tests.support.native.io_tools import KINDS, Memory, thread_names
from tests.support.own_process import descriptors
from tests.support.waiting import in_time

UNIT = 4096
FILE_BYTES = 10 * UNIT
LONGEST = 6 * UNIT
GUARD = 64  # bytes around each operation's memory that nobody may touch
CANARY = 0xA5
TRANSIENT = [errno.EAGAIN, errno.EINTR, errno.ENOMEM]  # which are tried again


def tasks() -> int:
    return len(thread_names())


def failure(op: _native.IoOp) -> _native.NativeIoError | None:
    try:
        op.wait()
    except _native.NativeIoError as error:
        return error
    return None


@dataclass
class ModelFile:
    id: int
    fds: list[int]
    pattern: list[int]
    content: bytearray = field(default_factory=lambda: bytearray(FILE_BYTES))

    def on_disk(self) -> bytes:
        """The members' bytes, unit by unit as the pattern deals them; past the engine."""
        at = [0] * len(self.fds)
        parts = []
        for index in range(FILE_BYTES // UNIT):
            member = self.pattern[index % len(self.pattern)]
            parts.append(os.pread(self.fds[member], UNIT, at[member]))
            at[member] += UNIT
        return b"".join(parts)


@dataclass
class ModelOp:
    kind: str
    op: _native.IoOp
    file: ModelFile
    memory: Memory
    offset: int
    nbytes: int
    wrote: bytes
    may_fail: set[int]  # errnos that it may end with


class EngineMachine(RuleBasedStateMachine):
    """Operations on one file that are under way at a time do not overlap, unless all read."""

    kind: str

    def __init__(self) -> None:
        super().__init__()
        self.before = (descriptors(), tasks())
        self.memory = Memory(UNIT)
        self.directory = tempfile.gettempdir()
        self.engine = _native.IoEngine(self.kind, queue_depth=3, block_bytes=2 * UNIT, threads=2)
        self.files: list[ModelFile] = []
        self.ops: list[ModelOp] = []
        self.armed: dict[str, set[int]] = {"read": set(), "write": set()}
        self.submitted = 0
        self.closed = False

    def open(self) -> bool:
        return not self.closed

    def has_files(self) -> bool:
        return not self.closed and bool(self.files)

    @precondition(lambda self: self.open() and len(self.files) < 3)
    @rule(weights=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def add(self, weights):
        fds = [os.open(self.directory, os.O_TMPFILE | os.O_RDWR, 0o600) for _ in weights]
        stripes = _native.StripeMap(weights, UNIT)
        for member, fd in enumerate(fds):
            os.truncate(fd, FILE_BYTES * weights[member])
        members = [(fd, f"member{m}") for m, fd in enumerate(fds)]
        file = self.engine.add_striped_file(members, stripes)
        self.files.append(ModelFile(file, fds, stripes.pattern))

    @precondition(has_files)
    @rule(data=st.data())
    def remove(self, data):
        file = data.draw(st.sampled_from(self.files))
        mine = [op for op in self.ops if op.file is file]
        self.engine.remove_file(file.id)
        for op in mine:
            assert op.op.done()
            self.settle(op)
        self.drop(file)
        with pytest.raises(ValueError, match="no file"):
            self.engine.read(file.id, self.memory.address, UNIT, 0)

    @precondition(has_files)
    @rule(data=st.data(), kind=st.sampled_from(["read", "write"]), value=st.integers(0, 255))
    def submit(self, data, kind, value):
        file = data.draw(st.sampled_from(self.files))
        offset = data.draw(st.integers(0, FILE_BYTES - 1))
        nbytes = data.draw(st.integers(0, min(LONGEST, FILE_BYTES - offset)))
        for other in self.ops:
            apart = offset + nbytes <= other.offset or other.offset + other.nbytes <= offset
            if other.file is file and not apart and "write" in (kind, other.kind):
                return
        memory = Memory(nbytes + 2 * GUARD)
        memory.bytes.fill_(CANARY)
        wrote = bytes((value + i) % 256 for i in range(nbytes)) if kind == "write" else b""
        if wrote:
            memory.bytes[GUARD : GUARD + nbytes] = torch.frombuffer(
                bytearray(wrote), dtype=torch.uint8
            )
        self.submitted += 1
        start = getattr(self.engine, kind)
        op = start(file.id, memory.address + GUARD, nbytes, offset)
        may_fail = set(self.armed[kind])
        self.ops.append(ModelOp(kind, op, file, memory, offset, nbytes, wrote, may_fail))

    @precondition(lambda self: bool(self.ops))
    @rule(data=st.data())
    def wait(self, data):
        self.settle(data.draw(st.sampled_from(self.ops)))

    @precondition(lambda self: bool(self.ops))
    @rule(data=st.data())
    def cancel(self, data):
        op = data.draw(st.sampled_from(self.ops))
        finished = op.op.done()
        op.op.cancel()
        if not finished:
            op.may_fail.add(errno.ECANCELED)

    @precondition(open)
    @rule(
        kind=st.sampled_from(["read", "write"]),
        nth=st.integers(0, 4),
        fault=st.one_of(
            st.fixed_dictionaries({"error": st.sampled_from([errno.EIO, errno.ENOSPC])}),
            st.fixed_dictionaries({"error": st.sampled_from(TRANSIENT)}),
            st.fixed_dictionaries({"short_bytes": st.integers(1, 2 * UNIT)}),
            st.just({"throws": True}),
        ),
        count=st.integers(1, 3),
    )
    def inject(self, kind, nth, fault, count):
        error = errno.EIO if "throws" in fault else fault.get("error", 0)
        if error not in (0, *TRANSIENT):
            self.armed[kind].add(error)
            for op in self.ops:
                if op.kind == kind:
                    op.may_fail.add(error)
        self.engine.inject(kind, nth, count=count, **fault)

    @precondition(lambda self: self.open() and self.submitted >= 5)
    @rule()
    def close(self):
        for op in self.ops:
            op.may_fail.add(errno.ECANCELED)
        self.engine.close()
        self.closed = True
        for op in list(self.ops):
            assert op.op.done()
            self.settle(op)
        with pytest.raises(RuntimeError, match="closed"):
            self.engine.add_file(0, "stdin")

    @precondition(lambda self: self.closed)
    @rule()
    def close_again(self):
        self.engine.close()

    def settle(self, op: ModelOp) -> None:
        """Waits for `op` and brings the model up to date with what it did."""
        self.ops.remove(op)
        end = op.offset + op.nbytes
        error = failure(op.op)
        failed = error is not None
        if error is not None:
            assert error.errno in op.may_fail, error
            assert error.op == op.kind
            assert error.got_bytes <= error.wanted_bytes
        before, after = op.memory.bytes[:GUARD], op.memory.bytes[GUARD + op.nbytes :]
        assert bool((before == CANARY).all())
        assert bool((after[:GUARD] == CANARY).all())
        inside = op.memory.bytes[GUARD : GUARD + op.nbytes].numpy().tobytes()
        if op.kind == "read":
            assert failed or inside == bytes(op.file.content[op.offset : end])
            return
        assert inside == op.wrote
        if not failed:
            op.file.content[op.offset : end] = op.wrote
            return
        # Each byte is what it was or what was written; from now on it is known which.
        now = op.file.on_disk()[op.offset : end]
        was = bytes(op.file.content[op.offset : end])
        assert all(n in (w, o) for n, w, o in zip(now, op.wrote, was, strict=True))
        op.file.content[op.offset : end] = now

    @invariant()
    def neighbours_are_intact(self):
        for file in self.files:
            disk = bytearray(file.on_disk())
            for op in self.ops:
                if op.file is file and op.kind == "write":
                    under_way = slice(op.offset, op.offset + op.nbytes)
                    disk[under_way] = file.content[under_way]
            assert disk == file.content

    def drop(self, file: ModelFile) -> None:
        self.files.remove(file)
        for fd in file.fds:
            os.close(fd)

    def teardown(self):
        for op in list(self.ops):
            self.settle(op)
        self.neighbours_are_intact()
        self.engine.close()
        for file in list(self.files):
            self.drop(file)
        assert self.engine.stats["in_flight"] == 0
        assert in_time(lambda: (descriptors(), tasks()), self.before) == self.before


@pytest.mark.parametrize("any_kind", KINDS)
def test_engine_behaves_like_its_model(any_kind):
    class Machine(EngineMachine):
        kind = any_kind

    gc.collect()  # what others left would go in the middle of an example and be missed as ours
    run_state_machine_as_test(Machine, settings=settings(stateful_step_count=25))
