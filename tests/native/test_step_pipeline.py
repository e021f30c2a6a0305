"""native/step_pipeline: file and RAM give the same bytes, and what happens when things fail."""

import contextlib
import dataclasses
import errno
import gc
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from offload import _native
from tests.update_oracle import Hyper

PIECE = 4096  # elements
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MASTER_BYTES = {"fp32": 0, "bf16": 2, "fp16": 4}
KIND = _native.UpdateKind("bf16", "bf16")
HYPERS = [Hyper(lr=1e-2, weight_decay=0.1), Hyper(lr=1e-3, beta1=0.8)]
SEGMENTS = [
    (0, 1000, 0, 7),
    (1000, 1777, 1, 9),
    (3000, 1000, 0, 5),
]  # with holes that stay as they are


def refusal(kind: str) -> str:
    try:
        _native.IoEngine(kind).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


ENGINES = [
    pytest.param(kind, marks=pytest.mark.skipif(bool(refusal(kind)), reason=refusal(kind)))
    for kind in ("io_uring", "threads")
]


def hypers(step: int, scale: float = 1.0, decoupled: bool = True) -> list[_native.Hyper]:
    changes = {"step": step, "grad_scale": scale, "decoupled": decoupled}
    return [_native.Hyper(**{**dataclasses.asdict(hyper), **changes}) for hyper in HYPERS]


def ram(array: np.ndarray) -> _native.Location:
    return _native.Location(address=array.ctypes.data)


def pipeline_threads() -> list[str]:
    """Names of this process's threads that belong to a pipeline. The kernel lists a thread for a
    moment after it was joined, so the ones that are about to go get the time."""
    deadline = time.monotonic() + 5
    while True:
        names = []
        for path in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                names.append(path.read_text().strip())
        names = [name for name in names if name in ("hetero-stage", "hetero-step")]
        if not names or time.monotonic() > deadline:
            return names
        time.sleep(0.001)


class Pieces:
    """Pieces of one dtype in RAM, with random content and gradients."""

    def __init__(
        self,
        count: int,
        dtype: str,
        grad_dtype: str,
        rule: str = "adam",
        state_dtype: str = "fp32",
    ) -> None:
        self.count = count
        self.kind = _native.UpdateKind(dtype, grad_dtype, rule, state_dtype)
        self.param_bytes = PIECE * BYTES[dtype]
        self.grad_bytes = PIECE * BYTES[grad_dtype]
        self.record_bytes = PIECE * (MASTER_BYTES[dtype] + self.kind.states * BYTES[state_dtype])
        random = np.random.default_rng(0)
        words = {2: np.uint16, 4: np.uint32}
        # Bit patterns of moderate numbers: exponents in the middle, any sign and fraction.
        base = {"fp32": 0x3C000000, "bf16": 0x3C00, "fp16": 0x3000}
        span = {"fp32": 1 << 24, "bf16": 1 << 8, "fp16": 1 << 11}

        def numbers(dtype: str) -> np.ndarray:
            bits = base[dtype] + random.integers(0, span[dtype], PIECE)
            return bits.astype(words[BYTES[dtype]])

        self.params = [numbers(dtype) for _ in range(count)]
        self.grads = [numbers(grad_dtype) for _ in range(count)]
        self.records = []
        for param in self.params:
            record = np.zeros(self.record_bytes, np.uint8)
            if dtype == "fp16":
                record[: 4 * PIECE].view(np.float32)[:] = param.view(np.float16)
            elif dtype == "bf16":
                record[: 2 * PIECE].view(np.uint16)[:] = random.integers(0, 1 << 15, PIECE)
            self.records.append(record)

    def tasks_in_ram(self, order: Sequence[int]) -> list[_native.StepTask]:
        return [
            _native.StepTask(
                key, ram(self.params[key]), ram(self.grads[key]), ram(self.records[key]), SEGMENTS
            )
            for key in order
        ]

    def bytes(self) -> bytes:
        return b"".join(array.tobytes() for array in [*self.records, *self.params, *self.grads])


class Filed:
    """A copy of pieces whose records, and if wanted parameters and gradients, are in a file."""

    def __init__(
        self,
        pieces: Pieces,
        path: Path,
        kind: str,
        buffers: int,
        param_in_file: bool = False,
        grad_in_file: bool = False,
    ) -> None:
        self.pieces = pieces
        self.param_in_file, self.grad_in_file = param_in_file, grad_in_file
        self.params = [param.copy() for param in pieces.params]
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.record_at, self.param_at, self.grad_at = [], [], []
        end = 0
        for offsets, payloads in [
            (self.record_at, pieces.records),
            (self.param_at, pieces.params),
            (self.grad_at, pieces.grads),
        ]:
            for payload in payloads:
                offsets.append(end)
                end += os.pwrite(self.fd, payload.tobytes(), end)
        shape = (pieces.kind, PIECE, param_in_file, grad_in_file)
        self.engine = _native.IoEngine(kind, queue_depth=4, block_bytes=8192)
        self.file = self.engine.add_file(self.fd, str(path))
        self.arena = _native.Arena(buffers * _native.StepPipeline.buffer_bytes(*shape))
        self.pipeline = _native.StepPipeline(self.engine, self.file, self.arena, buffers, *shape)

    def tasks(self, order: Sequence[int]) -> list[_native.StepTask]:
        def payload(in_file: bool, offsets: list[int], arrays: list[np.ndarray], key: int):
            if in_file:
                return _native.Location(file_offset=offsets[key])
            return ram(arrays[key])

        return [
            _native.StepTask(
                key,
                payload(self.param_in_file, self.param_at, self.params, key),
                payload(self.grad_in_file, self.grad_at, self.pieces.grads, key),
                _native.Location(file_offset=self.record_at[key]),
                SEGMENTS,
            )
            for key in order
        ]

    def in_file(self, array: np.ndarray, offset: int) -> bytes:
        return os.pread(self.fd, array.nbytes, offset)

    def bytes(self) -> bytes:
        pieces = self.pieces
        records = [self.in_file(*pair) for pair in zip(pieces.records, self.record_at, strict=True)]
        params = [param.tobytes() for param in self.params]
        if self.param_in_file:
            params = [self.in_file(*pair) for pair in zip(self.params, self.param_at, strict=True)]
        grads = [self.in_file(*pair) for pair in zip(pieces.grads, self.grad_at, strict=True)]
        return b"".join(records + params + grads)

    def close(self) -> None:
        self.pipeline.close()
        self.engine.close()
        os.close(self.fd)


@pytest.fixture
def opened() -> Iterator[list[Filed]]:
    """Whatever a test appends here is closed, and no thread is left."""
    files: list[Filed] = []
    yield files
    for filed in files:
        filed.close()
    assert pipeline_threads() == []


def train_in_ram(pieces: Pieces, steps: int, scale: float = 1.0) -> None:
    pipeline = _native.StepPipeline(None, 0, None, 0, pieces.kind, PIECE, False, False)
    for step in range(1, steps + 1):
        pipeline.submit(pieces.tasks_in_ram(range(pieces.count)), hypers(step, scale))
        pipeline.wait_updated()
    pipeline.close()


def zig_zag(count: int, step: int) -> list[int]:
    order = list(range(count))
    return order if step % 2 else order[::-1]


PLACES = [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("buffers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("param_in_file", "grad_in_file"), PLACES)
@pytest.mark.parametrize(("dtype", "grad_dtype"), [("bf16", "bf16"), ("fp16", "fp32")])
def test_file_and_ram_give_the_same_bytes(
    tmp_path: Path,
    opened: list[Filed],
    kind: str,
    buffers: int,
    param_in_file: bool,
    grad_in_file: bool,
    dtype: str,
    grad_dtype: str,
) -> None:
    count, steps = 5, 4
    pieces = Pieces(count, dtype, grad_dtype)
    filed = Filed(pieces, tmp_path / "file", kind, buffers, param_in_file, grad_in_file)
    opened.append(filed)
    for step in range(1, steps + 1):
        filed.pipeline.submit(filed.tasks(zig_zag(count, step)), hypers(step, 0.5))
        filed.pipeline.wait_updated()
    # Zig-zag: each step begins with what the one before left in the buffers, and only what the
    # buffers do not hold is read, and written.
    hits = (steps - 1) * min(buffers, count)
    param_bytes = pieces.param_bytes if param_in_file else 0
    filed.pipeline.wait_written()
    written = steps * max(0, count - buffers) * pieces.record_bytes
    written += steps * count * param_bytes
    assert filed.pipeline.stats["written_bytes"] == written == filed.engine.stats["written_bytes"]
    filed.pipeline.flush()
    written += min(buffers, count) * pieces.record_bytes
    assert filed.pipeline.stats["written_bytes"] == written == filed.engine.stats["written_bytes"]
    filed.pipeline.flush()
    assert filed.engine.stats["written_bytes"] == written
    train_in_ram(pieces, steps, 0.5)
    assert filed.bytes() == pieces.bytes()

    read = (steps * count - hits) * (pieces.record_bytes + param_bytes)
    read += steps * count * (pieces.grad_bytes if grad_in_file else 0)
    stats = filed.pipeline.stats
    assert stats["tasks"] == steps * count
    assert stats["hits"] == hits
    assert stats["read_bytes"] == read == filed.engine.stats["read_bytes"]
    assert stats["adam_s"] > 0
    assert stats["read_wait_s"] >= 0
    assert stats["write_wait_s"] >= 0


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rule", ["adam", "lion", "adagrad"])
@pytest.mark.parametrize("dtype", BYTES)
def test_tasks_are_updates_of_the_segments(
    tmp_path: Path, opened: list[Filed], dtype: str, rule: str, state_dtype: str
) -> None:
    """In RAM and through buffers: the parts of a record are where the layout says."""
    of = (2, dtype, "bf16", rule, state_dtype)
    pieces, wanted = Pieces(*of), Pieces(*of)
    filed = Filed(pieces, tmp_path / "file", "threads", buffers=1, param_in_file=True)
    opened.append(filed)
    kind = pieces.kind
    pipeline = _native.StepPipeline(None, 0, None, 0, kind, PIECE, False, False)
    master_bytes = MASTER_BYTES[dtype]
    for step in range(1, 4):
        now = hypers(step, decoupled=rule != "adagrad")
        pipeline.submit(pieces.tasks_in_ram(range(2)), now)
        pipeline.wait_updated()
        filed.pipeline.submit(filed.tasks(range(2)), now)
        filed.pipeline.flush()
        for key, (first, numel, hyper, index) in itertools.product(range(2), SEGMENTS):
            record = wanted.records[key].ctypes.data
            states = record + PIECE * master_bytes
            _native.update(
                kind,
                wanted.params[key].ctypes.data + first * BYTES[dtype],
                wanted.grads[key].ctypes.data + first * 2,
                record + first * master_bytes if master_bytes else 0,
                [states + (i * PIECE + first) * BYTES[state_dtype] for i in range(kind.states)],
                numel,
                now[hyper],
                index,
            )
    pipeline.close()
    assert pieces.bytes() == wanted.bytes()
    assert filed.bytes() == wanted.bytes()


@pytest.mark.parametrize("kind", ENGINES)
def test_several_steps_queued_at_once(tmp_path: Path, opened: list[Filed], kind: str) -> None:
    """The same key again while its buffer is in use, being written, or given to another."""
    pieces = Pieces(3, "bf16", "bf16")
    filed = Filed(pieces, tmp_path / "file", kind, buffers=2, param_in_file=True)
    opened.append(filed)
    for step in range(1, 9):
        filed.pipeline.submit(filed.tasks([step % 3, 0, 0, (step + 1) % 3]), hypers(step))
    filed.pipeline.flush()
    pipeline = _native.StepPipeline(None, 0, None, 0, KIND, PIECE, False, False)
    for step in range(1, 9):
        order = [step % 3, 0, 0, (step + 1) % 3]
        pipeline.submit(pieces.tasks_in_ram(order), hypers(step))
    pipeline.wait_updated()
    assert filed.bytes() == pieces.bytes()
    pipeline.close()


@pytest.mark.parametrize("kind", ENGINES)
def test_ram_and_file_tasks_mix(tmp_path: Path, opened: list[Filed], kind: str) -> None:
    pieces = Pieces(4, "bf16", "fp32")
    filed = Filed(pieces, tmp_path / "file", kind, 2, param_in_file=True, grad_in_file=True)
    opened.append(filed)
    moved = [array.copy() for array in (pieces.params[1], pieces.records[1])]
    tasks = filed.tasks(range(4))
    tasks[1] = _native.StepTask(1, ram(moved[0]), ram(pieces.grads[1]), ram(moved[1]), SEGMENTS)
    record = _native.Location(file_offset=filed.record_at[2])
    tasks[2] = _native.StepTask(2, ram(filed.params[2]), ram(pieces.grads[2]), record, SEGMENTS)
    filed.pipeline.submit(tasks, hypers(1))
    filed.pipeline.flush()
    train_in_ram(pieces, steps=1)
    assert moved[0].tobytes() == pieces.params[1].tobytes()
    assert moved[1].tobytes() == pieces.records[1].tobytes()
    assert filed.params[2].tobytes() == pieces.params[2].tobytes()
    for key in (0, 2, 3):
        record = pieces.records[key]
        assert filed.in_file(record, filed.record_at[key]) == record.tobytes()
    for key in (0, 3):
        param = pieces.params[key]
        assert filed.in_file(param, filed.param_at[key]) == param.tobytes()


@pytest.mark.parametrize("kind", ENGINES)
def test_a_payload_that_was_in_ram_is_not_taken_from_the_buffer(
    tmp_path: Path, opened: list[Filed], kind: str
) -> None:
    pieces = Pieces(1, "bf16", "bf16")
    filed = Filed(pieces, tmp_path / "file", kind, 1, param_in_file=True)
    opened.append(filed)
    filed.pipeline.submit(filed.tasks([0]), hypers(1))
    filed.pipeline.flush()
    # The parameter goes to RAM for one step and comes back to the file.
    param = np.frombuffer(filed.in_file(filed.params[0], 0 + filed.param_at[0]), np.uint16).copy()
    record = _native.Location(file_offset=filed.record_at[0])
    task = _native.StepTask(0, ram(param), ram(pieces.grads[0]), record, SEGMENTS)
    filed.pipeline.submit([task], hypers(2))
    filed.pipeline.flush()
    os.pwrite(filed.fd, param.tobytes(), filed.param_at[0])
    filed.pipeline.submit(filed.tasks([0]), hypers(3))
    filed.pipeline.flush()
    train_in_ram(pieces, steps=3)
    assert filed.bytes() == pieces.bytes()


@pytest.mark.parametrize("kind", ENGINES)
def test_forget_makes_the_next_task_read_the_file(
    tmp_path: Path, opened: list[Filed], kind: str
) -> None:
    pieces = Pieces(2, "bf16", "bf16")
    filed = Filed(pieces, tmp_path / "file", kind, buffers=2)
    opened.append(filed)
    before = filed.bytes()
    filed.pipeline.submit(filed.tasks([0, 1]), hypers(1))
    filed.pipeline.wait_updated()
    filed.pipeline.forget(1)
    after = filed.in_file(pieces.records[1], filed.record_at[1])
    assert after != before[filed.record_at[1] :][: len(after)]
    filed.pipeline.submit(filed.tasks([0, 1]), hypers(2))
    filed.pipeline.wait_updated()
    assert filed.pipeline.stats["hits"] == 1  # key 0
    filed.pipeline.forget()
    filed.pipeline.submit(filed.tasks([0, 1]), hypers(3))
    filed.pipeline.flush()
    assert filed.pipeline.stats["hits"] == 1
    train_in_ram(pieces, steps=3)
    assert filed.bytes() == pieces.bytes()


@pytest.mark.parametrize("kind", ENGINES)
def test_a_key_is_waited_for_or_flushed_alone(
    tmp_path: Path, opened: list[Filed], kind: str
) -> None:
    pieces = Pieces(6, "bf16", "bf16")
    filed = Filed(pieces, tmp_path / "file", kind, buffers=3, param_in_file=True)
    opened.append(filed)
    filed.pipeline.submit(filed.tasks(range(6)), hypers(1))
    train_in_ram(pieces, steps=1)
    for key in (2, 0, 5, 1):
        filed.pipeline.wait_written(key)
        param = pieces.params[key]
        assert filed.in_file(param, filed.param_at[key]) == param.tobytes()
    # The last three records are in buffers only.
    filed.pipeline.wait_written()
    for key, record in enumerate(pieces.records):
        assert (filed.in_file(record, filed.record_at[key]) == record.tobytes()) == (key < 3)
    filed.pipeline.flush(4)
    for key, record in enumerate(pieces.records):
        assert (filed.in_file(record, filed.record_at[key]) == record.tobytes()) == (
            key in (0, 1, 2, 4)
        )
    for key in (77, -1):  # 77 was never submitted
        filed.pipeline.wait_written(key)
        filed.pipeline.flush(key)
    assert filed.bytes() == pieces.bytes()


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("nth", [0, 7])
@pytest.mark.parametrize("buffers", [1, 3])
def test_a_failed_read_stops_everything(
    tmp_path: Path, opened: list[Filed], kind: str, nth: int, buffers: int
) -> None:
    pieces = Pieces(4, "bf16", "bf16")
    filed = Filed(pieces, tmp_path / "file", kind, buffers)
    opened.append(filed)
    filed.engine.inject("read", nth, error=errno.EIO)
    filed.pipeline.submit(filed.tasks(range(4)), hypers(1))
    with pytest.raises(_native.NativeIoError) as caught:
        filed.pipeline.wait_updated()
    assert caught.value.errno == errno.EIO
    assert caught.value.op == "read"
    for refuses in (
        filed.pipeline.wait_updated,
        filed.pipeline.wait_written,
        filed.pipeline.forget,
        lambda: filed.pipeline.submit(filed.tasks([0]), hypers(2)),
    ):
        with pytest.raises(_native.NativeIoError):
            refuses()
    filed.pipeline.close()
    assert pipeline_threads() == []


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("wait", ["wait_updated", "wait_written"])
def test_a_failed_write_stops_everything(
    tmp_path: Path, opened: list[Filed], kind: str, wait: str
) -> None:
    pieces = Pieces(4, "bf16", "bf16")
    filed = Filed(pieces, tmp_path / "file", kind, buffers=1)
    opened.append(filed)
    filed.engine.inject("write", 0, error=errno.ENOSPC)
    filed.pipeline.submit(filed.tasks(range(4)), hypers(1))
    with pytest.raises(_native.NativeIoError) as caught:
        getattr(filed.pipeline, wait)()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.op == "write"
    assert filed.pipeline.stats["tasks"] < 4
    filed.pipeline.close()
    assert pipeline_threads() == []


@pytest.mark.parametrize("kind", ENGINES)
def test_the_last_writes_failure_is_not_lost(
    tmp_path: Path, opened: list[Filed], kind: str
) -> None:
    pieces = Pieces(1, "bf16", "bf16")
    filed = Filed(pieces, tmp_path / "file", kind, buffers=1, param_in_file=True)
    opened.append(filed)
    filed.engine.inject("write", 0, error=errno.EIO)
    filed.pipeline.submit(filed.tasks([0]), hypers(1))
    while filed.pipeline.stats["tasks"] == 0:
        time.sleep(0.001)
    filed.pipeline.close()
    with pytest.raises(_native.NativeIoError):
        filed.pipeline.wait_written(0)


@pytest.mark.parametrize("kind", ENGINES)
def test_close_in_the_middle_leaves_every_piece_whole(
    tmp_path: Path, opened: list[Filed], kind: str
) -> None:
    rounds = 100
    pieces = Pieces(2, "bf16", "bf16")
    filed = Filed(pieces, tmp_path / "file", kind, buffers=1)
    opened.append(filed)
    for step in range(1, rounds + 1):
        filed.pipeline.submit(filed.tasks([0, 1]), hypers(step))
    filed.pipeline.close()
    filed.pipeline.close()
    assert pipeline_threads() == []
    with pytest.raises(RuntimeError, match="closed before"):
        filed.pipeline.wait_updated()
    with pytest.raises(RuntimeError, match="closed"):
        filed.pipeline.submit(filed.tasks([0]), hypers(1))
    # Every update that was made is whole: in RAM, and in the file but for the record that only the
    # buffer had. That is older by one update, never torn.
    made = int(filed.pipeline.stats["tasks"])
    assert made < 2 * rounds
    pipeline = _native.StepPipeline(None, 0, None, 0, KIND, PIECE, False, False)
    older = pieces.records[(made - 1) % 2].copy()
    for task in range(made):
        older = pieces.records[task % 2].copy()
        pipeline.submit(pieces.tasks_in_ram([task % 2]), hypers(task // 2 + 1))
        pipeline.wait_updated()
    pipeline.close()
    if filed.bytes() != pieces.bytes():
        pieces.records[(made - 1) % 2][:] = older
        assert filed.bytes() == pieces.bytes()


def test_close_of_an_idle_pipeline_lets_waits_return() -> None:
    pieces = Pieces(1, "fp32", "fp32")
    pipeline = _native.StepPipeline(
        None, 0, None, 0, _native.UpdateKind("fp32", "fp32"), PIECE, False, False
    )
    pipeline.submit(pieces.tasks_in_ram([0]), hypers(1))
    pipeline.wait_updated()
    pipeline.close()
    pipeline.wait_updated()
    pipeline.wait_written()
    with pytest.raises(RuntimeError, match="closed"):
        pipeline.submit(pieces.tasks_in_ram([0]), hypers(2))


@pytest.mark.parametrize("kind", ENGINES)
def test_the_pipeline_keeps_engine_and_arena_alive(
    tmp_path: Path, opened: list[Filed], kind: str
) -> None:
    pieces = Pieces(3, "bf16", "bf16")
    filed = Filed(pieces, tmp_path / "file", kind, buffers=2)
    pipeline = filed.pipeline
    tasks = filed.tasks(range(3))
    del filed.engine, filed.arena
    gc.collect()
    pipeline.submit(tasks, hypers(1))
    pipeline.flush()
    train_in_ram(pieces, steps=1)
    assert filed.bytes() == pieces.bytes()
    pipeline.submit(tasks, hypers(2))
    del filed.pipeline, pipeline  # the destructor closes
    assert pipeline_threads() == []
    os.close(filed.fd)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_forked_child_neither_works_nor_hangs(
    tmp_path: Path, opened: list[Filed], kind: str
) -> None:
    pieces = Pieces(3, "bf16", "bf16")
    filed = Filed(pieces, tmp_path / "file", kind, buffers=2)
    opened.append(filed)
    filed.pipeline.submit(filed.tasks(range(3)), hypers(1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            filed.pipeline.wait_updated()
        except RuntimeError:
            code = 0
        filed.pipeline.close()
        del filed.pipeline
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    filed.pipeline.flush()
    train_in_ram(pieces, steps=1)
    assert filed.bytes() == pieces.bytes()


def test_bad_pipelines_are_refused() -> None:
    shape = (KIND, PIECE, False, False)
    assert _native.StepPipeline.buffer_bytes(*shape) == 10 * PIECE
    for names, nbytes in [
        (("fp32", "fp32"), 16),
        (("fp16", "bf16"), 16),
        (("bf16", "bf16", "lion", "bf16"), 8),
    ]:
        kind = _native.UpdateKind(*names)
        assert _native.StepPipeline.buffer_bytes(kind, PIECE, True, True) == nbytes * PIECE
    for numel in (0, 1000, PIECE + 1):
        with pytest.raises(ValueError, match=f"piece_numel is {numel}"):
            _native.StepPipeline.buffer_bytes(KIND, numel, False, False)
    engine, arena = _native.IoEngine("threads"), _native.Arena(10 * PIECE)
    with pytest.raises(ValueError, match="2 buffers of 40960 bytes"):
        _native.StepPipeline(engine, 0, arena, 2, *shape)
    with pytest.raises(ValueError, match="buffers is 0"):
        _native.StepPipeline(engine, 0, arena, 0, *shape)
    with pytest.raises(ValueError, match="arena"):
        _native.StepPipeline(engine, 0, None, 1, *shape)
    with pytest.raises(TypeError):
        _native.StepPipeline(None, 0, None, 0, None, PIECE, False, False)
    engine.close()


def test_bad_tasks_are_refused_and_nothing_is_queued() -> None:
    pieces = Pieces(1, "bf16", "bf16")
    engine, arena = _native.IoEngine("threads"), _native.Arena(10 * PIECE)
    pipeline = _native.StepPipeline(engine, 0, arena, 1, KIND, PIECE, False, False)
    no_engine = _native.StepPipeline(None, 0, None, 0, KIND, PIECE, False, False)
    lion = _native.StepPipeline(
        None, 0, None, 0, _native.UpdateKind("bf16", "bf16", "lion"), PIECE, False, False
    )
    param, grad, record = ram(pieces.params[0]), ram(pieces.grads[0]), ram(pieces.records[0])
    filed = _native.Location(file_offset=8192)

    def task(key=3, param=param, grad=grad, record=record, segments=((0, PIECE, 0, 0),)):
        return _native.StepTask(key, param, grad, record, segments)

    before = pieces.bytes()
    for bad, fact in [
        (task(key=-1), "key"),
        (task(param=_native.Location()), "param has neither"),
        (task(grad=_native.Location(64, 4096)), "grad has both"),
        (task(record=_native.Location(file_offset=100)), "100 is not a multiple of 4096"),
        (task(param=filed), "no room"),
        (task(segments=[(1, PIECE, 0, 0)]), "outside the piece of 4096"),
        (task(segments=[(0, PIECE + 1, 0, 0)]), "outside"),
        (task(segments=[(10, 10, 0, 0), (0, 11, 0, 0)]), "overlaps"),
        (task(segments=[(0, 10, 2, 0)]), "hyper-parameters 2 of 2"),
    ]:
        with pytest.raises(ValueError, match=rf"StepTask (3|-1): .*{fact}"):
            pipeline.submit([task(), bad], hypers(1))
    with pytest.raises(ValueError, match="no engine"):
        no_engine.submit([task(record=filed)], hypers(1))
    with pytest.raises(ValueError, match="decoupled"):
        lion.submit([task()], hypers(1, decoupled=False))
    pipeline.flush()
    assert pipeline.stats["tasks"] == 0
    assert pieces.bytes() == before
    for closing in (pipeline, no_engine, lion, engine):
        closing.close()
