"""native/link/offload_queue: arrays arrive in RAM, copied or added, with torch's bits."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import _native
from tests.support.cuda.fake_driver import CONTEXT, FakeDriver
from tests.support.native.fake_cuda import FakeRuntime

BUFFERS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class GatedDriver(FakeDriver):
    """Of whose copies nobody hears that they are done while `gate` is not set; those whose numbers
    are in `failing` fail."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__(runtime)
        self.copies = 0
        self.failing: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self._copy_of: dict[int, int] = {}  # by event

    def cuMemcpyDtoHAsync_v2(self, *arguments: int) -> int:
        self.copies += 1
        return super().cuMemcpyDtoHAsync_v2(*arguments)

    def cuEventRecord(self, event: int, stream: int) -> int:
        self._copy_of[event] = self.copies - 1
        return super().cuEventRecord(event, stream)

    def cuEventSynchronize(self, event: int) -> int:
        self.gate.wait()
        failed = self._copy_of[event] in self.failing
        return self.FAILED if failed else super().cuEventSynchronize(event)


class Rig:
    """A queue with buffers of `buffer_bytes`, from a device that is RAM."""

    def __init__(self, buffer_bytes: int = 4096) -> None:
        self.runtime = FakeRuntime(page_lockable=False)
        self.driver = GatedDriver(self.runtime)
        self.memory: list[torch.Tensor] = []
        self.buffers = torch.zeros(BUFFERS * buffer_bytes, dtype=torch.uint8)
        self.queue = self.make(BUFFERS, buffer_bytes)

    def make(self, count: int, buffer_bytes: int) -> _native.OffloadQueue:
        stream, at = self.driver.handle(self.runtime.compute), self.buffers.data_ptr()
        functions = self.driver.functions
        return _native.OffloadQueue(functions, CONTEXT, stream, at, count, buffer_bytes)

    def submit(self, source: torch.Tensor, to: torch.Tensor, add: bool) -> _native.OffloadOp:
        """Both stay until the rig goes."""
        self.memory += [source, to]
        names = {dtype: name for name, dtype in DTYPES.items()}
        return self.queue.submit(
            source.data_ptr(), names[source.dtype], to.data_ptr(), names[to.dtype], len(to), add
        )

    def close(self) -> None:
        self.driver.gate.set()
        self.queue.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def randn(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@given(
    arrays=st.lists(
        st.tuples(
            st.integers(0, 700),
            st.sampled_from(sorted(DTYPES)),
            st.sampled_from(sorted(DTYPES)),
            st.booleans(),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=12,
    ),
    buffer_bytes=st.sampled_from([4, 64, 1000, 4096, 1 << 20]),
)
def test_the_bits_are_torchs(
    arrays: list[tuple[int, str, str, bool, int]], buffer_bytes: int
) -> None:
    rig = Rig(buffer_bytes)
    found, expected, ops = [], [], []
    for seed, (numel, dtype, kept_dtype, add, again) in enumerate(arrays):
        source, kept = randn(numel, DTYPES[dtype], seed), randn(numel, DTYPES[kept_dtype], ~seed)
        wanted = kept.clone().add_(source) if add else kept.clone().copy_(source)
        ops.append(rig.submit(source, kept, add))
        for number in range(1, again + 1):  # which are added in their order
            more = randn(numel, DTYPES[dtype], seed) * 10**number
            wanted += more
            ops.append(rig.submit(more, kept, True))
        found.append(kept)
        expected.append(wanted)
    for op in ops:
        op.wait()
        assert op.done()
    assert all(map(same, found, expected))
    rig.close()


def test_what_needs_no_conversion_is_one_copy(rig: Rig) -> None:
    source, kept = randn(100_000, torch.bfloat16, 0), torch.zeros(100_000, dtype=torch.bfloat16)
    rig.submit(source, kept, False).wait()
    assert same(kept, source)
    assert rig.driver.copies == 1
    rig.submit(source, kept, True).wait()
    assert rig.driver.copies == 1 + -(-200_000 // 4096)


@pytest.mark.parametrize(("add", "nth"), [(False, 1), (True, 0), (True, 3)])
def test_a_part_that_is_lost_fails_its_array_alone(rig: Rig, add: bool, nth: int) -> None:
    sources, kept = torch.ones(4, 16 * 1024), torch.zeros(4, 16 * 1024)  # 16 parts each
    rig.driver.failing.add(nth)
    ops = [rig.submit(s, k, add) for s, k in zip(sources, kept, strict=True)]
    failed = 0 if add else nth
    for number, op in enumerate(ops):
        if number == failed:
            for _ in range(2):
                with pytest.raises(OSError, match="device to RAM failed"):
                    op.wait()
        else:
            op.wait()
            assert bool((kept[number] == 1).all())
    # The rest of a lost array is not copied, but for parts that are under way by then.
    others = 3 * 16 + nth + 1
    assert others <= rig.driver.copies < others + BUFFERS if add else rig.driver.copies == 4


def test_what_is_cancelled_ends_early(rig: Rig) -> None:
    source, kept = torch.ones(40_000), torch.zeros(2, 40_000)
    rig.driver.gate.clear()
    first, second = (rig.submit(source, k, True) for k in kept)
    second.cancel()
    first.cancel()
    rig.driver.gate.set()
    for op in (first, second):
        with pytest.raises(OSError, match="cancel") as caught:
            op.wait()
        assert caught.value.errno == errno.ECANCELED
        op.cancel()
    assert rig.driver.copies <= BUFFERS
    rig.submit(source[:1], kept[0, :1], True).wait()


def test_a_handle_that_goes_takes_its_array_along(rig: Rig) -> None:
    op = rig.submit(torch.ones(40_000), torch.zeros(40_000), True)
    del op
    rig.memory.clear()  # which may go as soon as the handle is gone
    gc.collect()
    rig.submit(torch.ones(1), torch.zeros(1), True).wait()


def test_a_closed_queue_takes_nothing(rig: Rig) -> None:
    for _ in range(2):
        rig.queue.close()
    with pytest.raises(RuntimeError, match="is closed"):
        rig.submit(torch.ones(4), torch.zeros(4), True)


def test_a_forked_child_can_only_close_it(rig: Rig) -> None:
    op = rig.submit(torch.ones(40_000), torch.zeros(40_000), True)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (lambda: rig.submit(torch.ones(4), torch.zeros(4), True), op.cancel):
            try:
                use()
            except RuntimeError:
                refused += 1
        rig.queue.close()
        os._exit(0 if refused == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    op.wait()


def test_impossible_arrays_and_queues_are_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="source_dtype is 'fp8'"):
        rig.queue.submit(1, "fp8", 1, "fp32", 1, True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        rig.queue.submit(1, "fp32", 1, "int8", 1, True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two addresses"):
        rig.queue.submit(0, "fp32", 1, "fp32", 1, True)
    with pytest.raises(ValueError, match="buffers of 3 bytes are none"):
        rig.make(2, 3)
    with pytest.raises(ValueError, match="the driver's cu.* is missing"):
        _native.OffloadQueue({}, 1, 1, rig.buffers.data_ptr(), 2, 4096)
